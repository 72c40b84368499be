"""The eight lanes that share a block of the cipher are pairwise independent.

Each lane is a linear function of the block's 64 bits over GF(2). Lanes whose matrices
have full rank together are independent and uniform where the block is uniform: as many
blocks give each of their values.
"""

import itertools

import jax
import numpy as np
import pytest

from benchmarks.codecs.random_bits.streams import NAME, Stream, lanes, model, threefry
from gradcomp.kernels import random_lanes
from tests.support.assertions import rank

LANES, BITS, BLOCK = 8, 16, 64

# Each sums to zero, as does every pair of them but for the lane that both have, if any.
DEPENDENT = {(0, 2, 4), (1, 3, 5), (0, 3, 6), (1, 2, 7)}


def matrices():
  """The lanes as matrices: bool[lanes, bits, 64], from the lanes of unit blocks."""
  units = np.uint64(1) << np.arange(BLOCK, dtype=np.uint64)
  a, b = (units & 0xFFFFFFFF).astype(np.uint32), (units >> 32).astype(np.uint32)
  shifts = np.arange(BITS, dtype=np.uint32)[:, None]
  return (lanes(a, b)[:, None] >> shifts & 1).astype(bool)


def test_the_library_draws_these_lanes():
  a, b = threefry((3, 5), (np.uint32([0]), np.arange(64, dtype=np.uint32)), 13)
  drawn = random_lanes(np.uint32([3, 5, 0]), (1, 64), LANES)
  np.testing.assert_array_equal(np.concatenate(drawn), lanes(a, b))


def rank_of(matrix):
  """Returns the rank of a matrix over GF(2)."""
  return rank(int("".join(map(str, row.astype(int))), 2) for row in matrix)


def test_lanes_are_linear():
  a, b = np.random.default_rng(0).integers(2**32, size=(2, 1000), dtype=np.uint32)
  block = (a + (b.astype(np.uint64) << 32)) >> np.arange(BLOCK, dtype=np.uint64)[
    :, None
  ]
  bits = matrices().astype(int) @ (block & 1).astype(int) % 2
  expected = (bits << np.arange(BITS)[:, None]).sum(1)
  np.testing.assert_array_equal(lanes(a, b), expected)


@pytest.mark.parametrize("count", [1, 2])
def test_any_two_lanes_are_independent(count):
  for some in itertools.combinations(matrices(), count):
    assert rank_of(np.concatenate(some)) == count * BITS


def test_the_dependent_triples():
  """The only triples that are not independent; all eight have the rank of a block."""
  found = {
    some
    for some in itertools.combinations(range(LANES), 3)
    if rank_of(np.concatenate(matrices()[list(some)])) < 3 * BITS
  }
  assert found == DEPENDENT
  a, b = np.random.default_rng(1).integers(2**32, size=(2, 1000), dtype=np.uint32)
  parts = lanes(a, b)
  for i, j, k in DEPENDENT:
    np.testing.assert_array_equal(parts[i] ^ parts[j], parts[k])
  assert rank_of(np.concatenate(matrices())) == BLOCK


@pytest.mark.parametrize(
  "rounds, expected", [(13, (0x9D1C5EC6, 0x8BD50731)), (20, (0x6B200159, 0x99BA4EFE))]
)
def test_known_answers(rounds, expected):
  """Random123's, for a key and a counter of zeros."""
  zero = np.zeros(1, np.uint32)
  assert [int(x[0]) for x in threefry((0, 0), (zero, zero), rounds)] == list(expected)


def test_a_stream_has_the_lanes_of_its_blocks_in_their_order():
  """As drawn one by one, and with keys that jax.random derives."""
  key = jax.random.key(5, impl="threefry2x32")
  for word in (0, *NAME):
    key = jax.random.fold_in(key, word)
  words = tuple(int(word) for word in jax.random.key_data(key))
  found = model(Stream("46"), 13, 5, rows=2)
  for row, column in [(0, 0), (0, 511), (1, 0), (1, 7)]:
    counter = np.array([row], np.uint32), np.array([column], np.uint32)
    drawn = lanes(*threefry(words, counter, 13))[:, 0]
    assert found[row * 512 + column] == drawn[4] + (drawn[6] << 16)
