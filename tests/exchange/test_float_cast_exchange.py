"""Every exchange adds FloatCast's codes in the order that the page gives."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import floats
from gradcomp._src.exchange.plan import PlanOptions, plan_messages
from gradcomp.codecs import Context, FloatCast, Leaf
from gradcomp.exchange import TwoShot
from tests.plugins.slow_cases import slow
from tests.specs import dithers, float_cast
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits, assert_same_floats
from tests.support.cases.exchange import ELEMENTS, SHAPES
from tests.support.cases.float import cast_of, codec_of, wide_leaf

SEED = 11
# Format, rounding, scale, accumulate, exchange, workers, group size.
CASES = [
  ((5, 2), "nearest_even", "auto", "format", "all_gather", 8, None),
  ((5, 10), "toward_zero", 0.37, "format", "ring", 3, None),
  ((4, 3), "stochastic", "auto", "kahan", "ring", 4, None),
  ((4, 3), "nearest_even", "auto", "kahan", "hierarchical", 4, 2),
  ((3, 0), "nearest_even", "auto", "float32", "two_shot", 3, None),
  ((3, 0), "nearest_even", "auto", "float32", "ring", 3, None),
  ((3, 0), "stochastic", "auto", "float32", "hierarchical", 4, 2),
  ((6, 14), "nearest_even", "auto", "format", "ring", 2, None),
]
ORDERS = {"all_gather": "gathered", "two_shot": "gathered"}


def transformation(codec, exchange, group_size=None, feedback="error"):
  return gradcomp.compress(
    codec,
    axis_name="data",
    exchange=modes.grouped(exchange, group_size),
    feedback=feedback,
    key=SEED,
  )


def agreed(codec, x):
  """The oracle's cast with the byte that the workers agree on."""
  workers = len(x)
  if codec.scale != "auto":
    return cast_of(codec.bind(Leaf((), addends=workers)))
  byte = max(float_cast.aps_byte(own, workers) for own in x)
  return cast_of(codec.bind(Leaf((), addends=workers)), byte)


def case_name(part):
  return "x".join(map(str, part)) if isinstance(part, tuple) else str(part)


@pytest.mark.parametrize(
  "fmt, rounding, scale, accumulate, exchange, workers, group_size",
  [*CASES[:4:2], *slow(CASES[1], *CASES[3:])],
  ids=case_name,
)
def test_one_law(fmt, rounding, scale, accumulate, exchange, workers, group_size):
  """The first step is the page's, bit for bit; over three steps nothing is lost.

  What nothing is added to is exactly what `floats.all_reduce` says.
  """
  codec = codec_of(fmt, rounding, scale, accumulate=accumulate)
  size = 2 * codec.tile_size * workers - 77
  leaf = lambda seed: wide_leaf(size, seed, spread=3) + np.float32(0)  # no minus zero
  steps = [np.stack([leaf(10 * k + i) for i in range(workers)]) for k in range(3)]
  tx = transformation(codec, exchange, group_size)
  outputs, residual, owned = modes.run_all("vmap", tx, [{"w": x} for x in steps])
  outputs = [np.asarray(out["w"]) for out in outputs]
  for out in outputs:
    assert_same_floats(out, np.broadcast_to(out[:1], out.shape))
  assert not jax.tree.leaves(owned)

  cast = agreed(codec, steps[0])
  keys = [dithers.leaf_dither(SEED, 0, "['w']", i) for i in range(workers)]
  expected, sent = float_cast.exchange(
    steps[0],
    cast,
    exchange,
    group_size=group_size,
    accumulate=accumulate,
    keys=keys,
  )
  assert_same_floats(outputs[0][0], expected)

  if accumulate != "float32" and scale == "auto":
    padded = np.pad(sent, ((0, 0), (0, 77)))  # shares of whole rows
    shifted = float_cast.shifted(padded, cast.shift)
    library = floats.FloatFormat(*fmt)
    summed = floats.all_reduce(
      shifted,
      library,
      ORDERS.get(exchange, exchange),
      group_size=group_size,
      method="kahan" if accumulate == "kahan" else "sequential",
    )
    mean = np.asarray(summed)[:size] * (np.float32(1) / np.float32(workers))
    np.testing.assert_array_equal(outputs[0][0], cast.unscaled(mean))

  given = sum(np.asarray(x, np.float64).sum(axis=0) for x in steps)
  total = workers * sum(np.asarray(out[0], np.float64) for out in outputs)
  kept = np.asarray(residual["w"], np.float64).sum(axis=0).reshape(size)
  # At most 6 N + 8 roundings to binary32 a step, of numbers not above these.
  largest = max(np.abs(x).max() for x in steps)
  largest = workers * max(largest, np.abs(residual["w"]).max())
  bound = 3 * (6 * workers + 8) * 2.0**-24 * largest
  np.testing.assert_allclose(total + kept, given, rtol=0, atol=bound)


@pytest.mark.parametrize(
  "workers, accumulate",
  [(5, "kahan"), *slow((8, "format"))],
)
def test_all_at_the_largest_never_overflow(workers, accumulate):
  """All elements of all workers are the largest, of numbers that fill the room."""
  codec = FloatCast(exponent_bits=3, mantissa_bits=0, accumulate=accumulate)
  over = np.float32(2.0 ** np.ceil(np.log2(workers)) / workers)
  leaves = {str(i): jnp.full((workers, 300), v) for i, v in enumerate((1.99999, over))}
  exchange = "all_gather" if accumulate == "float32" else "ring"
  tx = gradcomp.compress(
    codec, axis_name="data", exchange=exchange, feedback=None, min_leaf_size=1
  )
  (output,), _ = modes.run("vmap", tx, [leaves])
  for name, x in leaves.items():
    cast = agreed(codec, np.asarray(x))
    expected, _ = float_cast.exchange(
      np.asarray(x), cast, exchange, accumulate=accumulate
    )
    chex.assert_tree_all_finite(output[name])
    assert_same_floats(output[name][0], expected)


@pytest.mark.slow
def test_leaves_of_all_kinds_in_one_message_and_in_many():
  """Lazy all-reduce; each leaf has its own byte, whatever it shares a message with.

  Zeros stay, a NaN is everyone's, tiny leaves lose nothing, half precision returns.
  """
  workers, size = 4, 700
  x = np.stack([laws.gaussian(size, i) for i in range(workers)])
  nan = x.copy()
  nan[2, 7] = np.nan
  tree = {
    "huge": x * np.float32(2.0**100),
    "half": x.astype(np.float16),
    "nan": nan,
    "one": x,
    "tiny": x * np.float32(2.0**-100),
    "zero": 0 * x,
  }
  hyper = dict(codec=FloatCast(), exchange=TwoShot(), min_leaf_size=1)
  results = []
  for message_bytes, count in ((None, 1), (1400, len(tree))):
    like = [jax.ShapeDtypeStruct((size,), jnp.float32)] * len(tree)
    none = [()] * len(tree)
    options = PlanOptions(message_bytes=message_bytes, feedback=True, **hyper)
    on = dict(axis_name="data", workers=workers)
    planned = plan_messages(like, none, none, options, **on)
    assert len(planned.messages) == count
    tx = gradcomp.compress(
      axis_name="data", message_bytes=message_bytes, feedback="error", **hyper
    )
    results.append(modes.run("vmap", tx, [tree]))
  (out,), residual = results[0]
  (others,), _ = results[1]  # where other workers own, and keep what is lost
  assert_same_bits(out, others)
  assert np.isnan(out["nan"]).all()
  assert (np.asarray(out["zero"]) == 0).all()
  one = np.asarray(out["one"])
  np.testing.assert_array_equal(out["huge"], one * np.float32(2.0**100))
  np.testing.assert_array_equal(out["tiny"], one * np.float32(2.0**-100))
  chex.assert_tree_all_finite(residual)
  for name in ("half", "tiny"):
    wide = tree[name].astype(np.float32)
    expected, _ = float_cast.exchange(wide, agreed(FloatCast(), wide), "two_shot")
    assert_same_bits(out[name][0], expected.astype(tree[name].dtype))


def test_a_constant_scale_keeps_each_element_by_itself():
  x = np.stack([laws.gaussian(700, i) for i in range(2)])
  x[0, :4] = np.nan, np.inf, np.inf, 3e38
  x[1, 2] = -np.inf
  tx = transformation(FloatCast(scale=1.0), "two_shot")
  (out,), _ = modes.run("vmap", tx, [{"w": x}])
  first = np.asarray(out["w"])[0]
  expected = np.float32([np.nan, np.inf, np.nan, np.inf])
  np.testing.assert_array_equal(first[:4], expected)
  chex.assert_tree_all_finite(first[4:])


def collectives(tx, workers):
  """What one update sends, read from the optimized HLO."""
  grads = {
    k: jax.ShapeDtypeStruct((workers, *s), jnp.float32) for k, s in SHAPES.items()
  }
  mesh = modes.mesh(workers)

  def update(grads):
    own = jax.tree.map(lambda x: x[0], grads)
    return tx.update(own, tx.init(own))[0]

  update = jax.shard_map(update, mesh=mesh, in_specs=(P("data"),), out_specs=P())
  report = gradcomp.wire_report(jax.jit(update).lower(grads).compile())
  return report.collectives


@pytest.mark.parametrize(
  "fmt, exchange, accumulate, bytes_an_element",
  [
    ((2, 1), "ring", "kahan", 3 / 4),  # the compensations travel, but not to all
    *slow(((5, 2), "two_shot", "format", 1)),
  ],
  ids=case_name,
)
def test_what_crosses_the_wire(fmt, exchange, accumulate, bytes_an_element):
  """A byte a leaf in one all-reduce for all, and every sum in the format."""
  workers = 4
  tx = gradcomp.aps(
    *fmt,
    accumulate=accumulate,
    axis_name="data",
    exchange=exchange,
    feedback=None,
    min_leaf_size=1,
  )
  exchanged = collectives(tx, workers)
  (stats,) = [c for c in exchanged if c.dtype == "u8"]
  assert stats.kind == "all-reduce" and stats.operands == (("u8", (len(SHAPES),)),)
  words = [c for c in exchanged if c is not stats]
  assert {c.dtype for c in words} == {"u32"}
  sent = sum(c.bytes_sent * c.times for c in words)
  # Both ways of an all-reduce; rows and shares are filled up by at most 2 %.
  least = bytes_an_element * 2 * ELEMENTS * (workers - 1) / workers
  assert least <= sent <= 1.02 * least


def test_lars_after_aps_trains():
  """The paper's optimizer, as it uses it: on the means, which are finite."""
  rng = np.random.default_rng(0)
  target = rng.standard_normal((32, 16)).astype(np.float32)
  x = rng.standard_normal((4, 64, 32)).astype(np.float32)
  y = x @ target
  optimizer = optax.chain(
    gradcomp.aps(axis_name="data", exchange="ring", feedback=None, min_leaf_size=1),
    optax.lars(0.5, trust_coefficient=0.1),
  )

  def train(x, y):
    loss = lambda params: jnp.mean((x @ params["w"] - y) ** 2)
    params = {"w": jnp.full((32, 16), 0.1)}

    def step(carry, _):
      params, state = carry
      value, grads = jax.value_and_grad(loss)(params)
      updates, state = optimizer.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), value

    return jax.lax.scan(step, (params, optimizer.init(params)), length=60)[1]

  losses = np.asarray(jax.jit(jax.vmap(train, axis_name="data"))(x, y)).mean(axis=0)
  chex.assert_tree_all_finite(losses)
  assert losses[-1] < losses[0] / 20


def test_auto_has_no_psum():
  """With 8 workers `auto` is one of the exchanges that add in the format."""
  tx = gradcomp.aps(axis_name="data", feedback=None)
  like = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
  explanation = gradcomp.explain(tx, like, workers=8)
  assert {leaf.exchange for leaf in explanation.leaves} <= {"two_shot", "all_gather"}


def test_sums_near_the_largest_float32_are_finite():
  """A sum that is rounded up to a power of two is not unscaled to infinity."""
  x = np.full((17, 300), 3.4e38, np.float32)
  tx = gradcomp.aps(8, 7, axis_name="data", feedback=None, min_leaf_size=1)
  (output,), _ = modes.run("vmap", tx, [{"w": x}])
  chex.assert_tree_all_finite(output)
  assert (output["w"] > 3e38).all()


def test_overflow_stays_infinite_with_compensation():
  x = np.full((4, 300), 50.0, np.float32)
  for accumulate in ("format", "kahan"):
    tx = gradcomp.loss_scaling_cast(
      1024.0, accumulate=accumulate, axis_name="data", min_leaf_size=1, feedback=None
    )
    (output,), _ = modes.run("vmap", tx, [{"w": x}])
    assert (output["w"] == np.inf).all()


@pytest.mark.parametrize("exchange", ["all_gather", *slow("ring", "hierarchical")])
def test_empty_leaves_and_double_precision(exchange):
  """Leaves without rows, and jax_enable_x64, under which zeros become float64."""
  tree = {"e": jnp.zeros((4, 0, 3)), "w": jnp.asarray(wide_leaf(2400).reshape(4, -1))}
  tx = gradcomp.aps(
    accumulate="kahan" if exchange == "ring" else "float32",
    axis_name="data",
    exchange=modes.grouped(exchange),
    min_leaf_size=0,
  )
  expected, residual = modes.run("vmap", tx, [tree, tree])
  with jax.enable_x64(True):
    wide = modes.run("vmap", tx, [tree, tree])
  assert_same_bits((expected, residual), wide)


@pytest.mark.parametrize("accumulate", ["kahan", *slow("format")])
def test_rings_beside_a_model_axis(accumulate):
  """Leaves that differ over a second axis: each part has a byte of its own."""
  mesh = jax.make_mesh(
    (2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )
  tx = gradcomp.aps(
    axis_name="data", exchange="ring", accumulate=accumulate, min_leaf_size=0
  )
  x = laws.gaussian((2, 2, 600)) * np.float32([1, 2.0**60]).reshape(1, 2, 1)

  def update(x):
    own = {"w": x[0, 0]}
    out, state = tx.update(own, tx.init(own))
    return out["w"][None], state.residual["w"][None, None]

  both = P("data", "model")
  mapped = jax.shard_map(update, mesh=mesh, in_specs=both, out_specs=(P("model"), both))
  out, residual = jax.jit(mapped)(x)
  for i in range(2):
    (alone,), kept = modes.run("vmap", tx, [{"w": x[:, i]}])
    np.testing.assert_array_equal(out[i], alone["w"][0])
    np.testing.assert_array_equal(residual[:, i], kept["w"])


def test_a_cpu_writes_sums_down_before_it_encodes_them():
  """Else XLA fuses what adds the numbers into what packs them, and adds them anew."""
  codec = FloatCast(addends=4)
  total = codec.sums

  def owner(rows):
    partial = total.fold(rows, 0.25, keep=False)
    return total.finish(partial, Context(), None, 4, keep=False).rows

  rows = jnp.zeros((4, 8, codec.row_words), jnp.uint32)
  assert jax.jit(owner).lower(rows).compile().as_text().count(" conditional(") == 1
