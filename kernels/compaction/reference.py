"""Lists the positions of set bits in jnp, one bit for each element, tile by tile.

A slot's element is found by counting the set bits of tiles, of halves of a tile, of
words and of halves of a word. Nothing is sorted, and no pass is longer than the list or
the bits.
"""

import jax
import jax.numpy as jnp
from jax import lax

# A tile is 1024 elements in 32 words. Bit p of word w is element 32 p + w.
WORD = 32
LANES = 32
TILE = WORD * LANES


def count_bits(words: jax.Array) -> jax.Array:
  """Counts the set bits of all words: ``int32[]``."""
  return lax.population_count(words).astype(jnp.int32).sum(dtype=jnp.int32)


def groups_of_slots(counts: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
  """Returns the group of each of ``capacity`` slots, and the slot's place in it.

  Both are ``int32[capacity]``. ``counts`` holds the number of slots of each group.
  Slots behind the last group's belong to the last group that has any.

  Example:
    >>> groups_of_slots(jnp.array([2, 0, 1]), 4)[0]
    Array([0, 0, 2, 2], dtype=int32)
  """
  starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
  numbers = lax.iota(jnp.int32, counts.size)
  place = jnp.where(counts > 0, starts, capacity)
  first = jnp.zeros(capacity, jnp.int32).at[place].max(numbers, mode="drop")
  group = lax.cummax(first)
  return group, lax.iota(jnp.int32, capacity) - starts[group]


def positions(words: jax.Array, capacity: int, size: int) -> jax.Array:
  """Lists the elements with set bits: ``int32[capacity]``; ``size`` in other slots.

  A slot's tile is found by the tiles' numbers of set bits. Within the tile its element
  is found by halving, first the words and then the bits of one. Set bits beyond the
  capacity are not listed.

  Example:
    >>> words = jnp.zeros(32, jnp.uint32).at[3].set(0b101)
    >>> positions(words, capacity=3, size=1024)
    Array([   3,   67, 1024], dtype=int32)
  """
  sums = [lax.population_count(words).astype(jnp.int32)]
  while sums[-1].size > words.size // LANES:
    sums.append(sums[-1].reshape(-1, 2).sum(1, dtype=jnp.int32))
  counts = sums.pop()
  tile, rank = groups_of_slots(counts, capacity)
  word = tile
  for halves in reversed(sums):
    word = 2 * word
    left = halves.at[word].get(mode="promise_in_bounds")
    right = rank >= left
    rank, word = jnp.where(right, rank - left, rank), word + right
  used = lax.iota(jnp.int32, capacity) < counts.sum(dtype=jnp.int32)
  word = jnp.minimum(word, words.size - 1)  # unused slots may lie behind the words
  bit = _set_bit(words[word], rank)
  return jnp.where(used, tile * TILE + bit * LANES + word % LANES, size)


def _set_bit(word: jax.Array, rank: jax.Array) -> jax.Array:
  """Returns the place of the set bit with ``rank`` others below it; 31 if none has.

  Example:
    >>> _set_bit(jnp.uint32(0b10100), jnp.int32(1)).item()
    4
  """
  place = jnp.zeros_like(rank)
  for width in (16, 8, 4, 2, 1):
    low = word & jnp.uint32((1 << width) - 1)
    below = lax.population_count(low).astype(jnp.int32)
    right = rank >= below
    rank = jnp.where(right, rank - below, rank)
    word = jnp.where(right, word >> width, low)
    place = place + jnp.where(right, width, 0)
  return place


def first_bits(words: jax.Array, wanted: jax.Array) -> jax.Array:
  """Keeps the first ``wanted`` set bits of all words, and clears the others."""
  counts = lax.population_count(words).astype(jnp.int32)
  before = jnp.cumsum(counts, dtype=jnp.int32) - counts
  rank = jnp.maximum(wanted - before, 0)
  below = (jnp.uint32(1) << _set_bit(words, rank).astype(jnp.uint32)) - 1
  return jnp.where(rank >= counts, words, words & below)
