"""Casts arrays to floats of few bits and packs them, and decodes them."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.kernels.common import dithers, fixed_point, float_codes, planes
from gradcomp._src.kernels.common.float_codes import FloatFormat
from gradcomp._src.kernels.gpu import dispatch, tiles
from gradcomp._src.kernels.gpu.tiles import Encoded, Operand

# A byte is an exponent plus 126. The bytes 0 and 255 stand for zero and for NaN.
_BYTE_BIAS = 126
_NOT_FINITE = 255


def width(fmt: FloatFormat) -> int:
  """Returns the bits that a code travels in: 4, 8, 16 or 32."""
  return next(bits for bits in (4, 8, 16, 32) if fmt.bits <= bits)


def exponent_byte(largest: Array, addends: int) -> Array:
  """Returns ``ceil(log2(N a)) - ceil(log2 N)`` as bytes, ``uint8`` like ``largest``."""
  # With `a = f 2**k` and `1 <= f < 2`, the exponent is `k + 1` if `f` is above
  # `2**ceil(log2 N) / N`, else `k`. The byte is the exponent plus 126, and at least 1;
  # 0 for an `a` below 2**-126, and 255 for NaN and infinity.
  bits = planes.float_words(largest)
  limit = ((1 << 23) << (addends - 1).bit_length()) // addends
  above = ((bits & jnp.uint32((1 << 23) - 1)) | jnp.uint32(1 << 23)) > limit
  field = (bits >> 23).astype(jnp.int32)
  byte = jnp.maximum(field - 127 + above.astype(jnp.int32) + _BYTE_BIAS, 1)
  byte = jnp.where(field == 0, 0, byte)
  return jnp.where(jnp.isfinite(largest), byte, _NOT_FINITE).astype(jnp.uint8)


def shift(byte: Array, fmt: FloatFormat, addends: int) -> Array:
  """Returns the power of two with which N largest elements just fit: ``int32``."""
  exponent = byte.astype(jnp.int32) - _BYTE_BIAS + (addends - 1).bit_length()
  return jnp.where(byte == 0, 0, fmt.max_exponent - exponent)


def unshifted(x: Array, byte: Array, fmt: FloatFormat, addends: int) -> Array:
  """Divides ``float32[rows, P, B]`` by ``2**shift``, with bytes ``uint8[rows, 1]``."""
  value = float_codes.times_power_of_two(x, -shift(byte, fmt, addends)[..., None])
  return jnp.where(byte[..., None] == _NOT_FINITE, jnp.nan, value)


@dataclasses.dataclass(frozen=True)
class Form:
  """The static options of the encoder."""

  fmt: FloatFormat
  rounding: float_codes.FloatRounding
  saturate: bool  # whether too large numbers become the largest one, not infinity

  # Words in a row, B. Rows carry no scale: short ones cost nothing, and waste less.
  bucket_size: ClassVar[int] = 128

  @property
  def planes(self) -> int:
    """The number of codes in a word."""
    return planes.planes_per_word(width(self.fmt))

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(self, x: Array, lane: fixed_point.Lane, exponent: Array | None) -> Array:
    """Returns the codes of one plane; a lane rounds them if that is stochastic."""
    rounding: float_codes.FloatRounding | Array = self.rounding
    if rounding == "stochastic":
      assert lane is not None
      rounding = dithers.signed_lane(lane, x) << 16
    return float_codes.to_codes(
      x, self.fmt, rounding=rounding, exponent=exponent, saturate=self.saturate
    )


def encode_reference(
  x: Array, exponent: Operand, dither: Operand, *, form: Form, first_row: int = 0
) -> Encoded:
  """Casts an array, or ``x * 2**exponent``, and packs codes: ``uint32[rows, B]``."""
  rows = []
  for segment in planes.tile_segments(x, form.planes, form.bucket_size):
    each = zip(segment.planes, segment.lanes(dither, first_row), strict=True)
    codes = [form.code(plane, lane, exponent) for plane, lane in each]
    rows.append([planes.pack_planes(codes, width(form.fmt))])
  return planes.stacked(rows, form.bucket_size), None


def decode_rows(rows: Array, fmt: FloatFormat) -> Array:
  """Decodes ``uint32[..., rows, B]`` to numbers, ``float32[..., rows, P, B]``."""
  codes = planes.unpack_planes(rows, width(fmt))
  if width(fmt) > fmt.bits:
    codes = codes & jnp.uint32((1 << fmt.bits) - 1)
  value = float_codes.from_codes(codes, fmt)
  return value if fmt.mantissa_bits else jnp.where(jnp.isinf(value), jnp.nan, value)


@tiles.completed(encode_reference)
def encode_on_gpu(
  x: Array, *operands: Operand, form: Form, interpret: Any = False
) -> Encoded:
  """Encodes as :func:`encode_reference` does, to the same bits."""

  def body(block: tiles.Block, exponent_ref: Any, dither_ref: Any) -> None:
    lanes = block.lanes(dithers.read(dither_ref))
    moved = None if exponent_ref is None else exponent_ref[0]
    codes = (form.code(block.plane(k), next(lanes), moved) for k in range(form.planes))
    block.put(planes.pack_planes(codes, width(form.fmt)))

  exponent, dither = operands
  given = None if exponent is None else exponent.reshape(1), dither
  launch = tiles.Launch("float_cast", [form.bucket_size], interpret)
  return tiles.encode(body, x, given, form, launch)


encode_rows = dispatch.encoder("float_cast", encode_reference, encode_on_gpu)
