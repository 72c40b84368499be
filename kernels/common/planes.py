"""Packing of codes of a few bits into 32-bit words, planar across buckets."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common import dithers
from gradcomp._src.kernels.gpu.dispatch import on_tpu


# Element w of each of the P buckets of a tile shares word w. So packing is shifts
# between arrays, never a shuffle within one: the one layout that is fast in XLA on CPU
# and that Pallas can lower for GPUs.
def planes_per_word(bits: int) -> int:
  """Returns the number of codes that share a word: ``floor(32 / bits)``."""
  return 32 // bits


class Segment(NamedTuple):
  """Consecutive tiles of a flat array, as buckets and as planes."""

  first_row: int
  buckets: Array  # [at least rows * P, B], the tiles' buckets first
  planes: list[Array]  # P arrays [rows, B]

  @property
  def shape(self) -> tuple[int, int]:
    """The shape of a plane, ``(rows, B)``."""
    rows, columns = self.planes[0].shape
    return rows, columns

  def lanes(self, dither: dithers.Dither | None, first_row: int = 0) -> list[Any]:
    """Returns the random integers of each plane, in its shape, or None for a half."""
    if dither is None:
      return [None] * len(self.planes)
    row = first_row + self.first_row
    return dithers.random_lanes(dither, self.shape, len(self.planes), first_row=row)

  def rows_of(self, x: Array) -> Array:
    """Returns the lines of ``x`` for these tiles; ``x`` has a line for each row."""
    return x[self.first_row : self.first_row + self.shape[0]]


def tile_segments(
  x: Array,
  planes: int,
  bucket_size: int,
  fill: Callable[[Array], Array] = lambda rest: rest,
) -> list[Segment]:
  """Cuts an array, flat or tiles, into ``planes`` buckets a tile: two segments."""
  if x.shape[1:] == (planes, bucket_size):
    return [Segment(0, x.reshape(-1, bucket_size), _planes_of(x))]
  x = x.reshape(-1)
  # The full tiles are one segment of slices, which XLA fuses into their readers. Only
  # the last, partial tile is filled, with zeros after what `fill` makes.
  tile = planes * bucket_size
  full = x.size // tile
  segments = []
  if full:
    buckets = x[: x.size // bucket_size * bucket_size].reshape(-1, bucket_size)
    if full * tile == x.size:
      # On TPUs these are whole vectors of 128 lanes, where strides would pick single
      # rows out of each vector.
      parts = lax.split(x.reshape(full, tile), [bucket_size] * planes, axis=1)
    else:
      # XLA:CPU would copy the full tiles for their many readers.
      reach = (full - 1) * planes + 1
      stop = lambda k: (k + reach, bucket_size)
      cut = lambda k: lax.slice(buckets, (k, 0), stop(k), (planes, 1))
      parts = list(map(cut, range(planes)))
    segments.append(Segment(0, buckets, list(parts)))
  if x.size > full * tile:
    rest = fill(x[full * tile :])
    last = jnp.pad(rest, (0, tile - rest.size)).reshape(planes, bucket_size)
    segments.append(Segment(full, last, [last[k : k + 1] for k in range(planes)]))
  return segments


# TPUs would have to move a flat array.
@on_tpu(lambda tiles: [tiles[:, k] for k in range(tiles.shape[1])])
def _planes_of(tiles: Array) -> list[Array]:
  """Returns the planes of tiles, ``[rows, P, B]``, as parts of rows of elements."""
  # XLA:CPU would hold tiles and planes.
  rows, planes, size = tiles.shape
  return list(lax.split(tiles.reshape(rows, planes * size), [size] * planes, axis=1))


def filled(x: Array, bucket_size: int) -> Array:
  """Fills the last bucket of a flat array with its own elements in turn."""
  # It is for codecs that take means over a bucket, which zeros would draw to zero. In
  # later stages a mean counts the copies as well, and is nearly the elements' mean.
  rest = x.size % bucket_size
  if not rest:
    return x
  return jnp.concatenate([x, x[np.arange(bucket_size - rest) % rest + x.size - rest]])


def pack_planes(codes: Iterable[Array], bits: int) -> Array:
  """Packs one array of codes a plane into words: plane ``k`` from bit ``k*bits`` on.

  Args:
    codes: at most ``32 // bits`` arrays ``uint32[rows, B]``, below ``2**bits``. Each is
      packed before the next one is asked for.
    bits: the width of a code.

  Returns:
    The words, ``uint32[rows, B]``.

  Example:
    >>> hex(pack_planes([jnp.uint32(1), jnp.uint32(11)], 4))
    '0xb1'
  """
  placed = (code << (k * bits) if k else code for k, code in enumerate(codes))
  return functools.reduce(jnp.bitwise_or, placed)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def unpack_planes(words: Array, bits: int) -> Array:
  """Unpacks ``uint32[..., B]`` by one broadcast shift: ``uint32[..., 32 // bits, B]``.

  Args:
    words: the words.
    bits: the width of a code.

  Returns:
    The codes, a plane in each entry of the second last axis.

  Example:
    >>> unpack_planes(jnp.array([[0xB1]], jnp.uint32), 4)[0, :2, 0].tolist()
    [1, 11]
  """
  shape = (*[1] * (words.ndim - 1), planes_per_word(bits), 1)
  plane = lax.broadcasted_iota(jnp.uint32, shape, words.ndim - 1)
  codes = lax.expand_dims(words, [words.ndim - 1]) >> (plane * np.uint32(bits))
  return codes if bits == 32 else codes & np.uint32(2**bits - 1)


def stacked(segments: Sequence[Sequence[Array]], row_words: int) -> Array:
  """Joins the parts of rows, ``uint32[rows, words]``, of each segment, and segments."""
  rows = [jnp.concatenate(parts, axis=1) for parts in segments]
  if not rows:
    return jnp.zeros((0, row_words), jnp.uint32)
  return rows[0] if len(rows) == 1 else jnp.concatenate(rows)


_LANES = 128  # of a vector of a TPU


def _by_lanes(tiles: Array) -> Array:
  """Joins the planes of tiles, ``[rows, P, B]``, after they have been decoded."""
  if tiles.ndim != 3 or tiles.shape[2] % _LANES:
    return _flat_rows(tiles)  # shorter planes would be filled to whole vectors
  if tiles.shape[1] > 2:
    return _flat_rows(lax.optimization_barrier(tiles))
  # Behind a barrier, pairs of planes would take three times as long.
  return jnp.concatenate([tiles[:, k] for k in range(tiles.shape[1])], axis=1)


def _flat_rows(tiles: Array) -> Array:
  """Returns tiles as rows of elements, ``[rows, tile_size]``, also of no rows."""
  return tiles.reshape(len(tiles), math.prod(tiles.shape[1:]))


# XLA for TPUs would decode in the order of the leaf, and move each word and each scale
# there once for every one of its elements, in arrays as large as the leaf.
joined = on_tpu(_by_lanes)(_flat_rows)


# TPUs decode first, see `joined`.
@on_tpu(lambda x, tiles: x - _by_lanes(tiles).reshape(-1)[: x.size].reshape(x.shape))
def less(x: Array, tiles: Array) -> Array:
  """Subtracts decoded tiles from an array; the last tile may be partial."""
  # In another shape than the tiles', XLA's loops for CPUs take three times as long.
  if x.size == tiles.size:
    return (x.reshape(tiles.shape) - tiles).reshape(x.shape)
  return x - tiles.reshape(-1)[: x.size].reshape(x.shape)


def float_words(x: Array) -> Array:
  """Returns the bit patterns of ``float32`` numbers, which travel in the rows."""
  return lax.bitcast_convert_type(x, jnp.uint32)


def floats(words: Array) -> Array:
  """Returns the ``float32`` numbers of bit patterns."""
  return lax.bitcast_convert_type(words, jnp.float32)
