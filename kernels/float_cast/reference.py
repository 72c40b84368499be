"""FloatCast's inner loops in jnp: scale by a power of two, cast, pack, and decode.

See docs/inside/wire-format.md for the rule.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gradcomp._src.kernels.common.dithers import signed_lane
from gradcomp._src.kernels.common.fixed_point import Lane, rounding_lanes
from gradcomp._src.kernels.common.float_codes import (
  FloatRounding,
  from_codes,
  times_power_of_two,
  to_codes,
)
from gradcomp._src.kernels.common.float_formats import FloatFormat
from gradcomp._src.kernels.common.planes import (
  float_words,
  pack_planes,
  planes_per_word,
  stacked,
  tile_segments,
  unpack_planes,
)

# A byte is an exponent plus 126. The bytes 0 and 255 stand for zero and for NaN.
_BYTE_BIAS = 126
_NOT_FINITE = 255


def width(fmt: FloatFormat) -> int:
  """Returns the bits that a code travels in: 4, 8, 16 or 32.

  Example:
    >>> [width(FloatFormat(e, m)) for e, m in ((3, 0), (5, 2), (5, 10), (8, 23))]
    [4, 8, 16, 32]
  """
  return next(bits for bits in (4, 8, 16, 32) if fmt.bits <= bits)


def exponent_byte(largest: jax.Array, addends: int) -> jax.Array:
  r"""Returns ``ceil(log2(N a)) - ceil(log2 N)`` as a byte: ``uint8`` like ``largest``.

  The exponent is found exactly, from the bits of :math:`a`. With :math:`a = f 2^k` and
  :math:`1 \le f < 2`, it is ``k + 1`` if :math:`f` is above ``2**ceil(log2 N) / N``,
  and ``k`` if not. The byte is the exponent plus 126, and at least 1. It is 0 for an
  :math:`a` below 2**-126, and 255 for NaN and infinity.

  Args:
    largest: float32, zero or more, or NaN: :math:`a`.
    addends: N.

  Example:
    >>> exponent_byte(jnp.array([0.0, 1.0, 1.5, jnp.nan]), addends=3) - 126
    Array([130,   0,   1, 129], dtype=uint8)
  """
  bits = float_words(largest)
  limit = ((1 << 23) << _ceil_log2(addends)) // addends
  above = ((bits & jnp.uint32((1 << 23) - 1)) | jnp.uint32(1 << 23)) > limit
  field = (bits >> 23).astype(jnp.int32)
  exponent = field - 127 + above.astype(jnp.int32)
  byte = jnp.maximum(exponent + _BYTE_BIAS, 1)
  byte = jnp.where(field == 0, 0, byte)
  return jnp.where(jnp.isfinite(largest), byte, _NOT_FINITE).astype(jnp.uint8)


def shift(byte: jax.Array, fmt: FloatFormat, addends: int) -> jax.Array:
  """Returns the power of two with which N largest elements just fit: ``int32``.

  It is ``factor_exp`` in Han et al., algorithm 1: the largest exponent of the format
  less that of the sum. It is 0 for the byte 0.
  """
  exponent = byte.astype(jnp.int32) - _BYTE_BIAS + _ceil_log2(addends)
  return jnp.where(byte == 0, 0, fmt.max_exponent - exponent)


def unshifted(
  x: jax.Array, byte: jax.Array, fmt: FloatFormat, addends: int
) -> jax.Array:
  """Divides ``float32[rows, P, B]`` by ``2**shift``; NaN where the byte stands for NaN.

  The bytes are ``uint8[rows, 1]``.
  """
  value = times_power_of_two(x, -shift(byte, fmt, addends)[..., None])
  return jnp.where(byte[..., None] == _NOT_FINITE, jnp.nan, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
  """The static options of the encoder."""

  fmt: FloatFormat
  rounding: FloatRounding
  saturate: bool  # whether what is too large becomes the largest number, not infinity
  bucket_size: int  # words in a row, B

  @property
  def planes(self) -> int:
    """The number of codes in a word."""
    return planes_per_word(width(self.fmt))

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(self, x: jax.Array, lane: Lane, exponent: jax.Array | None) -> jax.Array:
    """Returns the codes of one plane, see :func:`to_codes`; 16 random bits round."""
    rounding = self.rounding if lane is None else signed_lane(lane, x) << 16
    return to_codes(
      x, self.fmt, rounding=rounding, exponent=exponent, saturate=self.saturate
    )


def encode_rows(
  x: jax.Array,
  exponent: jax.Array | None,
  dither: jax.Array | None,
  *,
  form: Form,
  first_row: int = 0,
) -> tuple[jax.Array, None]:
  """Casts an array, or ``x * 2**exponent``, and packs the codes.

  Args:
    x: ``float32`` of any shape.
    exponent: ``int32[]`` or None.
    dither: ``uint32[3]`` for stochastic rounding, else None.
    form: the options.
    first_row: the number of the first row, which the random numbers depend on.

  Returns:
    ``uint32[rows, B]``, and no residual.
  """
  rows = []
  for tiles in tile_segments(x.reshape(-1), form.planes, form.bucket_size):
    row = first_row + tiles.first_row
    lanes = rounding_lanes(dither, tiles.shape, form.planes, first_row=row)
    codes = [
      form.code(plane, lane, exponent)
      for plane, lane in zip(tiles.planes, lanes, strict=True)
    ]
    rows.append([pack_planes(codes, width(form.fmt))])
  return stacked(rows, form.bucket_size), None


def decode_rows(rows: jax.Array, fmt: FloatFormat) -> jax.Array:
  """Decodes ``uint32[..., rows, B]`` to numbers, ``float32[..., rows, P, B]``.

  Without mantissa bits, all that is not finite has one code, and decodes to NaN.
  """
  codes = unpack_planes(rows, width(fmt))
  if width(fmt) > fmt.bits:
    codes = codes & jnp.uint32((1 << fmt.bits) - 1)
  value = from_codes(codes, fmt)
  return value if fmt.mantissa_bits else jnp.where(jnp.isinf(value), jnp.nan, value)


def _ceil_log2(count: int) -> int:
  return (count - 1).bit_length()
