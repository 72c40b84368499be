"""The kernels of selections give the bits of the reference and of NumPy."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from gradcomp._src.kernels import compaction, threshold_mask
from gradcomp._src.kernels.common.row_view import RowView
from gradcomp._src.kernels.gpu import self_check
from gradcomp.codecs import NOTHING, TopK
from tests.plugins.slow_cases import slow
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits
from tests.support.lowering import KERNEL, lowered_for_cuda

TILE = 1024
# A block of one tile; one of four; two of sixteen. Tiles and a partial one behind them.
SIZES = (TILE, 5 * TILE + 37, 37 * TILE + 1023)
SIGNS = (None, np.float32(1), np.float32(-1))
THRESHOLDS = np.uint32([0, 1, 0x3F000000, 0x7F800000, 0x7FC00000, 0x80000000])


def data(size):
  rng = np.random.default_rng(size)
  normal = rng.standard_normal(size).astype(np.float32)
  spike = np.zeros(size, np.float32)
  spike[size // 3] = -2.0
  special = np.float32([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-45, -1e-39, 0.5])
  return {
    "normal": normal,
    "constant": np.full(size, -0.5, np.float32),
    "half zero": np.where(rng.random(size) < 0.5, normal, np.float32(0)),
    "spike": spike,
    "special": rng.choice(special, size),
  }


def row_of(x):
  return RowView([jnp.asarray(x)[None]], jnp.int32(0))


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


@functools.cache
def marker(implementation):
  return jax.jit(functools.partial(threshold_mask.mark, implementation=implementation))


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
@pytest.mark.parametrize("size", SIZES)
def test_marks_are_those_that_reach_the_threshold(size, implementation):
  for name, x in data(size).items():
    for sign in SIGNS:
      for threshold in THRESHOLDS:
        words, count = marker(implementation)(row_of(x), threshold, sign)
        reached = expected(x, threshold, sign)
        message = f"{name}, {threshold:#x}, {sign}"
        np.testing.assert_array_equal(words, packed(reached), message)
        assert count == reached.sum(), message


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_marks_of_one_row_out_of_several_matrices(implementation):
  size = 2 * TILE + 5
  x = np.random.default_rng(0).standard_normal((2, 3, size)).astype(np.float32)
  for number in range(6):
    row = RowView(list(x), jnp.int32(number))
    words, count = marker(implementation)(row, THRESHOLDS[2], None)
    reached = expected(x.reshape(6, size)[number], THRESHOLDS[2], None)
    np.testing.assert_array_equal(words, packed(reached))
    assert count == reached.sum()


def words_of(size):
  """From no bit to all of them."""
  x = data(size)
  yield packed(np.zeros(size, bool))
  for name in ("spike", "normal", "constant"):
    yield packed(np.abs(x[name]) >= (2 if name == "normal" else 0.5))


@pytest.mark.parametrize("size", SIZES)
def test_lists_are_in_order_and_end_where_they_should(size):
  capacities = (500, size + 3)

  @jax.jit
  def lists(words):
    return [compaction.positions(words, capacity, size) for capacity in capacities]

  for words in words_of(size):
    found = positions_of(words)
    for capacity, listed in zip(capacities, lists(words), strict=True):
      chex.assert_type(listed, jnp.int32)
      filled = np.pad(found, (0, capacity), constant_values=size)[:capacity]
      np.testing.assert_array_equal(listed, filled)


def test_a_list_that_is_just_full():
  words = packed(np.abs(data(SIZES[1])["normal"]) >= 1)
  found = positions_of(words)
  for capacity in (found.size - 1, found.size, found.size + 1):
    listed = compaction.positions(jnp.asarray(words), capacity, SIZES[1])
    filled = np.append(found, SIZES[1])[:capacity]
    np.testing.assert_array_equal(listed, filled)


@pytest.mark.parametrize("size", [SIZES[-1], *slow(*SIZES[:-1], 64 * TILE)])
def test_kernels_lower_for_cuda(size):
  rows = [
    RowView([jax.ShapeDtypeStruct((count, size), jnp.float32)] * matrices, jnp.int32(0))
    for count, matrices in ((1, 1), (3, 2))
  ]
  for row in rows:
    for sign in (None, jnp.float32(1)):
      text = lowered_for_cuda(threshold_mask.mark, row, jnp.uint32(1), sign)
      assert text.count(KERNEL) == 1  # for all matrices


CODECS = {
  "threshold": TopK(density=0.01, selection="threshold"),
  "trimmed": TopK(density=0.01, selection="trimmed"),
  "of one sign": TopK(density=0.01, selection="threshold", quantize="asq"),
}


@functools.cache
def encoder(codec):
  @jax.jit
  def encode(leaves):
    whole = codec.ranged(leaves[0].size)
    return whole.encode_several(leaves, [NOTHING] * len(leaves), None)

  return encode


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_codec_sends_the_same_with_kernels(codec):
  """Of rows in a loop; equal elements and all that is not finite included."""
  leaves = [data(2 * TILE + 5)[name] for name in ("constant", "special")]
  by = lambda name: encoder(dataclasses.replace(codec, implementation=name))(leaves)
  for (words, rest, *_), found in zip(by("xla"), by("pallas_interpret"), strict=True):
    np.testing.assert_array_equal(found[0], words)
    assert_same_bits(found[1], rest)


@pytest.mark.slow
def test_selections_call_kernels_on_cuda_wherever_they_are():
  """In loops, conditionals, batches and typed shard_map, as on this machine."""
  encode = functools.partial(laws.encoded, CODECS["threshold"])
  x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2 * TILE)), jnp.float32)
  each = lambda x: lax.map(encode, x)
  placed = {
    "map": each,
    "vmap": jax.vmap(encode),
    "switch": lambda x: lax.switch(
      jnp.int32(x[0, 0] > 9), [each, lambda x: each(-x)], x
    ),
    "while": lambda x: lax.fori_loop(0, 2, lambda _, found: each(x), each(x)),
    "shard_map": lambda x: jax.shard_map(
      lambda x: each(x), in_specs=P("data"), out_specs=P("data")
    )(x),
  }
  alone = [jax.jit(encode)(part) for part in x]
  for name, function in placed.items():
    with jax.set_mesh(modes.mesh(2)):
      found = jax.jit(function)(x)
      here = jax.jit(function).lower(x).as_text()
    for i, own in enumerate(alone):
      np.testing.assert_array_equal(found.rows[i], own.rows, name)
      np.testing.assert_array_equal(found.unsent[i], own.unsent, name)
    assert KERNEL not in here, name
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    assert lowered_for_cuda(function, shape, data=2).count(KERNEL) >= 1, name


def test_a_name_without_a_kernel_is_refused():
  small = jnp.ones(TILE - 1)
  for name in ("pallas", "pallas_interpret"):
    codec = TopK(density=0.01, selection="threshold", implementation=name)
    with pytest.raises(ValueError, match="`implementation` must be None or"):
      codec.encode(small)
  with pytest.raises(ValueError, match="`implementation` must be None or one of"):
    TopK(implementation="cuda")


@pytest.mark.parametrize(
  "several, signed", [(True, True), *slow((False, True), (True, False))]
)
def test_the_example_of_marks_passes_its_check(several, signed):
  """The kernel is another one for an only row, and for elements of one sign."""
  operands, options = threshold_mask._example(1 << 17, several, signed)
  assert not options
  assert threshold_mask.mark(*operands)[1] > 5000
  interpreted = functools.partial(threshold_mask.pallas.mark, interpret=True)
  device = jax.devices()[0]
  assert (
    self_check.compare(interpreted, threshold_mask.reference.mark, operands, device)
    == ""
  )
