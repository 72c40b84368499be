"""A fingerprint sees every bit, in any order of addition, wherever the array lies."""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.core.fingerprint import leaf_fingerprints
from gradcomp._src.core.state import name_words
from gradcomp._src.mesh.shard_maps import unreduce
from tests.plugins.slow_cases import slow
from tests.support import flips
from tests.support.assertions import assert_same_bits, says

DTYPES = (
  *("float32", "bfloat16", "float16", "float8_e4m3fn", "complex64"),
  *("int8", "int32", "uint16", "bool"),
)


def random(dtype, *shape):
  """Any bits, so that there are NaN, subnormal numbers and zeros of both signs."""
  rng = np.random.default_rng(len(dtype))
  dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
  if dtype.kind == "b":
    return rng.integers(2, size=shape).astype(bool)
  octets = rng.integers(256, size=math.prod(shape) * dtype.itemsize, dtype=np.uint8)
  return octets.view(dtype).reshape(shape)


places = lambda n, seed: np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B9) + seed


def expected(name, x, order):
  """The fingerprint of a leaf in NumPy, whose elements are added in this order."""
  x = np.asarray(x)
  seeds = name_words(f"{name} {x.dtype}{list(x.shape)}").astype(np.uint32)
  width = 4 if x.dtype.itemsize % 4 == 0 else x.dtype.itemsize
  kind = "i" if x.dtype.kind == "i" else "u"
  words = x.reshape(-1).view(f"{kind}{width}").astype(np.uint32)
  place = places(words.size, seeds[0])
  a = words ^ place
  a = (a ^ (a >> np.uint32(16))) * np.uint32(0x7FEB352D)
  a = (a ^ (a >> np.uint32(15))) * np.uint32(0x846CA68B)
  a ^= a >> np.uint32(16)
  turned = (place << np.uint32(16)) | (place >> np.uint32(16))
  b = (a ^ turned) * np.uint32(0x7FEB352D) + seeds[1]
  b ^= b >> np.uint32(15)
  total = seeds.copy()
  for i in order(words.size):
    total += np.array([a[i], b[i]])
  return total


def test_it_is_a_sum_in_any_order():
  """Of the leaves, too, of which small ones of one shape share a program."""
  tree = {dtype: random(dtype, 3, 5) for dtype in DTYPES} | {"last": np.int32(3)}
  orders = (range, lambda n: np.random.default_rng(1).permutation(n))
  first, second = (
    [expected(f"['{name}']", x, order) for name, x in sorted(tree.items())]
    for order in orders
  )
  np.testing.assert_array_equal(first, second)
  np.testing.assert_array_equal(jax.jit(leaf_fingerprints)(tree), first)
  total = np.sum(first, axis=0, dtype=np.uint64).astype(np.uint32)
  np.testing.assert_array_equal(of(tree), total)
  assert gradcomp.telemetry.fingerprint(()).tolist() == [0, 0]
  text = of.lower([np.ones(n, np.float32) for n in (5, 3, 5, 3, 5)]).as_text()
  assert text.count("stablehlo.reduce(") == 2 + 1  # and that of the leaves


of = jax.jit(gradcomp.telemetry.fingerprint)


def fingerprints(trees):
  """The fingerprints of several trees as Python integers, by one program."""
  stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
  return as_integers(jax.jit(jax.vmap(gradcomp.telemetry.fingerprint))(stacked))


def as_integers(words):
  return [int(a) << 32 | int(b) for a, b in np.asarray(words).reshape(-1, 2)]


def test_every_flipped_bit_changes_it():
  tree = {dtype: random(dtype, 2, 3) for dtype in DTYPES}
  changed = [
    {**tree, name: flips.flip(x, bit)}
    for name, x in tree.items()
    for bit in range(flips.bits(x))
  ]
  found = fingerprints([tree, *changed])
  # And no two of them agree: a chance of 1e-13 for 64 random bits.
  assert len(set(found)) == len(found) > 800


def test_changes_that_could_undo_each_other_change_it():
  """Two flips of one bit in equal elements, NaN and zeros, and keys of other words."""
  x = np.ones(48, np.float32)
  twice = lambda i, j, bit: flips.flip(flips.flip(x, 32 * i + bit), 32 * j + bit)
  pairs = itertools.combinations(range(x.size), 2)
  words = [0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000]
  for trees in (
    [x, *(twice(i, j, bit) for i, j in pairs for bit in (0, 31))],
    list(np.array(words, np.uint32).view(np.float32).reshape(-1, 1)),
  ):
    found = fingerprints(trees)
    assert len(set(found)) == len(found)
  keys = jax.random.split(jax.random.key(0), 3)
  found = as_integers(jax.jit(jax.vmap(gradcomp.telemetry.fingerprint))(keys))
  assert len(set(found)) == 3


def test_words_that_trade_places_as_their_places_do_change_it():
  """The first half of the hash is that of their XOR, which cannot tell them apart."""
  place = places(4, name_words(" uint32[4]").astype(np.uint32)[0])
  x = np.array([7, 1, 2, 9], np.uint32)
  y = x.copy()
  y[0], y[3] = x[3] ^ place[3] ^ place[0], x[0] ^ place[0] ^ place[3]
  first, second = (np.asarray(of(z)) for z in (x, y))
  assert first[0] == second[0] and first[1] != second[1]


def test_elements_and_leaves_that_change_places_change_it():
  x = np.arange(12, dtype=np.float32).reshape(3, 4)
  trees = [x]
  for i, j in itertools.combinations(range(12), 2):
    trees.append(x.copy())
    trees[-1].flat[[i, j]] = x.flat[[j, i]]
  found = fingerprints(trees)
  assert len(set(found)) == len(found) == 67
  a, b = x, x + 1
  trees = [
    *({"a": a, "b": b}, {"a": b, "b": a}, {"a": a, "c": b}),
    {"a": a.reshape(4, 3), "b": b},
    {"a": a.view(np.int32), "b": b},
    {"a": a, "b": b, "c": np.zeros(0, np.float32)},
  ]
  each = [as_integers(of(tree))[0] for tree in trees]
  assert len(set(each)) == len(each)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_an_array_that_is_cut_has_that_of_the_whole(kind):
  mesh = jax.make_mesh((4, 2), ("x", "y"), (kind,) * 2)
  x = np.random.default_rng(0).standard_normal((8, 16, 4)).astype(np.float32)
  whole = gradcomp.telemetry.fingerprint({"x": x})
  specs = P("x"), P(None, "y"), P("y", None, "x"), P(("x", "y")), P(None, ("y", "x"))
  with jax.set_mesh(mesh):
    for spec in specs:
      cut = {"x": jax.device_put(x, NamedSharding(mesh, spec))}
      assert_same_bits(gradcomp.telemetry.fingerprint(cut), whole)
      assert_same_bits(jax.jit(gradcomp.telemetry.fingerprint)(cut), whole)


def test_64_bit_elements_count_whole():
  x = np.array([1.0, -2.0, np.nan])
  with pytest.raises(TypeError, match=says("`tree`['x']", "float64", "jax_enable_x64")):
    gradcomp.telemetry.fingerprint({"x": x})
  with jax.enable_x64(True):
    found = fingerprints([x, *(flips.flip(x, bit) for bit in range(64 * 3))])
    assert len(set(found)) == len(found)
    for y in (x, np.array([1, -1, 2**40])):
      whole = expected("['x']", y, range)
      np.testing.assert_array_equal(of({"x": y}), whole)


def test_what_is_unreduced_has_none():
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Explicit,))
  addends = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("data")))
  look = lambda x: gradcomp.telemetry.fingerprint({"g": unreduce(x, "data")})
  with pytest.raises(ValueError, match=says("`tree`['g']", "unreduced", "'data'")):
    jax.jit(look)(addends)


@pytest.mark.parametrize("dtype", ["float32", *slow("bfloat16", "complex64")])
def test_it_reads_a_leaf_once_and_writes_nothing_down(dtype):
  leaf = jax.ShapeDtypeStruct((1024, 512), dtype)
  memory = of.lower({"a": leaf, "b": leaf}).compile().memory_analysis()
  # Words of each row at most; a thousandth of what is read.
  assert memory.temp_size_in_bytes <= memory.argument_size_in_bytes / 128
