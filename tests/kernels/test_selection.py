"""The kernels of selections give the bits of the reference and of NumPy."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from gradcomp._src.codecs.sums.records import NOTHING
from gradcomp._src.kernels.selection import RowView, mark, positions
from gradcomp.codecs import TopK
from tests.plugins.slow_cases import slow
from tests.support import laws, modes, selections
from tests.support.assertions import assert_same_bits
from tests.support.lowering import KERNEL, lowered_for_cuda

TILE = 1024
# A block of one tile; one of four; two of sixteen. Tiles and a partial one behind them.
SIZES = (TILE, 5 * TILE + 37, 37 * TILE + 1023)
SIGNS = (None, np.float32(1), np.float32(-1))
THRESHOLDS = np.uint32([0, 1, 0x3FC00000, 0x7F800000, 0x7FC00000, 0x80000000])


def data(size):
  """Some of what any selection meets, and numbers that are not finite or normal."""
  some = ("normal", "constant", "half zero", "spike")
  special = np.float32([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-45, -1e-39, 1.5])
  chosen = np.random.default_rng(size).choice(special, size)
  return {name: selections.data(size)[name] for name in some} | {"special": chosen}


def expected(x, threshold, sign):
  """Which elements reach a threshold, bool[n]."""
  bits = x.view(np.uint32)
  order = bits & 0x7FFFFFFF
  if sign is not None:
    other = (bits >> 31 == 0) != (sign > 0)
    order = np.where(other & (order < 0x7F800000), 0, order)
  return order >= threshold


def packed(reached):
  """Bit p of word w of a tile is element 32 p + w."""
  tiles = np.pad(reached, (0, -reached.size % TILE)).reshape(-1, 32, 32)
  place = np.arange(32, dtype=np.uint32)[:, None]
  return (tiles.astype(np.uint32) << place).sum(1, dtype=np.uint32).reshape(-1)


def positions_of(words):
  """Of set bits, by words: int64[count]."""
  word, bit = np.nonzero(words[:, None] >> np.arange(32, dtype=np.uint32) & 1)
  return word // 32 * TILE + bit * 32 + word % 32


every_implementation = pytest.mark.parametrize(
  "implementation", ["xla", "pallas_interpret"]
)


def marker(implementation):
  return jax.jit(functools.partial(mark, implementation=implementation))


@every_implementation
@pytest.mark.parametrize("size", SIZES)
def test_marks_are_those_that_reach_the_threshold(size, implementation):
  marks = marker(implementation)
  for (name, x), sign, threshold in itertools.product(
    data(size).items(), SIGNS, THRESHOLDS
  ):
    words = marks(RowView([x[None]], np.int32(0)), threshold, sign)
    reached = packed(expected(x, threshold, sign))
    np.testing.assert_array_equal(words, reached, f"{name}, {threshold:#x}, {sign}")


@every_implementation
def test_marks_of_one_row_out_of_several_matrices(implementation):
  size, marks = 2 * TILE + 5, marker(implementation)
  x = laws.gaussian((2, 3, size))
  for number in range(6):
    words = marks(RowView(list(x), np.int32(number)), THRESHOLDS[2], None)
    reached = expected(x.reshape(6, size)[number], THRESHOLDS[2], None)
    np.testing.assert_array_equal(words, packed(reached))


def words_of(size):
  """From no bit to all of them."""
  x = data(size)
  yield packed(np.zeros(size, bool))
  for name, least in (("spike", 0.5), ("normal", 2), ("normal", 1), ("constant", 0.5)):
    yield packed(np.abs(x[name]) >= least)


@pytest.mark.parametrize("size", SIZES)
def test_lists_are_in_order_and_end_where_they_should(size):
  """With room for few, for all and more, and for just as many as there are."""
  full = positions_of(packed(np.abs(data(size)["normal"]) >= 1)).size
  capacities = (500, size + 3, full - 1, full, full + 1)

  @jax.jit
  def lists(words):
    return [positions(words, capacity, size) for capacity in capacities]

  for words in words_of(size):
    found = positions_of(words)
    for capacity, listed in zip(capacities, lists(words), strict=True):
      assert listed.dtype == np.int32
      filled = np.pad(found, (0, capacity), constant_values=size)[:capacity]
      np.testing.assert_array_equal(listed, filled)


@pytest.mark.parametrize("size", [SIZES[-1], *slow(*SIZES[:-1], 64 * TILE)])
def test_kernels_lower_for_cuda(size):
  for count, matrices in ((1, 1), (3, 2)):
    like = [jax.ShapeDtypeStruct((count, size), jnp.float32)] * matrices
    for sign in (None, np.float32(1)):
      row = RowView(like, np.int32(0))
      text = lowered_for_cuda(mark, row, np.uint32(1), sign)
      assert text.count(KERNEL) == 1  # for all matrices


THRESHOLD = TopK(density=0.01, selection="threshold")
CODECS = {
  "threshold": THRESHOLD,
  "trimmed": TopK(density=0.01, selection="trimmed"),
  "of one sign": dataclasses.replace(THRESHOLD, quantize="asq"),
}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_codec_sends_the_same_with_kernels(codec):
  """Of rows in a loop; equal elements and all that is not finite included."""
  leaves = [data(2 * TILE + 5)[name] for name in ("constant", "special")]

  @functools.partial(jax.jit, static_argnums=1)
  def encoded(leaves, name):
    whole = dataclasses.replace(codec, implementation=name).ranged(leaves[0].size)
    return [x[:2] for x in whole.encode_several(leaves, [NOTHING] * len(leaves), None)]

  assert_same_bits(encoded(leaves, "pallas_interpret"), encoded(leaves, "xla"))


@pytest.mark.slow
def test_selections_call_kernels_on_cuda_wherever_they_are():
  encode = functools.partial(laws.encoded, THRESHOLD)
  x = jnp.asarray(laws.gaussian((4, 2 * TILE)))
  each = lambda x: lax.map(encode, x)
  branches = [each, lambda x: each(-x)]
  placed = [
    *(each, jax.vmap(encode)),
    lambda x: lax.switch(jnp.int32(x[0, 0] > 9), branches, x),
    lambda x: lax.fori_loop(0, 2, lambda _, found: each(x), each(x)),
    lambda x: jax.shard_map(each, in_specs=P("data"), out_specs=P("data"))(x),
  ]
  alone = [jax.jit(encode)(part) for part in x]
  for function in placed:
    with jax.set_mesh(modes.mesh(2)):
      found = jax.jit(function)(x)
      assert KERNEL not in jax.jit(function).lower(x).as_text()
    assert_same_bits(found, jax.tree.map(lambda *parts: np.stack(parts), *alone))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    assert lowered_for_cuda(function, shape, data=2).count(KERNEL) >= 1
