"""FloatCast: the codec of floats of few bits, scaled by leaf or by a constant."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs import contractions
from gradcomp._src.codecs.protocol import Codec, as_float32, codec_dither
from gradcomp._src.codecs.sums import numbers, records
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.kernels import float_cast
from gradcomp._src.kernels.common import float_formats, planes, scales
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.kernels.common.float_codes import FloatRounding
from gradcomp._src.kernels.float_cast import reference
from gradcomp._src.kernels.gpu import dispatch


def _scale(name: str, value: Any) -> Any:
  rule = 'a number from 2**-126 to 2**126, or "auto"'
  return value if value == "auto" else checks.static_factor(name, rule, value)


_SCALE = checks.Rule(_scale, outside=(0, 2.0**127, "none"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FloatCast(Codec):
  r"""Casts to an IEEE float of few bits, scaled so that sums just fit: APS.

  With ``scale="auto"``, Auto Precision Scaling, a leaf is multiplied by the largest
  power of two with which no sum of N workers' elements can overflow. The sum is divided
  by it:

  .. math:: Q(g) = 2^{-f} \, \mathrm{cast}(2^f g), \qquad
     f = 2^{e - 1} - 1 - \max_{workers} \lceil \log_2 (N \max_i |g_i|) \rceil

  The workers agree on that exponent, one byte a leaf, before anyone casts. Elements
  underflow that lie more than the format's range below the largest one. A number for
  ``scale`` is the baseline, loss scaling: one constant factor for all leaves, with
  which elements may overflow to infinity.

  Every partial sum is rounded to the format, in every exchange, so that all that
  crosses the wire is in it. The codec is biased. Stochastic rounding makes only the
  cast unbiased: partial sums are rounded to nearest even in any case. A payload has 4,
  8, 16 or 32 bits an element, the fewest that hold 1 + e + m, in rows of 128 words, and
  a byte a leaf.

  With ``"auto"``, a leaf of elements below 2**-126 decodes to zeros. With a constant
  factor each element is by itself: NaN and infinities stay (both are NaN without
  mantissa bits), and a number that is too large becomes infinite.

  The codec departs from the paper in three ways. The byte holds the exponent less
  :math:`\lceil \log_2 N \rceil`, so that it never overflows. A layer of zeros has an
  exponent, where the paper takes the logarithm of zero. A sum that is too large because
  addends were rounded up becomes the largest number; this may happen with stochastic
  rounding, and with ``kahan`` or ``float32`` in formats of two or three exponent bits.

  Attributes:
    exponent_bits: e, bits of the exponent, 1 to 8. Default: 5.
    mantissa_bits: m, bits of the mantissa, 0 to 23; 1 or more with one exponent bit.
      The paper uses (5, 2), (4, 3) and (3, 0). Default: 2.
    rounding: the rule of the cast: ``"nearest_even"``, as in the paper,
      ``"stochastic"`` or ``"toward_zero"``. Default: ``"nearest_even"``.
    scale: ``"auto"``, or a constant factor from 2**-126 to 2**126; 1 is a plain cast.
      Default: ``"auto"``.
    accumulate: how workers' numbers are added. ``"format"`` rounds each partial sum, as
      in the paper. ``"kahan"`` is Kahan's compensated summation in the format; its
      compensation travels around a ring, and doubles the bytes there. ``"float32"``
      adds in float32, and rounds what it sends on, in a ring each addition. Default:
      ``"format"``.
    addends: the number of addends that the scale has room for, 1 or more and below
      2**23; exchanges set it to N. Default: 1.
    implementation: the encoder; see :class:`gradcomp.codecs.Codec`. Default: None.

  Raises:
    ValueError: a hyperparameter is outside these; there is one exponent bit and no
      mantissa; or the largest element would be cast to zero, to leave room for all
      addends (64 with (3, 0)).

  Example:
    >>> codec = FloatCast(exponent_bits=4, mantissa_bits=3)
    >>> x = jnp.array([3.0, -1.1, 0.0]) * 2.0**-60
    >>> payload = codec.encode(x)
    >>> codec.decode(payload, like=x) * 2.0**60, payload.agreed
    (Array([ 3.   , -1.125,  0.   ], dtype=float32), Array([[68]], dtype=uint8))

  References:
    Han et al., `APS <https://arxiv.org/abs/1911.08907>`_, 2021, sections 3, 4.1 and
    4.2, algorithm 1
  """

  exponent_bits: int = checks.field(5, float_formats.EXPONENT_BITS)
  mantissa_bits: int = checks.field(2, float_formats.MANTISSA_BITS)
  rounding: FloatRounding = checks.field("nearest_even", checks.choice(FloatRounding))
  scale: float | Literal["auto"] = checks.field("auto", _SCALE)
  accumulate: records.Accumulate = checks.field(
    "format", checks.choice(records.Accumulate)
  )
  addends: int = checks.field(
    1, checks.integer("a number of addends, 1 or more", 1, 2**23 - 1)
  )
  implementation: dispatch.Implementation | None = checks.field(None, dispatch.RULE)

  row_words: ClassVar[int] = reference.Form.bucket_size

  def __post_init__(self) -> None:
    super().__post_init__()
    if not self.format.max_finite:
      raise ValueError(
        "`mantissa_bits` must be 1 or more with one exponent bit, got 0: the format "
        "has no number but zero."
      )
    room = 2.0**self.format.max_exponent / self.addends
    if self.scale == "auto" and room <= self.format.smallest / 2:
      raise ValueError(
        "`exponent_bits` must leave room for the sum of all workers' numbers, got "
        f"{self.exponent_bits}, with {self.mantissa_bits} mantissa bits and "
        f"{self.addends} workers: scaled so that it cannot overflow, even the largest "
        "element would be cast to zero. Use more bits, or a constant scale."
      )

  @property
  def papers(self) -> tuple[str, ...]:
    scaled = ("micikevicius2017mixed", "han2021aps/scaled")
    return ("han2021aps",) if self.scale == "auto" else scaled

  @property
  def format(self) -> float_formats.FloatFormat:
    """The number format."""
    return float_formats.FloatFormat(self.exponent_bits, self.mantissa_bits)

  @property
  def contraction(self) -> float:
    fmt, draws = self.format, self.needs_key
    lost = contractions.of_floats(2.0**-self.mantissa_bits, self.rounding)
    if self.scale == "auto":  # small elements have numbers of equal distances
      top = 2.0**fmt.max_exponent / self.addends
      lost += contractions.of_levels(max(2, top / fmt.smallest / 2), None, draws=draws)
    return contractions.of_energy(lost, draws=draws)

  @property
  def sums(self) -> Sum:
    return numbers.Numbers(self)

  @property
  def needs_key(self) -> bool:
    return self.rounding == "stochastic"

  @property
  def tile_size(self) -> int:
    return planes.planes_per_word(reference.width(self.format)) * self.row_words

  def bind(self, leaf: records.Leaf) -> "FloatCast":
    """Binds the number of addends, so that the scale leaves room for their sum."""
    if leaf.addends is None:
      return self
    return dataclasses.replace(self, addends=leaf.addends)

  def agree(self, x: Array) -> Array | None:
    """Returns the sum's exponent as a byte, ``uint8[1, 1]``; None for a fixed scale."""
    return self._exponent(x) if self.scale == "auto" else None

  @functools.partial(jax.jit, static_argnums=0)  # each shape is traced once
  def _exponent(self, x: Array) -> Array:
    largest = scales.tensor_norm(as_float32(x), "max").reshape(1, 1)
    return reference.exponent_byte(largest, self.addends)

  def encode_leaf(
    self, x: Array, context: records.Context, *, keep: bool = False
  ) -> records.Encoded:
    flat, dither = as_float32(x), codec_dither(self, context)
    if self.scale != "auto":
      return records.Encoded(self._encode(scaled(flat, self.scale), None, dither))
    assert context.agreed is not None
    exponent = reference.shift(context.agreed[0, 0], self.format, self.addends)
    return records.Encoded(self._encode(flat, exponent, dither))

  def encode_rows(self, tiles: Array, context: records.Context) -> Array:
    return self._encode(tiles, None, codec_dither(self, context))

  def decode_rows(self, rows: Array) -> Array:
    return reference.decode_rows(rows, self.format)

  def encode_sums(self, tiles: Array) -> Array:
    """Encodes scaled sums, rounded to nearest even."""
    nearest = dataclasses.replace(self, rounding="nearest_even")
    return nearest.encode_rows(tiles, records.NOTHING)

  def unscaled(self, tiles: Array, agreed: Array | None) -> Array:
    """Divides decoded numbers by the scale: ``float32[rows, P, B]``."""
    if self.scale != "auto":
      return scaled(tiles, 1 / self.scale)
    assert agreed is not None
    return reference.unshifted(tiles, agreed, self.format, self.addends)

  def _encode(self, x: Array, exponent: Array | None, dither: Array | None) -> Array:
    form = reference.Form(self.format, self.rounding, saturate=self.scale == "auto")
    given, by = (x, exponent, dither), self.implementation
    return float_cast.encode_rows(*given, form=form, implementation=by)[0]
