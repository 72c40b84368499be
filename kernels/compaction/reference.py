"""Lists the positions of set bits in jnp, one bit for each element, tile by tile."""

import jax.numpy as jnp
from jax import Array, lax

# A tile is 1024 elements in 32 words. Bit p of word w is element 32 p + w.
WORD = 32
LANES = 32
TILE = WORD * LANES


def count_bits(words: Array) -> Array:
  """Counts the set bits of all words: ``int32[]``."""
  return lax.population_count(words).astype(jnp.int32).sum(dtype=jnp.int32)


def groups_of_slots(counts: Array, capacity: int) -> tuple[Array, Array]:
  """Returns the group of each slot, and its place in it: ``int32[capacity]`` each."""
  starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
  numbers = lax.iota(jnp.int32, counts.size)
  place = jnp.where(counts > 0, starts, capacity)
  first = jnp.zeros(capacity, jnp.int32).at[place].max(numbers, mode="drop")
  group = lax.cummax(first)
  return group, lax.iota(jnp.int32, capacity) - starts[group]


def positions(words: Array, capacity: int, size: int) -> Array:
  """Lists the elements with set bits: ``int32[capacity]``; ``size`` in other slots."""
  sums = [lax.population_count(words).astype(jnp.int32)]
  while sums[-1].size > words.size // LANES:
    # A TPU would pad a last axis of 2 to 128.
    sums.append(sums[-1][0::2] + sums[-1][1::2])
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
  before = jnp.cumsum(counts, dtype=jnp.int32) - counts
  rank = jnp.maximum(wanted - before, 0)
  below = (jnp.uint32(1) << _set_bit(words, rank).astype(jnp.uint32)) - 1
  return jnp.where(rank >= counts, words, words & below)
