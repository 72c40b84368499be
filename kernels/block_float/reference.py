"""BlockFloat's inner loops in jnp: scales of blocks, casts, packing, and decoding."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.kernels.common import dithers, fixed_point, float_codes, planes
from gradcomp._src.kernels.common.fixed_point import Divide
from gradcomp._src.kernels.common.float_formats import FloatFormat
from gradcomp._src.kernels.common.scales import bucket_norms
from gradcomp._src.kernels.gpu.tiles import Encoded

Element = Literal["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"]
Scale = Literal["e8m0", "e4m3"]

ELEMENTS = {
  "e4m3": FloatFormat(4, 3, specials="nan"),
  "e5m2": FloatFormat(5, 2),
  "e3m2": FloatFormat(3, 2, specials="none"),
  "e2m3": FloatFormat(2, 3, specials="none"),
  "e2m1": FloatFormat(2, 1, specials="none"),
}

# A byte of E8M0 is an exponent plus 127; the last one is NaN.
_BYTE_BIAS = 127
_NOT_FINITE = 255

_MANTISSA = np.uint32((1 << 23) - 1)
_UP = np.uint32(0xFFFFFFFF)  # the random bits that round every number up
_LARGEST = np.finfo(np.float32).max
_SMALLEST_NORMAL = np.float32(2.0**-126)


@dataclasses.dataclass(frozen=True)
class Form:
  """The static options of the encoder."""

  element: Element
  scale: Scale
  block_size: int
  up: bool  # whether scales are rounded up, so that no element is clipped

  bucket_size: ClassVar[int] = 128  # words of codes in a row, B

  @property
  def fmt(self) -> FloatFormat:
    """The format of an element."""
    return ELEMENTS[self.element]

  @property
  def planes(self) -> int:
    """The number of codes in a word."""
    return planes.planes_per_word(self.fmt.bits)

  @property
  def blocks(self) -> int:
    """The number of blocks in a row, each with a scale of one byte."""
    return self.planes * self.bucket_size // self.block_size

  @property
  def row_words(self) -> int:
    """The number of words in a row: of codes, of scales, and of the shared scale."""
    return self.bucket_size + self.blocks // 4 + (self.scale == "e4m3")

  @property
  def least_shared(self) -> np.float32:
    """The least shared scale, with which the smallest number is 2**-126."""
    return _SMALLEST_NORMAL / np.float32(ELEMENTS["e4m3"].smallest * self.fmt.smallest)

  def scale_codes(
    self, largest: Array, shared: Array | None, divide: Divide = fixed_point.divide
  ) -> Array:
    """Returns the scales of blocks as bytes, from their largest magnitudes."""
    if shared is not None:
      unit = fixed_point.inverse(1 / self.fmt.max_finite, shared, divide)
      scale = self._whole(largest * unit, shared)
      rounding: Any = jnp.full(largest.shape, _UP) if self.up else "nearest_even"
      fmt = ELEMENTS["e4m3"]
      return float_codes.to_codes(scale, fmt, rounding=rounding, saturate=True)
    # With `f 2**e` for the largest magnitude and `F 2**E` for the format's largest
    # number, where `f` and `F` are from 1 to 2, the exponent is `e - E`. With one more
    # where `f > F`, no element is too large.
    bits = planes.float_words(largest)
    exponent = (bits >> 23).astype(jnp.int32) - self.fmt.max_exponent
    if self.up:
      top = np.float32(self.fmt.max_finite).view(np.uint32) & _MANTISSA
      exponent = exponent + ((bits & _MANTISSA) > top).astype(jnp.int32)
    finite = largest < np.inf  # Pallas for GPUs lowers no jnp.isfinite
    return jnp.where(finite, jnp.maximum(exponent, 0), _NOT_FINITE).astype(jnp.uint32)

  def _whole(self, scale: Array, shared: Array) -> Array:
    """Rounds scales up to multiples of the smallest one, under the least shared one."""
    # So small blocks of small tensors are neither clipped nor zero. Integers round, for
    # which every kernel has an operation.
    unit = np.float32(ELEMENTS["e4m3"].smallest)
    steps = scale * (1 / unit)
    count = steps.astype(jnp.int32)
    count = count + (count.astype(jnp.float32) < steps).astype(jnp.int32)
    whole = count.astype(jnp.float32) * unit
    return jnp.where(shared == self.least_shared, whole, scale)

  def factors(
    self, scale: Array, shared: Array | None, divide: Divide = fixed_point.divide
  ) -> Array:
    """Returns the factors of blocks: exponents, or ``float32`` numbers."""
    if shared is None:
      return _BYTE_BIAS - scale.astype(jnp.int32)
    step = float_codes.from_codes(scale, ELEMENTS["e4m3"]) * shared
    return fixed_point.inverse(1.0, step, divide)

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(self, x: Array, lane: fixed_point.Lane, factor: Array) -> Array:
    """Returns the codes of elements, each with its own factor."""
    rounding = "nearest_even" if lane is None else dithers.signed_lane(lane, x) << 16
    options: Any = {"fmt": self.fmt, "rounding": rounding, "saturate": True}
    if self.scale == "e8m0":
      return float_codes.to_codes(x, exponent=factor, **options)
    return float_codes.to_codes(x * factor, **options)

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def value(self, codes: Array, scale: Array, shared: Array | None) -> Array:
    """Returns the values of codes, each under its own byte."""
    value = float_codes.from_codes(codes, self.fmt)
    if shared is None:
      byte = scale.astype(jnp.int32)
      value = float_codes.times_power_of_two(value, byte - _BYTE_BIAS)
      return jnp.where(byte == _NOT_FINITE, jnp.nan, value)
    step = float_codes.from_codes(scale, ELEMENTS["e4m3"]) * shared
    # A block's scale is rounded, so that its largest element may be too large.
    length = jnp.minimum(jnp.abs(value) * step, _LARGEST)
    return fixed_point.signed(length, fixed_point.sign_bit(value))

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def spread(self, x: Array) -> Array:
    """Repeats the value of each block of a plane for all of its elements."""
    # For `jnp.repeat`, XLA:CPU divides to find the block of each element, and takes six
    # times as long.
    shape = (*[1] * (x.ndim - 1), self.bucket_size)
    block = jax.lax.broadcasted_iota(jnp.int32, shape, x.ndim - 1) // self.block_size
    spread = x[..., :1]
    for k in range(1, x.shape[-1]):
      spread = jnp.where(block >= k, x[..., k : k + 1], spread)
    return spread


def tensor_scales(largest: Array, form: Form) -> Array:
  """Returns shared scales, with which the largest block has the largest E4M3 scale."""
  top = ELEMENTS["e4m3"].max_finite * form.fmt.max_finite
  scale = jnp.maximum(largest * np.float32(1 / top), form.least_shared)
  return jnp.where(largest < _SMALLEST_NORMAL, np.float32(0), scale)


def encode_rows(
  x: Array,
  shared: Array | None,
  dither: dithers.Dither | None,
  *,
  form: Form,
  first_row: int = 0,
) -> Encoded:
  """Encodes an array as rows, ``uint32[rows, row_words]``, without a residual."""
  # A shared scale is `float32[rows, 1]`, and None for scales that are powers of two.
  largest = bucket_norms(x, form.blocks, form.block_size, "max")
  rows = []
  for tiles in planes.tile_segments(x, form.planes, form.bucket_size):
    own = None if shared is None else tiles.rows_of(shared)
    scales = form.scale_codes(tiles.rows_of(largest), own)
    factors = jnp.split(form.factors(scales, own), form.planes, axis=1)
    lanes = tiles.lanes(dither, first_row)
    codes = map(form.code, tiles.planes, lanes, map(form.spread, factors))
    parts = [
      planes.pack_planes(codes, form.fmt.bits),
      planes.pack_planes(jnp.split(scales, 4, axis=1), 8),
    ]
    rows.append(parts if own is None else [*parts, planes.float_words(own)])
  return planes.stacked(rows, form.row_words), None


def unpack(rows: Array, form: Form) -> tuple[Array, Array, Array | None]:
  """Returns codes, ``uint32[..., P, B]``, bytes ``[..., P, B / block]`` and scales."""
  end = form.bucket_size + form.blocks // 4
  codes = planes.unpack_planes(rows[..., : form.bucket_size], form.fmt.bits)
  scales = planes.unpack_planes(rows[..., form.bucket_size : end], 8)
  scales = scales.reshape(*rows.shape[:-1], form.planes, form.blocks // form.planes)
  shared = planes.floats(rows[..., end:]) if form.scale == "e4m3" else None
  return codes, scales, shared


def decode_rows(rows: Array, form: Form) -> Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, P, B]``."""
  codes, scales, shared = unpack(rows, form)
  each = None if shared is None else shared[..., None]
  return form.value(codes, form.spread(scales), each)
