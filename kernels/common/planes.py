"""Packing of codes of a few bits into 32-bit words, planar across buckets.

Element ``w`` of each of the ``P = 32 // bits`` buckets of a tile shares word ``w``.
Planes are whole buckets, so that packing is shifts between arrays, never a shuffle
within one. It is the one layout that is fast in XLA on CPU and that Pallas can lower
for GPUs. See docs/inside/wire-format.md.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def planes_per_word(bits: int) -> int:
  """Returns the number of codes that share a word: ``floor(32 / bits)``.

  Example:
    >>> [planes_per_word(bits) for bits in (1, 2, 3, 4, 5, 8, 16)]
    [32, 16, 10, 8, 6, 4, 2]
  """
  return 32 // bits


class Segment(NamedTuple):
  """Consecutive tiles of a flat array, as buckets and as planes."""

  first_row: int
  buckets: jax.Array  # [at least rows * P, B], the tiles' buckets first
  planes: list[jax.Array]  # P arrays [rows, B]

  @property
  def shape(self) -> tuple[int, int]:
    """The shape of a plane, ``(rows, B)``."""
    rows, columns = self.planes[0].shape
    return rows, columns

  def rows_of(self, x: jax.Array) -> jax.Array:
    """Returns the lines of ``x`` for these tiles; ``x`` has a line for each row."""
    return x[self.first_row : self.first_row + self.shape[0]]


def tile_segments(
  x: jax.Array,
  planes: int,
  bucket_size: int,
  fill: Callable[[jax.Array], jax.Array] = lambda rest: rest,
) -> list[Segment]:
  """Cuts a flat array into tiles of ``planes`` buckets: at most two segments.

  The full tiles are one segment of strided slices, which XLA fuses into their readers.
  Only the last, partial tile is filled with zeros. Filling the whole array instead
  would cost a temporary of the gradient's size. Before, ``fill`` changes that tile.

  Example:
    >>> full, last = tile_segments(jnp.arange(7), planes=2, bucket_size=2)
    >>> [plane.tolist() for plane in full.planes], last.buckets.tolist()
    ([[[0, 1]], [[2, 3]]], [[4, 5], [6, 0]])
  """
  tile = planes * bucket_size
  full = x.size // tile
  segments = []
  if full:
    buckets = x[: x.size // bucket_size * bucket_size].reshape(-1, bucket_size)
    stop = (full - 1) * planes + 1
    strided = [
      jax.lax.slice(buckets, (k, 0), (k + stop, bucket_size), (planes, 1))
      for k in range(planes)
    ]
    segments.append(Segment(0, buckets, strided))
  if x.size > full * tile:
    rest = fill(x[full * tile :])
    last = jnp.pad(rest, (0, tile - rest.size)).reshape(planes, bucket_size)
    segments.append(Segment(full, last, [last[k : k + 1] for k in range(planes)]))
  return segments


def filled(x: jax.Array, bucket_size: int) -> jax.Array:
  """Fills the last bucket of a flat array with its own elements in turn.

  It is for codecs that take means over a bucket, which zeros would draw to zero. A copy
  gets the code and the value of its original in every stage. In later stages rows have
  no leaf any more, and a mean counts the copies as well. It is then nearly the mean of
  the elements.

  Example:
    >>> filled(jnp.arange(7), 4).tolist()
    [0, 1, 2, 3, 4, 5, 6, 4]
  """
  rest = x.size % bucket_size
  if not rest:
    return x
  copies = np.arange(bucket_size - rest) % rest + x.size - rest
  return jnp.concatenate([x, x[copies]])


@functools.partial(jax.jit, static_argnums=1, inline=True)
def pack_planes(codes: Sequence[jax.Array], bits: int) -> jax.Array:
  """Packs one array of codes a plane into words: plane ``k`` from bit ``k*bits`` on.

  Args:
    codes: at most ``32 // bits`` arrays ``uint32[rows, B]``, below ``2**bits``.
    bits: the width of a code.

  Returns:
    The words, ``uint32[rows, B]``.

  Example:
    >>> hex(pack_planes([jnp.uint32(1), jnp.uint32(11)], 4))
    '0xb1'
  """
  words = codes[0]
  for k, code in enumerate(codes[1:], start=1):
    words = words | (code << (k * bits))
  return words


@functools.partial(jax.jit, static_argnums=1, inline=True)
def unpack_planes(words: jax.Array, bits: int) -> jax.Array:
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
  plane = jax.lax.broadcasted_iota(jnp.uint32, shape, words.ndim - 1)
  codes = words[..., None, :] >> (plane * bits)
  return codes if bits == 32 else codes & jnp.uint32(2**bits - 1)


def stacked(segments: Sequence[Sequence[jax.Array]], row_words: int) -> jax.Array:
  """Joins the parts of rows, ``uint32[rows, words]``, of each segment, and segments."""
  rows = [jnp.concatenate(parts, axis=1) for parts in segments]
  if not rows:
    return jnp.zeros((0, row_words), jnp.uint32)
  return rows[0] if len(rows) == 1 else jnp.concatenate(rows)


def less(x: jax.Array, tiles: jax.Array) -> jax.Array:
  """Subtracts decoded tiles from an array; the last tile may be partial."""
  # In another shape than the tiles', XLA's loops for CPUs take three times as long.
  if x.size == tiles.size:
    return (x.reshape(tiles.shape) - tiles).reshape(x.shape)
  return x - tiles.reshape(-1)[: x.size].reshape(x.shape)


def float_words(x: jax.Array) -> jax.Array:
  """Returns the bit patterns of ``float32`` numbers, which travel in the rows."""
  return jax.lax.bitcast_convert_type(x, jnp.uint32)


def floats(words: jax.Array) -> jax.Array:
  """Returns the ``float32`` numbers of bit patterns."""
  return jax.lax.bitcast_convert_type(words, jnp.float32)
