"""Rounds elements under scales to codes, by the rules of levels, and packs them."""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common import dithers, fixed_point, planes, scales
from gradcomp._src.kernels.common.fixed_point import Divide, Lane, divide
from gradcomp._src.kernels.common.planes import float_words, floats
from gradcomp._src.kernels.gpu import dispatch, tiles
from gradcomp._src.kernels.gpu.tiles import Block, Encoded, Operand
from gradcomp._src.kernels.tpu import lines
from gradcomp._src.kernels.tpu.lines import LANES, ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledForm(abc.ABC):
  """The static options of an encoder, and the rule for one plane of a tile."""

  bits: int  # the width of a code
  bucket_size: int  # elements a bucket, B
  inline: bool = True  # whether the scales follow the words of a row
  keep: bool = False  # whether to return the residual; scales are then inline

  # The values of the lowest 7 bits of a code, if a table has them: float32[128].
  table: tuple[float, ...] = ()

  name: ClassVar[str]

  @property
  def shared(self) -> int:
    """The number of a row's numbers for all its codes, which follow the scales."""
    return 0

  @property
  def planes(self) -> int:
    """The number of codes in a word, and of buckets in a tile."""
    return planes.planes_per_word(self.bits)

  def unit(self, scale: Array) -> Array:
    """Returns the scale that travels, from the largest magnitude of a bucket."""
    return scale

  @property
  def top(self) -> int:
    """The largest distance from zero in fixed point, which scales stand for."""
    return 1 << fixed_point.FRACTION

  def factor(self, scale: Array, divide: Divide = divide) -> Array:
    """Returns the factor from values to fixed point."""
    return fixed_point.top_multiplier(self.top, scale, divide)

  @abc.abstractmethod
  def code(self, x: Array, factor: Array, lane: Lane, limit: Operand = None) -> Array:
    """Returns the codes of one plane, ``uint32`` like ``x``; ``limit`` clips it."""

  def pack(self, codes: Iterable[Array]) -> Array:
    """Packs one array of codes a plane, or of the first ones: ``uint32[rows, B]``."""
    return planes.pack_planes(codes, self.bits)

  def value(self, codes: Array, scale: Array, *shared: Array) -> Array:
    """Returns the values of codes; last come shared numbers, or a table's entries."""
    raise NotImplementedError


def encode_reference(
  x: Array,
  scale: Operand,
  dither: Operand,
  limit: Any = None,
  *,
  form: ScaledForm,
  first_row: int = 0,
) -> Encoded:
  """Encodes an array as rows, ``uint32[rows, B + scales]``, with its residual."""
  # Scales are `float32[rows, 1]` or `[rows, P]`; None for each bucket's largest
  # magnitude. The dither is `uint32[3]`, None to round to nearest. A limit,
  # `float32[]`, clips magnitudes; fitted levels have their lines in its place.
  if scale is None:
    tile = {"planes": form.planes, "bucket_size": form.bucket_size}
    scale = form.unit(scales.scales(scales.bucket_norms(x, **tile, norm="max")))
  rows = []
  for segment in planes.tile_segments(x, form.planes, form.bucket_size):
    own = segment.rows_of(scale)
    factor = jnp.broadcast_to(form.factor(own), (segment.shape[0], form.planes))
    factors = lax.split(factor, [1] * form.planes, axis=1)
    each = zip(segment.planes, factors, segment.lanes(dither, first_row), strict=True)
    codes = [form.code(*given, limit) for given in each]
    rows.append([form.pack(codes), *[float_words(own)] * form.inline])
  words = planes.stacked(rows, form.bucket_size + form.inline * scale.shape[1])
  if not form.keep:
    return words, None
  return words, planes.less(x, decode_reference(words, form))


def decode_reference(rows: Array, form: ScaledForm) -> Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, P, B]``."""
  size = form.bucket_size
  codes = planes.unpack_planes(lax.slice_in_dim(rows, 0, size, axis=-1), form.bits)
  numbers = floats(lax.slice_in_dim(rows, size, None, axis=-1))[..., None]
  if form.table:
    entry = jnp.asarray(form.table, jnp.float32)[codes.astype(jnp.int32) & 127]
    return form.value(codes, numbers, entry)
  start, stop = numbers.shape[-2] - form.shared, numbers.shape[-2]
  shared = (numbers[..., i : i + 1, :] for i in range(start, stop))
  return form.value(codes, numbers[..., :start, :], *shared)


# A coordinate is the number of the level below a value, plus the share of the way to
# the next level. Rounding it rounds the value, and searches no table.
class Line(NamedTuple):
  """A line to coordinates ``trunc(t * slope) + offset``, in units of ``2**-16``."""

  start: Array | np.float32  # the smallest value on the line
  slope: Array | np.float32
  offset: Array | np.int32


def coordinate(t: Array, lines: Sequence[Line]) -> Array:
  """Returns the coordinates of values of zero or more, ``uint32``, without a clamp."""
  slope = jnp.full_like(t, lines[0].slope)
  offset = jnp.full(t.shape, lines[0].offset)
  for line in lines[1:]:
    reached = t >= line.start
    slope = jnp.where(reached, line.slope, slope)
    offset = jnp.where(reached, line.offset, offset)
  return ((t * slope).astype(jnp.int32) + offset).astype(jnp.uint32)


@tiles.completed(encode_reference)
def encode_on_gpu(
  x: Array,
  scale: Operand,
  dither: Operand,
  limit: Operand = None,
  *,
  form: ScaledForm,
  interpret: Any = False,
) -> Encoded:
  """Encodes as :func:`encode_reference` does, to the same bits."""
  columns = form.planes if scale is None else scale.shape[1]
  step = form.planes if form.planes % dithers.LANES else dithers.LANES
  # The division by a given scale is the one of all implementations, outside the kernel.
  factor = None if scale is None else form.factor(scale)

  def body(block: Block, *refs: Any) -> None:
    dither_ref, scale_ref, factor_ref, limit_ref = refs
    dither = dithers.read(dither_ref)
    most = None if limit_ref is None else limit_ref[0]

    def code_plane(k: tiles.Index, lane: Lane) -> Array:
      x = block.plane(k)
      if scale_ref is None:
        unit = form.unit(scales.scales_of_bits(tiles.largest_bits(x)))
        factor = form.factor(unit, fixed_point.exact_quotient)
      else:
        column = k if columns > 1 else 0
        unit, factor = block.read(scale_ref, column), block.read(factor_ref, column)
      codes = form.code(x, block.spread(factor, x.shape), lane, most)
      if form.keep:
        block.put_residual(k, x - form.value(codes, block.spread(unit, x.shape)))
      if form.inline and columns > 1:
        block.put(float_words(unit), form.bucket_size + k)
      return codes

    # Planes in a loop share random numbers by groups. Unrolled, sixteen planes would
    # not stay in registers: ptxas loads most of them before it codes the first.
    def code_planes(number: Array, words: Array) -> Array:
      first = number * step
      lanes = block.lanes(dither, first)
      codes = (code_plane(first + k, next(lanes)) for k in range(step))
      return words | (form.pack(codes) << (first * form.bits).astype(jnp.uint32))

    if form.inline and columns == 1:
      block.put(float_words(block.read(scale_ref, 0)), form.bucket_size)
    words = block.placed(jnp.zeros(block.shape, jnp.uint32))
    trips = jnp.int32(form.planes // step)
    block.put(lax.fori_loop(jnp.int32(0), trips, code_planes, words))

  given = dither, scale, factor, None if limit is None else limit.reshape(1)
  words = [form.bucket_size + form.inline * columns]
  launch = tiles.Launch(f"{form.name}_encode", words, interpret, form.keep)
  return tiles.encode(body, x, given, form, launch)


# XLA for TPUs takes a pass to cut the words out of the rows, and writes few planes in
# parts of registers. A table of 128 numbers is a row of a register, out of which one
# operation picks a number for each lane; XLA's gather reads indices from memory, one by
# one.
@lines.decoder(decode_reference)
def decode_on_tpu(rows: Array, *, form: ScaledForm, interpret: Any = False) -> Array:
  """Decodes as :func:`decode_reference` does, to the same bits."""
  count, words = rows.shape
  bits, size, planes = form.bits, form.bucket_size, form.planes
  fine = planes * size <= lines.LARGEST_UNROLLED and not size % LANES
  # Pairs of planes XLA joins as well.
  if not (form.inline and fine and count >= ROWS and planes > 2):
    return decode_reference(rows, form)
  columns = words - size - form.shared  # a scale a row, or a bucket
  block = lines.rows_of_block(count, planes * size)

  def kernel(row_ref: Any, *refs: Any) -> None:
    *tables, out_ref = refs
    levels = [jnp.broadcast_to(ref[...], (ROWS, LANES)) for ref in tables]

    def of_rows(row: Any) -> None:
      numbers = floats(row_ref[row, size:])
      number = [numbers[:, i : i + 1] for i in range(columns + form.shared)]
      for start in range(0, size, LANES):
        lanes = slice(start, start + LANES)
        word = lax.bitcast_convert_type(row_ref[row, lanes], np.int32)
        for k in range(planes):
          code = lax.shift_right_logical(word, np.int32(k * bits)) & (2**bits - 1)
          given = [number[k % columns], *number[columns:]]
          for level in levels:
            given.append(jnp.take_along_axis(level, code & (LANES - 1), axis=1))
          out_ref[row, k, lanes] = form.value(code.astype(jnp.uint32), *given)

    lines.by_registers(block, of_rows)

  inputs = [(rows, block)]
  if form.table:
    inputs.append((jnp.array(form.table, jnp.float32)[None], 0))
  out = [((count, planes, size), block, np.float32)]
  (found,) = lines.run(kernel, inputs, out, "decode", interpret)
  return found


encode_rows = dispatch.encoder("quantize", encode_reference, encode_on_gpu)
# For one payload: XLA decodes and adds several in one pass.
decode_rows = dispatch.with_kernel(decode_reference, decode_on_tpu)
