"""8-bit data types: codes of a sign and a level of a table, times a scale."""

import dataclasses
import functools
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs import contractions, quantizing
from gradcomp._src.codecs.sums.records import Rounding
from gradcomp._src.kernels import quantize, rules
from gradcomp._src.kernels.common.scales import scales
from gradcomp._src.kernels.gpu import dispatch

DataType = Literal["dynamic_tree", "dynamic_map", "static_tree", "linear", "mantissa"]

_POWER = "a power of ten from -30 to 30, or None to scale by the largest element"
_OFFSET = checks.optional(checks.integer(_POWER, -30, 30))


@functools.cache
def levels(dtype: DataType) -> np.ndarray:
  """Returns the magnitudes of a type, increasing from 0: ``float64[n]``, n <= 128."""
  if dtype == "linear":
    return np.arange(128) / 127
  if dtype == "mantissa":
    # Integers make equal values one: 10 * 10**-1 is 1.
    return np.unique([k * 10**e for k in range(16) for e in range(8)]) / (15 * 10**7)
  decades = [(n, 2 ** (6 - n)) for n in range(6, -1, -1)]
  if dtype == "static_tree":
    decades = [(7 - e, 16) for e in range(8)]
  split = 0.45 if dtype == "dynamic_tree" else 0.55
  numbers = np.concatenate([10.0**-n * _cells(m, split) for n, m in decades])
  return np.append(0.0, numbers[1:] if dtype == "static_tree" else numbers)


def _cells(count: int, split: float) -> np.ndarray:
  """Returns a tree's split points of (0.1, 1), ``split`` first: ``float64[count]``."""
  middles = (np.arange(count) + 0.5) / count
  return np.interp(middles, [0.0, 0.5, 1.0], [0.1, split, 1.0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class EightBit(quantizing.Elementwise):
  r"""Replaces each element by a level of an 8-bit type, times the largest element.

  .. math:: Q(v_i) = \lVert v \rVert_\infty \, \mathrm{sgn}(v_i) \, T[m_i]

  where :math:`T[m_i]` is the level nearest to :math:`|v_i| / \lVert v \rVert_\infty`.
  One bit is the sign. The types use the other seven differently:

  ================  ====================================================================
  ``dtype``         magnitudes
  ================  ====================================================================
  ``dynamic_tree``  n leading zeros stand for :math:`10^{-n}`, then a flag, then the
                    path of 6 - n bits in a tree over (0.1, 1), which is split at 0.45
                    and bisected from then on. The value is the next split point of its
                    cell. From 4.5e-7 to 0.991, and 0
  ``dynamic_map``   the same with a tree that bisects (0.1, 1) at once, and +1 instead
                    of minus zero: the 256 values of bitsandbytes. From 5.5e-7 to 1,
                    and 0
  ``static_tree``   3 bits are an exponent of ten, 4 a path in a tree that bisects
                    (0.1, 1). From 1.8e-8 to 0.972, and 0
  ``linear``        0 to 127, over 127
  ``mantissa``      3 bits are an exponent of ten, 4 an integer up to 15: 114 different
                    values from 0 to 15, over 15
  ================  ====================================================================

  The paper's text splits (0.1, 1) at 0.55 first; its examples of the dynamic tree, and
  its author's program, at 0.45. Its static tree has no zero.

  On N(0, 1), rounded to nearest, mean relative errors are 1.7 % for ``dynamic_tree``
  (the paper: 2.46), 2.0 % for ``dynamic_map``, 5.5 % for ``linear`` (6.47), and 5.0 %
  for ``static_tree`` (6.3) and ``mantissa`` (6.89) with ``exponent_offset=1``.

  A payload has 8 bits an element and 32 a tensor or bucket, in rows of four buckets. A
  largest element below 2**-126 counts as zero.

  Attributes:
    dtype: the 8-bit type: ``"dynamic_tree"``, ``"dynamic_map"``, ``"static_tree"``,
      ``"linear"`` or ``"mantissa"``, see :class:`gradcomp.codecs.EightBit`. Default:
      ``"dynamic_tree"``.
    bucket_size: consecutive elements that share a scale, a multiple of 32; None for one
      scale a tensor, as in the paper. Default: None.
    rounding: ``"nearest"``, which is biased, or ``"stochastic"``, which is unbiased:
      the largest element is the largest level that both signs have. The paper leaves it
      open. Default: ``"nearest"``.
    exponent_offset: k, from -30 to 30, for the fixed scale :math:`10^k` of
      ``static_tree`` and ``mantissa`` (15 stands for :math:`1.5 \cdot 10^k`); None for
      the largest element. Larger elements are cut to the largest level, which is a
      bias. The paper uses 1, and 2 for values near 100. Default: None.
    implementation: the encoder; see :class:`gradcomp.codecs.Codec`. Default: None.

  Example:
    >>> codec = EightBit(dtype="linear")
    >>> x = jnp.array([127., -1., 0., 63.4])
    >>> codec.decode(codec.encode(x), like=x)
    Array([127.,  -1.,   0.,  63.], dtype=float32)

  References:
    Dettmers, `8-Bit Approximations <https://arxiv.org/abs/1511.04561>`_, 2016, section
    3.1
  """

  dtype: DataType = checks.field("dynamic_tree", checks.choice(DataType))
  bucket_size: int | None = checks.field(None, checks.TENSOR_BUCKET)
  rounding: Rounding = checks.field("nearest", checks.choice(Rounding))
  exponent_offset: int | None = checks.field(None, _OFFSET)
  implementation: dispatch.Implementation | None = checks.field(None, dispatch.RULE)

  operation = quantize
  papers: ClassVar[tuple[str, ...]] = ("dettmers2016approximations",)
  contraction: ClassVar[float] = contractions.of_energy(0.05)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.exponent_offset is None or self.dtype in ("static_tree", "mantissa"):
      return
    raise ValueError(
      f"`exponent_offset` must be None with {self.dtype!r}, got {self.exponent_offset}"
      "; only static_tree and mantissa have a fixed scale."
    )

  @property
  def unbiased(self) -> bool:
    return super().unbiased and self.exponent_offset is None

  @functools.cached_property
  def form(self) -> rules.EightBit:
    numbers, has_one = levels(self.dtype), self.dtype == "dynamic_map"
    table, top = np.pad(numbers, (0, 128 - numbers.size)), numbers.size - 1
    lines = rules.lines_between(np.append(numbers, 1.0) if has_one else numbers)
    return rules.EightBit(
      bucket_size=self.bucket_size or quantizing.TENSOR_ROW,
      lines=lines,
      table=tuple(table.astype(np.float32).tolist()),
      last=float(has_one),
      tops=(top + has_one, top),
      up=1.0 if self.rounding == "nearest" else 1 / numbers[-1],
    )

  def scales_for(self, x: Array) -> Array | None:
    """Returns the value of a level of 1; None where the encoder finds the scales."""
    if self.bucket_size is not None and self.exponent_offset is None:
      return None  # so that a kernel reads elements once
    largest = quantizing.scales_of(x, self.form.planes, self.bucket_size)
    if self.exponent_offset is not None:
      unit = 1.5 if self.dtype == "mantissa" else 1.0
      fixed = jnp.float32(unit * 10.0**self.exponent_offset)
      return jnp.where(jnp.isnan(largest), jnp.nan, fixed)
    return self.form.unit(scales(largest))
