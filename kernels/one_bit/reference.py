"""1-bit SGD's inner loops in jnp: two means a bucket, signs, and the residual."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.kernels.common import fixed_point, planes
from gradcomp._src.kernels.common.scales import sum_by_halves, sum_lanes
from gradcomp._src.kernels.gpu.tiles import Encoded
from gradcomp._src.kernels.materialize import packed

WORD = planes.planes_per_word(1)  # signs in a word, and buckets in a tile

# Sums are taken over chunks, in lanes of at most 16 steps, and then over the lanes.
# XLA:CPU unrolls and vectorizes such short sums; longer ones take it twice as long.
_CHUNK = 128
_STEPS = 16
_LANES = 4  # at least
_HALF = 1 << 16  # half a word holds one of two counts


def means(x: Array, bucket_size: int) -> Array:
  """Returns ``avg+``, ``avg-`` of a flat array's buckets: ``float32[rows, 2, 32]``."""
  lines = [jnp.zeros([0, 2, WORD], jnp.float32)]
  for first_row, buckets, parts in planes.tile_segments(x, WORD, bucket_size):
    count = parts[0].shape[0] * WORD
    rest = x.size - first_row * WORD * bucket_size
    # One number for all full buckets: an array would be as long as the leaf.
    present: int | np.ndarray = bucket_size
    if rest < count * bucket_size:  # the last tile
      present = np.clip(rest - np.arange(WORD) * bucket_size, 0, bucket_size)
    chunk, lanes = chunks(bucket_size)
    shape = (count, bucket_size // chunk, chunk // lanes, lanes)
    buckets = buckets[:count]
    # Else XLA:CPU adds a gradient and its residual anew for each comparison with the
    # first of a bucket, one by one and nine times as slowly.
    first = packed(buckets[:, :1])
    addends = sides(buckets, first, bucket_size)
    partial = sum_lanes(tuple(part.reshape(shape) for part in addends))
    sums = [sum_by_halves(part.reshape(count, -1)) for part in partial]
    pair = means_of_sums(sums, first[:, 0], jnp.asarray(present), bucket_size)
    lines.append(jnp.stack([side.reshape(-1, WORD) for side in pair], axis=1))
  return jnp.concatenate(lines)


def chunks(size: int) -> tuple[int, int]:
  """Returns the size of a bucket's chunks, and the number of lanes of a chunk."""
  chunk = min(_CHUNK, size & -size)
  return chunk, max(_LANES, chunk // _STEPS)


def sides(x: Array, first: Array, size: int) -> tuple[Array, ...]:
  """Returns the arrays to add over a bucket: the elements of each side, and counts."""
  # Elements are multiplied by a power of two, so that no sum of finite ones overflows.
  # The low half of a count is of elements below zero, the high half of elements that
  # differ from the bucket's first, as long as both fit.
  down = np.float32(1 / _power_of_two(size))
  negative = x < 0
  counts = negative.astype(jnp.uint32)
  if size < _HALF:
    counts = counts | ((x != first).astype(jnp.uint32) * np.uint32(_HALF))
  return jnp.where(negative, 0.0, x * down), jnp.where(negative, x * down, 0.0), counts


def means_of_sums(
  sums: Sequence[Array],
  first: Array,
  present: Array | int,
  size: int,
  divide: fixed_point.Divide = fixed_point.divide,
) -> tuple[Array, Array]:
  """Returns ``avg+`` and ``avg-`` from sums of :func:`sides`."""
  down = np.float32(1 / _power_of_two(size))
  positive_sum, negative_sum, counts = sums
  below, constant = counts.astype(jnp.int32), jnp.zeros(counts.shape, bool)
  if size < _HALF:
    below = (counts % np.uint32(_HALF)).astype(jnp.int32)
    # Elements that are not present are zeros, which differ from the first.
    constant = (counts >> 16).astype(jnp.int32) == size - present

  def mean(total: Array, count: Array, side: Array) -> Array:
    average = divide(total, jnp.maximum(count, 1).astype(jnp.float32) * down)
    return jnp.where(constant & side, first, average)

  positive = mean(positive_sum, present - below, first > 0)
  negative = mean(negative_sum, below, first < 0)
  finite = (jnp.abs(positive) < np.inf) & (jnp.abs(negative) < np.inf)
  return jnp.where(finite, positive, np.nan), jnp.where(finite, negative, np.nan)


def _power_of_two(size: int) -> int:
  """Returns the smallest power of two that is not below ``size``."""
  return 1 << (size - 1).bit_length()


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


def encode_rows(x: Array, *, form: Form, first_row: int = 0) -> Encoded:
  """Encodes ``float32`` of any shape: ``uint32[rows, B + 64]``, and the residual."""
  del first_row  # nothing is random
  # The barrier makes the means once, for rows and residual. Fused with the residual
  # they take twice as long.
  flat = x.reshape(-1)
  pairs = jax.lax.optimization_barrier(means(flat, form.bucket_size))
  fill = functools.partial(planes.filled, bucket_size=form.bucket_size)
  rows = []
  for tiles in planes.tile_segments(flat, WORD, form.bucket_size, fill):
    signs = [jax.lax.lt(x, np.float32(0)).astype(jnp.uint32) for x in tiles.planes]
    scales = tiles.rows_of(pairs).reshape(-1, 2 * WORD)
    rows.append([planes.pack_planes(signs, 1), planes.float_words(scales)])
  words = planes.stacked(rows, form.row_words)
  return words, remainder(x, pairs, form.bucket_size) if form.keep else None


def remainder(x: Array, pairs: Array, bucket_size: int) -> Array:
  """Returns the residual of an array: ``x`` less the mean of its side."""
  tiles = (pairs.shape[0], WORD, bucket_size)
  shape = tiles if x.size == math.prod(tiles) else x.shape  # see planes.less

  def spread(side: Array) -> Array:
    each = jnp.broadcast_to(side[..., None], tiles)
    return each if shape is tiles else each.reshape(-1)[: x.size].reshape(shape)

  rest = x.reshape(shape)
  rest -= jnp.where(rest < 0, spread(pairs[:, 1]), spread(pairs[:, 0]))
  return rest.reshape(x.shape)


def decode_rows(rows: Array, form: Form) -> Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, 32, B]``."""
  negative = planes.unpack_planes(rows[..., : form.bucket_size], 1) == 1
  scales = planes.floats(rows[..., form.bucket_size :])[..., None]
  return jnp.where(negative, scales[..., WORD:, :], scales[..., :WORD, :])


def encode_columns(matrix: Array) -> tuple[Array, Array]:
  """Encodes the columns of ``float32[d, n]``: ``uint32[n, ceil(d / 32) + 2]``."""
  size, count = matrix.shape
  first = matrix[0] if size else jnp.zeros(count, jnp.float32)
  # This sums over the first axis, with a column in each lane.
  sums = sum_lanes(sides(matrix, first, size))
  pair = means_of_sums(sums, first, jnp.full(count, size), size)
  signs = jnp.pad((matrix < 0).astype(jnp.uint32), ((0, -size % WORD), (0, 0)))
  place = np.arange(WORD, dtype=np.uint32)[:, None]
  signs = signs.reshape(-(-size // WORD), WORD, count)
  words = jnp.sum(signs << place, axis=1, dtype=jnp.uint32)
  rows = jnp.concatenate([words.T, planes.float_words(jnp.stack(pair, axis=1))], axis=1)
  return rows, matrix - jnp.where(matrix < 0, pair[1], pair[0])


def decode_columns(rows: Array, size: int) -> Array:
  """Decodes ``uint32[..., n, words]`` to columns, ``float32[..., n, d]``."""
  place = jax.lax.broadcasted_iota(jnp.uint32, (WORD,), 0)
  bits = (rows[..., :-2, None] >> place) & jnp.uint32(1)
  words = rows.shape[-1] - 2
  negative = bits.reshape(*rows.shape[:-1], words * WORD)[..., :size] == 1
  pair = planes.floats(rows[..., -2:])
  return jnp.where(negative, pair[..., 1:], pair[..., :1])
