"""1-bit SGD in jnp and by kernels: two means a bucket, signs, and the residual."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common import planes
from gradcomp._src.kernels.common.fixed_point import Divide, divide, exact_divide, held
from gradcomp._src.kernels.common.planes import float_words, floats
from gradcomp._src.kernels.common.scales import sum_by_halves, sum_lanes
from gradcomp._src.kernels.gpu import dispatch, tiles
from gradcomp._src.kernels.materialize import packed
from gradcomp._src.kernels.tpu import lines

WORD = planes.planes_per_word(1)  # signs in a word, and buckets in a tile

# Sums are taken over chunks, in lanes of at most 16 steps, and then over the lanes.
# XLA:CPU unrolls and vectorizes such short sums; longer ones take it twice as long.
_CHUNK = 128
_STEPS = 16
_LANES = 4  # at least
_HALF = 1 << 16  # half a word holds one of two counts


@dataclasses.dataclass(frozen=True)
class Form:
  """The static options of the encoder."""

  bucket_size: int  # elements a bucket, B
  keep: bool = False  # whether to return the residual

  planes: ClassVar[int] = WORD

  @property
  def row_words(self) -> int:
    """The words of a row: signs, and two means a bucket."""
    return self.bucket_size + 2 * WORD


def _chunks(size: int) -> tuple[int, int]:
  """Returns the size of a bucket's chunks, and the number of lanes of a chunk."""
  chunk = min(_CHUNK, size & -size)
  return chunk, max(_LANES, chunk // _STEPS)


def _down(size: int) -> np.float32:
  """Returns a power of two with which no sum of ``size`` finite elements overflows."""
  return np.float32(1 / (1 << (size - 1).bit_length()))


def _sides(x: Array, first: Array, size: int) -> tuple[Array, ...]:
  """Returns the arrays to add over a bucket: the elements of each side, and counts."""
  # The low half of a count is of elements below zero, the high half of elements that
  # differ from the bucket's first, as long as both fit.
  negative = x < 0
  counts = negative.astype(jnp.uint32)
  if size < _HALF:
    counts = counts | ((x != first).astype(jnp.uint32) * np.uint32(_HALF))
  down = _down(size)
  return jnp.where(negative, 0.0, x * down), jnp.where(negative, x * down, 0.0), counts


def _means_of_sums(
  sums: Sequence[Array],
  first: Array,
  present: Array | int,
  size: int,
  divide: Divide = divide,
) -> tuple[Array, Array]:
  """Returns ``avg+`` and ``avg-`` from sums of :func:`_sides`."""
  positive_sum, negative_sum, counts = sums
  below, constant = counts.astype(jnp.int32), jnp.zeros(counts.shape, bool)
  if size < _HALF:
    below = (counts % np.uint32(_HALF)).astype(jnp.int32)
    # Elements that are not present are zeros, which differ from the first.
    constant = (counts >> 16).astype(jnp.int32) == size - present

  def mean(total: Array, count: Array, side: Array) -> Array:
    average = divide(total, jnp.maximum(count, 1).astype(jnp.float32) * _down(size))
    return jnp.where(constant & side, first, average)

  positive = mean(positive_sum, present - below, first > 0)
  negative = mean(negative_sum, below, first < 0)
  finite = (jnp.abs(positive) < np.inf) & (jnp.abs(negative) < np.inf)
  return jnp.where(finite, positive, np.nan), jnp.where(finite, negative, np.nan)


def encode_reference(x: Array, *, form: Form, first_row: int = 0) -> tiles.Encoded:
  """Encodes ``float32`` of any shape: ``uint32[rows, B + 64]``, and the residual."""
  del first_row  # nothing is random
  flat, size = x.reshape(-1), form.bucket_size
  means = [jnp.zeros([0, 2, WORD], jnp.float32)]
  for row, buckets, parts in planes.tile_segments(flat, WORD, size):
    count = parts[0].shape[0] * WORD
    rest = flat.size - row * WORD * size
    # One number for all full buckets: an array would be as long as the leaf.
    present: int | np.ndarray = size
    if rest < count * size:  # the last tile
      present = np.clip(rest - np.arange(WORD) * size, 0, size)
    chunk, lanes = _chunks(size)
    view = (count, size // chunk, chunk // lanes, lanes)
    buckets = buckets[:count]
    # Else XLA:CPU adds a gradient and its residual anew for each comparison with the
    # first of a bucket, one by one and nine times as slowly.
    first = packed(buckets[:, :1])
    addends = _sides(buckets, first, size)
    partial = sum_lanes(tuple(part.reshape(view) for part in addends))
    sums = [sum_by_halves(part.reshape(count, -1)) for part in partial]
    pair = _means_of_sums(sums, first[:, 0], jnp.asarray(present), size)
    means.append(jnp.stack([side.reshape(-1, WORD) for side in pair], axis=1))
  # The barrier makes the means once, for rows and residual. Fused with the residual
  # they take twice as long.
  pairs = lax.optimization_barrier(jnp.concatenate(means))
  fill = functools.partial(planes.filled, bucket_size=size)
  rows = []
  for segment in planes.tile_segments(flat, WORD, size, fill):
    signs = [lax.lt(x, np.float32(0)).astype(jnp.uint32) for x in segment.planes]
    numbers = segment.rows_of(pairs).reshape(-1, 2 * WORD)
    rows.append([planes.pack_planes(signs, 1), float_words(numbers)])
  words = planes.stacked(rows, form.row_words)
  if not form.keep:
    return words, None
  whole = (pairs.shape[0], WORD, size)
  shape = whole if x.size == math.prod(whole) else x.shape  # see planes.less

  def spread(side: Array) -> Array:
    each = jnp.broadcast_to(side[..., None], whole)
    return each if shape is whole else each.reshape(-1)[: x.size].reshape(shape)

  left = x.reshape(shape)
  left -= jnp.where(left < 0, spread(pairs[:, 1]), spread(pairs[:, 0]))
  return words, left.reshape(x.shape)


def decode_reference(rows: Array, form: Form) -> Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, 32, B]``."""
  negative = planes.unpack_planes(rows[..., : form.bucket_size], 1) == 1
  pair = floats(rows[..., form.bucket_size :])[..., None]
  return jnp.where(negative, pair[..., WORD:, :], pair[..., :WORD, :])


def encode_columns(matrix: Array) -> tuple[Array, Array]:
  """Encodes the columns of ``float32[d, n]``: ``uint32[n, ceil(d / 32) + 2]``."""
  size, count = matrix.shape
  first = matrix[0] if size else jnp.zeros(count, jnp.float32)
  # This sums over the first axis, with a column in each lane.
  sums = sum_lanes(_sides(matrix, first, size))
  pair = _means_of_sums(sums, first, jnp.full(count, size), size)
  signs = jnp.pad((matrix < 0).astype(jnp.uint32), ((0, -size % WORD), (0, 0)))
  place = np.arange(WORD, dtype=np.uint32)[:, None]
  signs = signs.reshape(-(-size // WORD), WORD, count)
  words = jnp.sum(signs << place, axis=1, dtype=jnp.uint32)
  rows = jnp.concatenate([words.T, float_words(jnp.stack(pair, axis=1))], axis=1)
  return rows, matrix - jnp.where(matrix < 0, pair[1], pair[0])


def decode_columns(rows: Array, size: int) -> Array:
  """Decodes ``uint32[..., n, words]`` to columns, ``float32[..., n, d]``."""
  place = lax.broadcasted_iota(jnp.uint32, (WORD,), 0)
  bits = (rows[..., :-2, None] >> place) & jnp.uint32(1)
  words = rows.shape[-1] - 2
  negative = bits.reshape(*rows.shape[:-1], words * WORD)[..., :size] == 1
  pair = floats(rows[..., -2:])
  return jnp.where(negative, pair[..., 1:], pair[..., :1])


@tiles.completed(encode_reference)
def encode_on_gpu(x: Array, *, form: Form, interpret: Any = False) -> tiles.Encoded:
  """Encodes as :func:`encode_reference` does, to the same bits."""
  size = form.bucket_size
  chunk, lanes = _chunks(size)
  # Sums have the order of the reference: the steps of a lane one after the other, each
  # a load of its own, and the lanes by halves.
  # Each axis of two is a half of the lanes: of their chunks, or within a chunk.
  halves = lambda count: (2,) * (count.bit_length() - 1)
  chunks, steps = halves(size // chunk), chunk // lanes
  view = *chunks, steps, *halves(lanes)

  def total(x: Array, kept: Callable[[Array], Array] = lambda x: x) -> Array:
    x = kept(x)
    while x.ndim > 1:
      x = kept(x.sum(axis=1, dtype=x.dtype))
    return x

  def body(block: tiles.Block) -> None:
    def add_plane(k: Array, words: Array) -> Array:
      first = block.plane(k, 0)
      added: tuple[Array, ...] = ()
      for step in range(steps):
        x = block.plane(k, *[slice(None)] * len(chunks), step, view=1)
        found = _sides(x, block.spread(first, x.shape), size)
        added = tuple(map(jnp.add, added, found)) if added else found
      above, below, counts = added
      sums = total(above, held), 0.0 - total(-below, held), total(counts)
      pair = _means_of_sums(sums, first, size, size, exact_divide)
      for side, mean in enumerate(pair):
        block.put(float_words(mean), size + side * WORD + k)
      x = block.plane(k)
      is_below = x < 0
      if form.keep:
        low, high = (block.spread(side, x.shape) for side in reversed(pair))
        block.put_residual(k, x - jnp.where(is_below, low, high))
      return words | (is_below.astype(jnp.uint32) << k.astype(jnp.uint32))

    none = block.placed(jnp.zeros(block.shape, jnp.uint32))
    block.put(lax.fori_loop(jnp.int32(0), jnp.int32(WORD), add_plane, none))

  launch = tiles.Launch(
    "one_bit_encode", [form.row_words], interpret, form.keep, [(size,), view]
  )
  return tiles.encode(body, x, (), form, launch)


@lines.completed(encode_reference)
def encode_on_tpu(x: Array, *, form: Form, interpret: Any = False) -> tiles.Encoded:
  """Encodes as :func:`encode_reference` does, to the same bits."""
  size, width = form.bucket_size, lines.width(form.bucket_size)
  count = WORD * size // width  # lines of a tile
  chunk, lanes = _chunks(size)

  def means(bucket: Array) -> tuple[Array, Array]:  # `float32[1, columns]` each
    first, parts = bucket[:1], []
    for start in range(0, size, chunk):
      starts = range(start, start + chunk, lanes)
      steps = [_sides(bucket[at : at + lanes], first, size) for at in starts]
      parts.append([functools.reduce(jnp.add, x) for x in zip(*steps, strict=True)])
    totals = [_sum_of_rows(jnp.concatenate(x)) for x in zip(*parts, strict=True)]
    return _means_of_sums(totals, first, size, size, exact_divide)

  def body(x: Array) -> tuple[Array, ...]:
    columns = x.T
    buckets = [columns[at : at + size] for at in range(0, width, size)]
    pairs = list(map(means, buckets))
    words = [lines.packed((x < 0).astype(jnp.int32), count, size)]
    for side in zip(*pairs, strict=True):
      bits = [lax.bitcast_convert_type(mean, jnp.int32) for mean in side]
      words.append(lines.rows_of_tiles(bits, count, WORD))
    found = [jnp.concatenate(words, axis=1)]
    if form.keep:
      sides = zip(buckets, pairs, strict=True)
      sent = [jnp.where(x < 0, low, high) for x, (high, low) in sides]
      found.append((columns - jnp.concatenate(sent)).T)
    return tuple(found)

  launch = tiles.Launch("one_bit_encode", [form.row_words], interpret, form.keep)
  rows, *rest = lines.encode(body, x, launch, WORD * size, width)
  return rows, rest[0] if rest else None


def _sum_of_rows(x: Array) -> Array:
  """Sums over the first axis as :func:`scales.sum_by_halves` does over the last."""
  while (size := x.shape[0]) > 1:
    if size % 2:
      x, size = jnp.concatenate([x, jnp.zeros_like(x[:1])]), size + 1
    x = x[: size // 2] + x[size // 2 :]
  return jnp.where(x == 0, 0, x)  # the reference starts from zero: no minus zeros


@lines.decoder(decode_reference)
def decode_on_tpu(rows: Array, *, form: Form, interpret: Any = False) -> Array:
  """Decodes as :func:`decode_reference` does, to the same bits."""
  size = form.bucket_size

  def body(columns: Array) -> list[Array]:
    words, pair = columns[:size], floats(columns[size:])
    own = lambda k: pair[k : k + 1]
    bit = lambda k: words & lax.shift_left(np.int32(1), np.int32(k)) != 0
    return [jnp.where(bit(k), own(WORD + k), own(k)) for k in range(WORD)]

  given = lax.bitcast_convert_type(rows, jnp.int32)
  return lines.decode(body, [given], "one_bit_decode", WORD * size, interpret)


decode_rows = dispatch.with_kernel(decode_reference, decode_on_tpu)
encode_rows = dispatch.encoder(
  "one_bit", encode_reference, encode_on_gpu, encode_on_tpu
)
