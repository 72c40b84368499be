"""Floats of few bits with a scale for each block, in jnp and by kernels."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common import dithers, fixed_point, float_codes, planes
from gradcomp._src.kernels.common.fixed_point import Divide, Lane, divide
from gradcomp._src.kernels.common.float_codes import FloatFormat
from gradcomp._src.kernels.common.planes import float_words, floats
from gradcomp._src.kernels.common.scales import bucket_norms
from gradcomp._src.kernels.gpu import dispatch, table, tiles
from gradcomp._src.kernels.gpu.tiles import Encoded, Operand
from gradcomp._src.kernels.tpu import lines
from gradcomp._src.kernels.tpu.lines import LANES

Element = Literal["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"]
Scale = Literal["e8m0", "e4m3"]

ELEMENTS = {
  "e4m3": FloatFormat(4, 3, specials="nan"),
  "e5m2": FloatFormat(5, 2),
  "e3m2": FloatFormat(3, 2, specials="none"),
  "e2m3": FloatFormat(2, 3, specials="none"),
  "e2m1": FloatFormat(2, 1, specials="none"),
}
_E4M3 = ELEMENTS["e4m3"]

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
    return _SMALLEST_NORMAL / np.float32(_E4M3.smallest * self.fmt.smallest)

  def scale_codes(
    self, largest: Array, shared: Operand, divide: Divide = divide
  ) -> Array:
    """Returns the scales of blocks as bytes, from their largest magnitudes."""
    if shared is not None:
      scale = largest * fixed_point.inverse(1 / self.fmt.max_finite, shared, divide)
      # Under the least shared scale, scales are rounded up to multiples of the smallest
      # one. So small blocks of small tensors are neither clipped nor zero. Integers
      # round, for which every kernel has an operation.
      unit = np.float32(_E4M3.smallest)
      steps = scale * (1 / unit)
      count = steps.astype(jnp.int32)
      count = count + (count.astype(jnp.float32) < steps).astype(jnp.int32)
      whole = count.astype(jnp.float32) * unit
      scale = jnp.where(shared == self.least_shared, whole, scale)
      rounding: Any = jnp.full(largest.shape, _UP) if self.up else "nearest_even"
      return float_codes.to_codes(scale, _E4M3, rounding=rounding, saturate=True)
    # With `f 2**e` for the largest magnitude and `F 2**E` for the format's largest
    # number, where `f` and `F` are from 1 to 2, the exponent is `e - E`. With one more
    # where `f > F`, no element is too large.
    bits = float_words(largest)
    exponent = (bits >> 23).astype(jnp.int32) - self.fmt.max_exponent
    if self.up:
      top = np.float32(self.fmt.max_finite).view(np.uint32) & _MANTISSA
      exponent = exponent + ((bits & _MANTISSA) > top).astype(jnp.int32)
    finite = largest < np.inf  # Pallas for GPUs lowers no jnp.isfinite
    return jnp.where(finite, jnp.maximum(exponent, 0), _NOT_FINITE).astype(jnp.uint32)

  def factors(self, scale: Array, shared: Operand, divide: Divide = divide) -> Array:
    """Returns the factors of blocks: exponents, or ``float32`` numbers."""
    if shared is None:
      return _BYTE_BIAS - scale.astype(jnp.int32)
    step = float_codes.from_codes(scale, _E4M3) * shared
    return fixed_point.inverse(1.0, step, divide)

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def code(self, x: Array, lane: Lane, factor: Array) -> Array:
    """Returns the codes of elements, each with its own factor."""
    rounding = "nearest_even" if lane is None else dithers.signed_lane(lane, x) << 16
    options: Any = {"fmt": self.fmt, "rounding": rounding, "saturate": True}
    if self.scale == "e8m0":
      return float_codes.to_codes(x, exponent=factor, **options)
    return float_codes.to_codes(x * factor, **options)

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def value(self, codes: Array, scale: Array, shared: Operand) -> Array:
    """Returns the values of codes, each under its own byte."""
    value = float_codes.from_codes(codes, self.fmt)
    if shared is None:
      byte = scale.astype(jnp.int32)
      value = float_codes.times_power_of_two(value, byte - _BYTE_BIAS)
      return jnp.where(byte == _NOT_FINITE, jnp.nan, value)
    step = float_codes.from_codes(scale, _E4M3) * shared
    # A block's scale is rounded, so that its largest element may be too large.
    length = jnp.minimum(jnp.abs(value) * step, _LARGEST)
    return fixed_point.signed(length, fixed_point.sign_bit(value))

  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def spread(self, x: Array) -> Array:
    """Repeats the value of each block of a plane for all of its elements."""
    # For `jnp.repeat`, XLA:CPU divides to find the block of each element, and takes six
    # times as long.
    shape = (*[1] * (x.ndim - 1), self.bucket_size)
    block = lax.broadcasted_iota(jnp.int32, shape, x.ndim - 1) // self.block_size
    spread = x[..., :1]
    for k in range(1, x.shape[-1]):
      spread = jnp.where(block >= k, x[..., k : k + 1], spread)
    return spread


def tensor_scales(largest: Array, form: Form) -> Array:
  """Returns shared scales, with which the largest block has the largest E4M3 scale."""
  top = _E4M3.max_finite * form.fmt.max_finite
  scale = jnp.maximum(largest * np.float32(1 / top), form.least_shared)
  return jnp.where(largest < _SMALLEST_NORMAL, np.float32(0), scale)


def encode_reference(
  x: Array, shared: Operand, dither: Operand, *, form: Form, first_row: int = 0
) -> Encoded:
  """Encodes an array as rows, ``uint32[rows, row_words]``, without a residual."""
  # A shared scale is `float32[rows, 1]`, and None for scales that are powers of two.
  blocks: Any = {"planes": form.blocks, "bucket_size": form.block_size}
  largest = bucket_norms(x, **blocks, norm="max")
  rows = []
  for segment in planes.tile_segments(x, form.planes, form.bucket_size):
    own = None if shared is None else segment.rows_of(shared)
    scales = form.scale_codes(segment.rows_of(largest), own)
    factors = jnp.split(form.factors(scales, own), form.planes, axis=1)
    lanes = segment.lanes(dither, first_row)
    codes = map(form.code, segment.planes, lanes, map(form.spread, factors))
    parts = [
      planes.pack_planes(codes, form.fmt.bits),
      planes.pack_planes(jnp.split(scales, 4, axis=1), 8),
    ]
    rows.append(parts if own is None else [*parts, float_words(own)])
  return planes.stacked(rows, form.row_words), None


def unpack(rows: Array, form: Form) -> tuple[Array, Array, Operand]:
  """Returns codes, ``uint32[..., P, B]``, bytes ``[..., P, B / block]`` and scales."""
  end = form.bucket_size + form.blocks // 4
  codes = planes.unpack_planes(rows[..., : form.bucket_size], form.fmt.bits)
  scales = planes.unpack_planes(rows[..., form.bucket_size : end], 8)
  scales = scales.reshape(*rows.shape[:-1], form.planes, form.blocks // form.planes)
  return codes, scales, floats(rows[..., end:]) if form.scale == "e4m3" else None


def decode_reference(rows: Array, form: Form) -> Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, P, B]``."""
  codes, scales, shared = unpack(rows, form)
  each = None if shared is None else shared[..., None]
  return form.value(codes, form.spread(scales), each)


def _refusal(size: int, form: Form) -> str:
  if form.planes % 4:
    return f"a kernel's words hold 4 or 8 codes, and these hold {form.planes}"
  return tiles.refusal(size, form)


@tiles.completed(encode_reference)
def encode_on_gpu(
  x: Array, *operands: Operand, form: Form, interpret: Any = False
) -> Encoded:
  """Encodes as :func:`encode_reference` does, to the same bits."""
  each = form.bucket_size // form.block_size  # blocks of a plane

  def body(block: tiles.Block, shared_ref: Any, dither_ref: Any) -> None:
    lanes = block.lanes(dithers.read(dither_ref))
    own = None if shared_ref is None else block.read(shared_ref, 0)
    spread = None if own is None else block.spread(own, block.shape[:-1])
    codes, scales = [], []
    for k in range(form.planes):
      plane = block.plane(k)
      largest = floats(tiles.largest_bits(plane).astype(jnp.uint32))
      scale = form.scale_codes(largest, spread, fixed_point.exact_quotient)
      factor = form.factors(scale, spread, fixed_point.exact_quotient)
      codes.append(form.code(plane, next(lanes), block.spread(factor, plane.shape)))
      scales.append(scale)
    block.put(planes.pack_planes(codes, form.fmt.bits))
    # The blocks of a word's bytes lie a quarter of a row apart.
    step = form.planes // 4
    for first in range(step):
      words = planes.pack_planes(scales[first::step], 8)
      block.put(words, form.bucket_size + first * each)
    if own is not None:
      block.put(float_words(own), form.row_words - 1)

  # Read as blocks, a plane has a maximum over a block within two threads.
  launch = tiles.Launch(
    "block_float_encode", [form.row_words], interpret, views=[(each, form.block_size)]
  )
  return tiles.encode(body, x, operands, form, launch)


# A kernel for TPUs transposes its rows, so that a block lies in the rows of registers,
# and its scale in one. XLA would pad blocks, and the few scales of a plane, to 128
# lanes.
@lines.completed(encode_reference)
def encode_on_tpu(
  x: Array, *operands: Operand, form: Form, interpret: Any = False
) -> Encoded:
  """Encodes as :func:`encode_reference` does, to the same bits."""
  from jax.experimental import pallas as pl

  shared, dither = operands
  size, scale_words = form.block_size, form.blocks // 4
  tile = form.planes * form.bucket_size
  count = x.size // tile
  block = min(count, LANES)

  def kernel(x_ref: Any, *refs: Any) -> None:
    *given, out = refs
    lanes: Any = [None] * form.planes
    if dither is not None:
      of = given.pop()
      key, first = (of[0:1, :1], of[1:2, :1], of[2:3, :1]), pl.program_id(0) * block
      lanes = dithers.random_lanes(key, (block, LANES), form.planes, first_row=first)
    tensor = None if shared is None else given.pop()[...].T
    words: Any = 0
    scales: list[Any] = [0] * scale_words
    for k, lane in enumerate(lanes):
      plane = x_ref[pl.ds(k, block, stride=form.planes), :].T
      drawn = None if lane is None else lane.T
      codes = []
      for at in range(0, LANES, size):
        part = plane[at : at + size]
        largest = floats(tiles.largest_bits(part, axis=0, keepdims=True))
        scale = form.scale_codes(largest, tensor, fixed_point.exact_divide)
        factor = form.factors(scale, tensor, fixed_point.exact_divide)
        own = None if drawn is None else drawn[at : at + size]
        codes.append(form.code(part, own, jnp.broadcast_to(factor, part.shape)))
        quarter, word = divmod((k * LANES + at) // size, scale_words)
        scales[word] |= scale << np.uint32(8 * quarter)
      words |= jnp.concatenate(codes) << np.uint32(k * form.fmt.bits)
    parts = [words, *scales, *([] if tensor is None else [float_words(tensor)])]
    out[...] = jnp.concatenate(parts).T

  given = [(x.reshape(-1)[: count * tile].reshape(-1, LANES), block * form.planes)]
  if shared is not None:
    given.append((shared[:count], block))
  if dither is not None:
    given.append((jnp.broadcast_to(jnp.asarray(dither)[:, None], (3, LANES)), 0))
  out = [((count, form.row_words), block, jnp.uint32)]
  (rows,) = lines.run(kernel, given, out, "block_float_encode", interpret)
  return rows, None


@lines.decoder(decode_reference)
def decode_on_tpu(rows: Array, *, form: Form, interpret: Any = False) -> Array:
  """Decodes as :func:`decode_reference` does, to the same bits."""
  words, size, bits = form.bucket_size, form.block_size, form.fmt.bits
  scale_words, each = form.blocks // 4, words // size  # blocks of a plane

  def body(columns: Array) -> list[Array]:
    numbers = lax.bitcast_convert_type(columns[words:], jnp.uint32)
    shared = None
    if form.scale == "e4m3":
      shared = floats(columns[words + scale_words :])
    parts = []
    for block in range(form.blocks):
      plane, at = divmod(block, each)
      word = columns[at * size : (at + 1) * size]
      code = lax.shift_right_logical(word, np.int32(plane * bits)) & (2**bits - 1)
      quarter, own = divmod(block, scale_words)
      byte = (numbers[own : own + 1] >> np.uint32(8 * quarter)) & np.uint32(255)
      parts.append(form.value(code.astype(jnp.uint32), byte, shared))
    return parts

  given = lax.bitcast_convert_type(rows, jnp.int32)
  tile = form.planes * words
  return lines.decode(body, [given], "block_float_decode", tile, interpret)


decode_rows = dispatch.with_kernel(decode_reference, decode_on_tpu)
encode_rows = dispatch.encoder(
  "block_float", encode_reference, encode_on_gpu, encode_on_tpu, _refusal
)


def multiply(a: tuple[Array, Array], b: tuple[Array, Array]) -> Array:
  """Returns the sums over K, ``float32[rows of a, rows of b]``."""
  # Operands are elements, [rows, K], and scales, [rows, blocks].
  # GPUs from Blackwell on have such a product. Elsewhere elements times scales are
  # bfloat16, which holds each of them exactly.
  # `jax.lax.scaled_dot` chooses likewise, but XLA cannot compile it for GPUs inside of
  # jax.shard_map, with JAX 0.10: "failed to legalize operation 'mhlo.unknown'".
  operands = *a, *b

  def able(*given: Array) -> Array:
    old = table.older_than(table.BLACKWELL)
    return _product_by_xla(*given) if old else _product_by_unit(*given)

  reference = jax.jit(_product_by_xla).trace(*operands)
  return dispatch.by_platform(operands, {"cuda": able}, reference)


# JAX has no rule for a vmap that maps one of its operands and not the other.
@jax.custom_batching.sequential_vmap
def _product_by_unit(x: Array, x_scales: Array, y: Array, y_scales: Array) -> Array:
  return jax.nn.scaled_matmul(x[None], y[None], x_scales[None], y_scales[None])[0]


def _product_by_xla(x: Array, x_scales: Array, y: Array, y_scales: Array) -> Array:
  def numbers(elements: Array, scales: Array) -> Array:
    shape = *scales.shape, elements.shape[1] // scales.shape[1]
    each = elements.astype(jnp.bfloat16).reshape(shape)
    return (each * scales.astype(jnp.bfloat16)[..., None]).reshape(elements.shape)

  return dot(numbers(x, x_scales), numbers(y, y_scales), 1)


def dot(a: Array, b: Array, axis: int) -> Array:
  """Sums over the last axis of a matrix and an axis of another, in ``float32``."""
  dims: Any = ((1,), (axis,)), ((), ())
  return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
