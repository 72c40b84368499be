"""Every exchange adds FloatCast's codes in the order that the page gives."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import Context, FloatCast, Leaf
from gradcomp.testing import laws as kit
from tests.plugins.slow_cases import slow
from tests.specs import dithers, float_cast
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits, assert_same_floats
from tests.support.cases.float import cast_of, codec_of, wide_leaf

SEED = 11


def agreed(codec, x):
  """The specification's cast with the byte that the workers agree on."""
  workers = len(x)
  bound = codec.bind(Leaf((), addends=workers))
  if codec.scale != "auto":
    return cast_of(bound)
  return cast_of(bound, max(float_cast.aps_byte(own, workers) for own in x))


@pytest.mark.parametrize(
  "fmt, rounding, scale, accumulate, exchange, workers",
  [
    ((5, 2), "nearest_even", "auto", "format", "all_gather", 8),
    ((4, 3), "stochastic", "auto", "kahan", "ring", 4),
    ((3, 0), "nearest_even", "auto", "float32", "ring", 3),
    *slow(
      ((5, 10), "toward_zero", 0.37, "format", "ring", 3),
      ((4, 3), "nearest_even", "auto", "kahan", "hierarchical", 4),
      ((3, 0), "nearest_even", "auto", "float32", "two_shot", 3),
      ((3, 0), "stochastic", "auto", "float32", "hierarchical", 4),
      ((6, 14), "nearest_even", "auto", "format", "ring", 2),
    ),
  ],
  ids=str,
)
def test_one_law(fmt, rounding, scale, accumulate, exchange, workers):
  """The first step is the page's, bit for bit; over three steps nothing is lost."""
  codec = codec_of(fmt, rounding, scale, accumulate=accumulate)
  size = 2 * codec.tile_size * workers - 77
  leaf = lambda seed: wide_leaf(size, seed, spread=3) + np.float32(0)  # no minus zero
  steps = [np.stack([leaf(10 * k + i) for i in range(workers)]) for k in range(3)]
  given = [{"w": x} for x in steps]
  tx = laws.compressed(codec, exchange, "error", key=SEED)
  found = gradcomp.testing.modes.run("vmap", tx, given)
  assert not jax.tree.leaves(found.state.server_residual)
  expected, _ = float_cast.exchange(
    steps[0],
    agreed(codec, steps[0]),
    exchange,
    group_size=2 if exchange == "hierarchical" else None,
    accumulate=accumulate,
    keys=[dithers.leaf_dither(SEED, 0, "['w']", i) for i in range(workers)],
  )
  assert_same_floats(found.outputs[0]["w"], np.stack([expected] * workers))
  kit.nothing_is_lost(found)


@pytest.mark.parametrize("workers, accumulate", [(5, "kahan"), *slow((8, "format"))])
def test_all_at_the_largest_never_overflow(workers, accumulate):
  """All elements of all workers are the largest, of numbers that fill the room."""
  codec = FloatCast(exponent_bits=3, mantissa_bits=0, accumulate=accumulate)
  over = np.float32(2.0 ** np.ceil(np.log2(workers)) / workers)
  fill = lambda x: np.full((workers, 300), x, np.float32)
  leaves = {"below": fill(1.99999), "over": fill(over)}
  options = dict(axis_name="data", exchange="ring", feedback=None, min_leaf_size=1)
  (output,), _ = modes.run("vmap", gradcomp.compress(codec, **options), [leaves])
  for name, x in leaves.items():
    how = agreed(codec, x), "ring"
    expected, _ = float_cast.exchange(x, *how, accumulate=accumulate)
    chex.assert_tree_all_finite(output[name])
    assert_same_floats(output[name][0], expected)


OF_LEAVES = dict(axis_name="data", feedback=None, min_leaf_size=1)


def test_a_constant_scale_keeps_each_element_by_itself():
  x = np.stack([laws.gaussian(700, i) for i in range(2)])
  x[0, :4] = np.nan, np.inf, np.inf, 3e38
  x[1, 2] = -np.inf
  tx = gradcomp.compress(FloatCast(scale=1.0), exchange="two_shot", **OF_LEAVES)
  (out,), _ = modes.run("vmap", tx, [{"w": x}])
  first = np.asarray(out["w"])[0]
  np.testing.assert_array_equal(first[:4], np.float32([np.nan, np.inf, np.nan, np.inf]))
  chex.assert_tree_all_finite(first[4:])


def test_what_crosses_the_wire():
  """A byte a leaf in one all-reduce for all, and every sum in the format.

  The compensations travel too, but not to all.
  """
  workers, shapes = 4, ((512, 512), (3, 3, 64, 128), (100, 37), (512,))
  tx = gradcomp.aps(2, 1, accumulate="kahan", exchange="ring", **OF_LEAVES)
  like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  found = gradcomp.explain(tx, like, workers=workers).collectives
  (stats,) = [c for c in found if c.dtype == "u8"]
  assert stats.kind == "all-reduce" and stats.operands == (("u8", (len(shapes),)),)
  words = [c for c in found if c is not stats]
  assert {c.dtype for c in words} == {"u32"}
  sent = sum(c.bytes_sent * c.times for c in words)
  # Both ways of an all-reduce; rows and shares are filled up by at most 2 %.
  elements = sum(int(np.prod(shape)) for shape in shapes)
  least = 3 / 4 * 2 * elements * (workers - 1) / workers
  assert least <= sent <= 1.02 * least


def test_large_sums_are_finite_and_overflow_stays_infinite():
  """A sum that is rounded up to a power of two is not unscaled to infinity."""
  x = np.full((17, 300), 3.4e38, np.float32)
  (output,), _ = modes.run("vmap", gradcomp.aps(8, 7, **OF_LEAVES), [{"w": x}])
  chex.assert_tree_all_finite(output)
  assert (np.asarray(output["w"]) > 3e38).all()
  x = np.full((4, 300), 50.0, np.float32)
  for accumulate in ("format", "kahan"):
    tx = gradcomp.loss_scaling_cast(1024.0, accumulate=accumulate, **OF_LEAVES)
    (output,), _ = modes.run("vmap", tx, [{"w": x}])
    assert (np.asarray(output["w"]) == np.inf).all()


def test_rings_beside_a_model_axis():
  """Leaves that differ over a second axis: each part has a byte of its own."""
  kinds, devices = (AxisType.Auto,) * 2, jax.devices()[:4]
  mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=devices)
  options = dict(axis_name="data", exchange="ring", min_leaf_size=0)
  tx = gradcomp.aps(accumulate="kahan", **options)
  x = laws.gaussian((2, 2, 600)) * np.float32([1, 2.0**60]).reshape(1, 2, 1)

  def update(x):
    own = {"w": x[0, 0]}
    out, state = tx.update(own, tx.init(own))
    return jax.tree.map(lambda x: x[None, None], (out, state.residual))

  both = P("data", "model")
  mapped = jax.shard_map(update, mesh=mesh, in_specs=both, out_specs=both)
  found = jax.jit(mapped)(x)
  for i in range(2):
    (alone,), kept = modes.run("vmap", tx, [{"w": x[:, i]}])
    assert_same_bits(jax.tree.map(lambda x, i=i: x[:, i], found), (alone, kept))


def test_a_cpu_writes_sums_down_before_it_encodes_them():
  """Else XLA fuses what adds the numbers into what packs them, and adds them anew."""
  codec = FloatCast(addends=4)
  total = codec.sums

  def owner(rows):
    partial = total.fold(rows, 0.25, keep=False)
    return total.finish(partial, Context(), 4, keep=False).rows

  rows = jnp.zeros((4, 8, codec.row_words), jnp.uint32)
  assert jax.jit(owner).lower(rows).compile().as_text().count(" conditional(") == 1
