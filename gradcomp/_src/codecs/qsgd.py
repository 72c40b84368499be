"""QSGD: the codec of few levels, stochastic rounding, and a scale for each bucket."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import numpy as np
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs import around, contractions, quantizing
from gradcomp._src.codecs.protocol import Codec, as_float32
from gradcomp._src.codecs.sums.records import Context, Encoded, Leaf, Rounding
from gradcomp._src.kernels import quantize, rules
from gradcomp._src.kernels.common import planes, scales
from gradcomp._src.kernels.gpu import dispatch

ScaleNorm = Literal["max", "l2", "rms"]
Levels = Literal["sign_magnitude", "uniform", "nonuniform"]

_BITS = checks.integer("1 to 8 or 16", such=(*range(1, 9), 16).__contains__)

# The distance of 2, 4, 8 and 16 equally spaced levels, half of them on each side of
# zero, that has the least squared error for Gaussian numbers of variance 1.
_STEPS = {1: 1.596, 2: 0.996, 3: 0.586, 4: 0.335}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QSGD(quantizing.Levels, quantizing.SharedScales):
  r"""Quantizes each element to one of a few levels of its bucket's norm.

  With :math:`s` intervals and the scale :math:`\lVert v \rVert` of a bucket,

  .. math:: Q_s(v_i) = \lVert v \rVert \, \mathrm{sgn}(v_i) \, \xi_i / s

  where :math:`\xi_i` is :math:`s |v_i| / \lVert v \rVert`, rounded up or down to an
  integer: up with a probability equal to the fraction.

  ==================  =================  =========================================
  ``levels``          ``s``              levels
  ==================  =================  =========================================
  ``sign_magnitude``  ``2**(bits-1)-1``  a sign bit, magnitudes 0, 1, ..., s; needs
                                         bits >= 2; zeros stay zeros
  ``uniform``         ``2**bits-1``      s equal intervals of [-norm, norm]; zero is
                                         not a level, zero buckets stay zeros
  ``nonuniform``      ``2**bits-1``      s intervals of [-norm, norm] that are small
                                         where many elements are; 2, 3 or 4 bits
  ==================  =================  =========================================

  A payload has ``32 / floor(32 / bits)`` bits an element and 32 bits a bucket.
  Stochastic rounding is unbiased. Its variance is at most
  :math:`\min(n/s^2, \sqrt{n}/s) \lVert v \rVert_2^2` with ``norm="l2"`` and
  ``sign_magnitude``. Nearest rounding (ties away from zero) is biased. Error feedback
  refuses 2 random bits in buckets of more than 128 elements: see ``contraction`` of
  :class:`gradcomp.codecs.Codec`.

  Attributes:
    bits: bits of a code, 1 to 8 or 16; with ``sign_magnitude`` 2 or more. Default: 4.
    bucket_size: consecutive elements that share a scale, a multiple of 32; None for one
      scale a tensor, and one a row of ``512 * floor(32 / bits)`` elements where an
      owner encodes again. Default: 512.
    norm: the scale of a bucket: ``"max"``, ``"l2"``, or ``"rms"``, for ``uniform``
      levels in buckets at 1 to 4 bits. These are then 1.596, 0.996, 0.586 or 0.335 of
      the root mean square apart, which has the least error for Gaussian buckets, and
      larger elements are clipped, which is a bias. The paper found ``"max"`` more
      accurate than ``"l2"``. Default: ``"max"``.
    levels: ``"sign_magnitude"``, ``"uniform"`` or ``"nonuniform"``, see
      :class:`gradcomp.codecs.QSGD`. Non-uniform ones are multiples of 1/256 of the
      norm, symmetric about zero, with the least variance of stochastic rounding. They
      are fitted to the gradients of all workers and leaves, and travel in every row, as
      in `ZipML <https://arxiv.org/abs/1611.05402>`_, 2017, section 3.
      Default: ``"sign_magnitude"``.
    rounding: ``"stochastic"`` or ``"nearest"``. Default: ``"stochastic"``.
    share_scale: whether all workers encode with the largest of their norms, which the
      exchange finds first; True or False. Rows then carry no scales, and codes add up
      as exact integers: ``psum`` and ``two_shot`` round nothing after the first
      encoding. Default: False.
    rotate: elements of a group, 8 or 32, at 1, 2 or 4 bits, over which each of them is
      spread before encoding, and gathered after the last sum, so that a few large
      elements no longer set the scale; or None. A NaN spoils all 8 buckets of its
      group. Default: None.
    refit_every: steps between two fits of ``nonuniform`` levels, 1 or more. Default:
      100.
    implementation: the encoder; see :class:`gradcomp.codecs.Codec`. Default: None.

  Example:
    >>> codec = QSGD(bits=4, rounding="nearest")
    >>> x = jnp.array([7., -3., 0.4, 2.6])
    >>> payload = codec.encode(x)
    >>> codec.decode(payload, like=x)
    Array([ 7., -3.,  0.,  3.], dtype=float32)
    >>> payload.rows.shape  # one tile: 512 words, 8 scales
    (1, 520)

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning
    <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, sections 2.3, 3.2.2 and 4;
    Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017
  """

  bits: int = checks.field(4, _BITS)
  bucket_size: int | None = checks.field(512, checks.TENSOR_BUCKET)
  norm: ScaleNorm = checks.field("max", checks.choice(ScaleNorm))
  levels: Levels = checks.field("sign_magnitude", checks.choice(Levels))
  rounding: Rounding = checks.field("stochastic", checks.choice(Rounding))
  share_scale: bool = checks.field(False, checks.FLAG)
  rotate: int | None = checks.field(None, quantizing.ROTATE)
  refit_every: int = checks.field(100, checks.STEPS)
  implementation: dispatch.Implementation | None = checks.field(None, dispatch.RULE)

  def __post_init__(self) -> None:
    super().__post_init__()
    bits, norm, levels, rotate = self.bits, self.norm, self.levels, self.rotate
    uneven, clipped = levels == "nonuniform", norm == "rms"
    eights, few = bits in (1, 2, 4), bits in (2, 3, 4)
    refused: dict[str, Any] = {
      '`bits` must be at least 2 with levels="sign_magnitude", as one bit is the sign, '
      'got 1; use levels="uniform".': (bits, levels) == (1, "sign_magnitude"),
      f"`bits` must be 1, 2 or 4 with rotate={rotate}, got {bits}; a group needs words "
      "of 8, 16 or 32 codes.": rotate and not eights,
      f'`rotate` must be None with levels="nonuniform", got {rotate}; rotated elements '
      'are nearly Gaussian: use norm="rms" for them.': rotate and uneven,
      f'`bits` must be 2, 3 or 4 with levels="nonuniform", got {bits}; with more '
      'levels use levels="uniform", which is as good.': uneven and not few,
      f'`norm` must be "max" with levels="nonuniform", got {norm!r}.': uneven
      and norm != "max",
      '`share_scale` must be False with levels="nonuniform", got True; codes of fitted '
      "levels cannot be added.": uneven and self.share_scale,
      '`levels` must be "uniform" with norm="rms", whose equal steps have no level at '
      f"zero, got {levels!r}.": clipped and levels != "uniform",
      f'`bits` must be 1 to 4 with norm="rms", got {bits}; more levels need no '
      'clipping: use norm="max".': clipped and bits > 4,
      '`bucket_size` must be a number with norm="rms", got None; one scale would clip '
      "the large parts of a tensor in every step.": clipped and not self.bucket_size,
    }
    for reason, holds in refused.items():
      if holds:
        raise ValueError(reason)

  @property
  def papers(self) -> tuple[str, ...]:
    levels = ("zhang2017zipml",) if self.levels == "nonuniform" else ()
    return ("grubic2018synchronous", "alistarh2017qsgd", *levels)

  @property
  def unbiased(self) -> bool:
    return super().unbiased and self.norm != "rms"

  @property
  def contraction(self) -> float:
    draws, size = self.needs_key, self.bucket_size
    if self.norm == "rms":  # clipped parts come later
      return (0.3, 0.45, 0.6, 0.65)[self.bits - 1]
    uneven = self.levels == "sign_magnitude"
    intervals = 2 ** (self.bits - 1) - 1 if uneven else (2**self.bits - 1) / 2
    if self.norm == "l2":
      energy = contractions.of_lengths(intervals, size, draws=draws or not uneven)
    else:
      shared = contractions.SHARING if self.share_scale and size else 1
      energy = contractions.of_levels(intervals, size and shared * size, draws=draws)
    return contractions.of_energy(energy, draws=draws)

  def to_nearest(self) -> "QSGD":
    """Returns the codec that rounds to nearest; this one if that has no contraction."""
    # With 1 bit and "max" every element would be as large as the largest. With an l2
    # norm and few levels all would be zeros, and owners would send nothing.
    nearest = super().to_nearest()
    return nearest if nearest.contraction > 0 else self

  @property
  def without_key(self) -> str:
    size = "" if self.bucket_size else ", a bucket_size"
    cure = f', or choose norm="rms"{size} and rounding="nearest"'
    return super().without_key or cure

  def bind(self, leaf: Leaf) -> Codec:
    """Returns the codec of a leaf: of fitted levels, or of rotated elements."""
    if self.levels == "nonuniform":
      return around.Fitted(codec=self)
    return around.Rotated(codec=self) if self.rotate else self

  @functools.cached_property
  def form(self) -> rules.Equal:
    words, inline = self.bucket_size or quantizing.TENSOR_ROW, not self.share_scale
    levels: Any = self.levels  # fitted ones have a form of their own
    return rules.Equal(bits=self.bits, bucket_size=words, levels=levels, inline=inline)

  operation = quantize

  @property
  def max_code(self) -> int:
    return self.form.intervals

  def filled(self, x: Array) -> Array:
    """For ``norm="rms"``, fills the last bucket with copies of its elements."""
    if self.norm != "rms" or self.bucket_size is None:
      return x
    return planes.filled(x.reshape(-1), self.bucket_size)

  @property
  def _scales_inside(self) -> bool:
    bucketed = self.bucket_size is not None and self.norm == "max"
    return bucketed and not self.share_scale

  def scales_for(self, x: Array) -> Array | None:
    if self._scales_inside:
      return None
    count = self.form.planes
    if self.norm != "rms":
      return scales.scales(quantizing.scales_of(x, count, self.bucket_size, self.norm))
    assert self.bucket_size is not None
    lengths = quantizing.scales_of(x, count, self.bucket_size, "l2")
    outermost = (2**self.bits - 1) / 2 * _STEPS[self.bits]  # for a mean square of 1
    return scales.scales(lengths * np.float32(outermost / math.sqrt(self.bucket_size)))

  @functools.partial(jax.jit, static_argnums=0)  # each shape is traced once
  def leaf_statistics(self, x: Array) -> tuple[Array, None]:
    """Returns the scales: ``float32[1, 1]``, or ``float32[rows, P]`` of buckets."""
    found = self.scales_for(self.filled(as_float32(x)))
    assert found is not None  # no encoder finds what workers share
    return found, None

  def encode_leaf(self, x: Array, context: Context, *, keep: bool = False) -> Encoded:
    if not keep or not self._scales_inside:
      return super().encode_leaf(x, context)
    leaf = as_float32(x).reshape(x.shape)
    return self.encode_by(None, leaf, context, keep=True)

  def codes(self, rows: Array) -> Array:
    return rules.signed_codes(rows, self.form)
