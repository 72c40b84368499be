"""Selection's inner loops in jnp: marks elements by a bit each, and lists set bits."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.pick import pick

T = TypeVar("T")

# Leaves of up to COPIED elements are copied where that spares the compiler a program
# for each of them. On a processor with 1 MiB of cache a core, a step of 32 such leaves
# takes a tenth less time with the copy, because the copy stays in the cache. With twice
# as many elements it takes 1.4 times as long.
COPIED = 1 << 17

# A tile is 1024 elements in 32 words. Bit p of word w is element 32 p + w.
WORD = 32
LANES = 32
TILE = WORD * LANES

ABOVE_ALL = np.uint32(0x80000000)  # above all magnitudes, NaN's too
_SMALLEST_NORMAL, _INFINITY = np.uint32(0x00800000), np.uint32(0x7F800000)  # bits


class RowView(NamedTuple):
  """One row out of several matrices of the same shape."""

  # float32[rows, n] each; or float32[n], a row: XLA for TPUs loops over it in registers
  # of 1024 elements, but of 128 over float32[1, n].
  matrices: Sequence[Array]
  number: Array  # int32[]: counts the rows of the first matrix, the second, ...

  @property
  def size(self) -> int:
    """The number of elements of the row."""
    return self.matrices[0].shape[-1]

  @property
  def rows(self) -> int:
    """The number of rows of a matrix."""
    return self.matrices[0].shape[0] if self.matrices[0].ndim > 1 else 1

  def read(self, function: Callable[[Array], T]) -> T:
    """Returns ``function(row)``, without a copy of a row of a matrix with several."""

    def row(matrix: Array, number: Array | int) -> Array:
      if matrix.shape[0] == 1:
        return matrix[0]
      return lax.dynamic_index_in_dim(matrix, number, keepdims=False)

    return self.read_within(lambda matrix, number: function(row(matrix, number)))

  def read_within(self, function: Callable[[Array, Array | int], T]) -> T:
    """Returns ``function(matrix, number)`` of the row's matrix and its number there."""
    count = self.rows

    def of(matrix: Array) -> T:
      matrix = matrix.reshape(count, self.size)
      return function(matrix, self.number % count if count > 1 else 0)

    return pick(of, self.number // count, self.matrices)

  def copied(self) -> "RowView":
    """Returns the same row, copied once, so that readers are compiled once."""
    return RowView([self.read(lambda x: x)[None]], jnp.int32(0))

  def at(self, positions: Array) -> Array:
    """Returns the elements at positions; positions beyond the row's end give 0."""
    return self.read(
      lambda x: x.at[positions].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
      )
    )


def magnitudes(x: Array, sign: Array | None = None) -> Array:
  """Returns ``|x|`` in order, as ``uint32``; with ``sign``, the other sign's are 0."""
  # Infinity and NaN are above all numbers, and have both signs.
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  magnitude = bits & np.uint32(ABOVE_ALL - 1)
  if sign is None:
    return magnitude
  own = (bits >> 31 == 0) == (sign > 0)
  return jnp.where(own | (magnitude >= _INFINITY), magnitude, jnp.uint32(0))


def as_floats(order: Array) -> Array:
  """Returns normal floats in the same order, which are sorted faster than integers."""
  # CPUs take subnormal numbers for zeros: they become negative, and NaN infinity.
  subnormal = ABOVE_ALL | (2 * _SMALLEST_NORMAL - 1 - order)
  bits = jnp.where(order < _SMALLEST_NORMAL, subnormal, jnp.minimum(order, _INFINITY))
  return lax.bitcast_convert_type(bits, jnp.float32)


def mark(x: RowView, threshold: Array, sign: Array | None) -> Array:
  """Marks elements that reach a threshold by one bit each: ``uint32[tiles * 32]``."""

  def reached(x: Array) -> Array:
    # Without the barrier XLA computes the magnitudes before the loop over thresholds,
    # which makes a copy of the row.
    x, limit = lax.optimization_barrier((x, threshold))
    whole = x.size // TILE * TILE
    bit = np.uint32(1) << np.arange(WORD, dtype=np.uint32)[:, None]
    # Zeros beyond the row have no bit. Cleared in the last words afterwards, they came
    # back where XLA 0.12 for CPU writes the words into others.
    real = np.arange(TILE).reshape(WORD, LANES) < x.size - whole
    rest = jnp.pad(x[whole:], (0, -x.size % TILE))
    words = []
    for part, marks in (x[:whole], bit), (rest, np.where(real, bit, np.uint32(0))):
      order = magnitudes(part.reshape(-1, WORD, LANES), sign)
      bits = jnp.where(order >= limit, marks, np.uint32(0))
      words.append(lax.reduce(bits, np.uint32(0), lax.bitwise_or, (1,)))
    return jnp.concatenate(words)

  return x.read(reached).reshape(-1)


def count_bits(words: Array) -> Array:
  """Counts the set bits of all words: ``int32[]``."""
  return lax.population_count(words).astype(jnp.int32).sum(dtype=jnp.int32)


def positions(words: Array, capacity: int, size: int) -> Array:
  """Lists elements with set bits, tile by tile, then ``size``: ``int32[capacity]``."""
  sums = [lax.population_count(words).astype(jnp.int32)]
  while sums[-1].size > words.size // LANES:
    # A TPU would pad a last axis of 2 to 128.
    sums.append(sums[-1][0::2] + sums[-1][1::2])
  counts = sums.pop()
  starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
  numbers = lax.iota(jnp.int32, counts.size)
  place = jnp.where(counts > 0, starts, capacity)
  first = jnp.zeros(capacity, jnp.int32).at[place].max(numbers, mode="drop")
  tile, slot = lax.cummax(first), lax.iota(jnp.int32, capacity)
  rank, word = slot - starts[tile], tile
  for halves in reversed(sums):
    word = 2 * word
    left = halves.at[word].get(mode="promise_in_bounds")
    right = rank >= left
    rank, word = jnp.where(right, rank - left, rank), word + right
  used = slot < counts.sum(dtype=jnp.int32)
  word = jnp.minimum(word, words.size - 1)  # unused slots may lie beyond the words
  bit = _set_bit(words[word], rank)
  return jnp.where(used, tile * TILE + bit * LANES + word % LANES, size)


def _set_bit(word: Array, rank: Array) -> Array:
  """Returns the place of the set bit with ``rank`` others below it; 31 if none has."""
  place = jnp.zeros_like(rank)
  for width in (16, 8, 4, 2, 1):
    low = word & jnp.uint32((1 << width) - 1)
    below = lax.population_count(low).astype(jnp.int32)
    right = rank >= below
    rank = jnp.where(right, rank - below, rank)
    word = jnp.where(right, word >> width, low)
    place = place + jnp.where(right, width, 0)
  return place


def first_bits(words: Array, wanted: Array) -> Array:
  """Keeps the first ``wanted`` set bits of all words, and clears the others."""
  counts = lax.population_count(words).astype(jnp.int32)
  rank = jnp.maximum(wanted - (jnp.cumsum(counts, dtype=jnp.int32) - counts), 0)
  below = (jnp.uint32(1) << _set_bit(words, rank).astype(jnp.uint32)) - 1
  return jnp.where(rank >= counts, words, words & below)
