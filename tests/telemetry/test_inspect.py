"""inspect shows what update does, to NumPy's arithmetic, and changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.codecs.tiles import tile_shape
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp.codecs import QSGD, FloatCast, OneBit, Ternary, TopK
from tests.oracles import inspect as oracle_inspect
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.inspect import WORKERS, gradients, some

# Of each codec, how many elements a bucket of a leaf has.
CODECS = {
  "qsgd": (QSGD(bits=4, bucket_size=64), 64),
  "ternary": (Ternary(), 512),
  "top_k": (TopK(density=0.05, selection="exact"), None),
  "one_bit": (OneBit(bucket_size=64), 64),
  "aps": (FloatCast(accumulate="float32"), None),
}


def exchange(codec, **options):
  options = {"feedback": "error", "min_leaf_size": 0, **options}
  return gradcomp.compress(codec, axis_name="data", **options)


def of_workers(function):
  """A function of one worker, for all of them."""
  return jax.jit(jax.vmap(function, axis_name="data"))


def one(tree):
  """What the first worker has; it must be what all have."""
  for leaf in jax.tree.leaves(tree):
    assert_same_bits(leaf, np.stack([leaf[0]] * len(leaf)))
  return jax.tree.map(lambda x: np.asarray(x[0]), tree)


def assert_close(got, expected, rtol=2e-5):
  """Sums of some thousand float32, and quotients of them."""
  for name, value in expected.items():
    np.testing.assert_allclose(
      getattr(got, name), value, rtol=rtol, atol=1e-6, err_msg=name
    )


@pytest.mark.parametrize("case", some(CODECS, ("qsgd", "ternary", "aps")))
def test_numbers_are_those_of_numpy(case):
  """In the second step, when there are residuals."""
  codec, width = case
  tx = exchange(codec, exchange="all_gather")

  def steps(before, grads):
    _, state = tx.update(before, tx.init(before))
    return state.residual, *gradcomp.telemetry.inspected_update(tx, grads, state)

  grads = gradients(seed=2)
  old, mean, after, found = of_workers(steps)(gradients(seed=1), grads)
  found = one(found)
  sums = {}
  for name, leaf in grads.items():
    of_leaf = width or tile_shape(codec.bind(like(leaf[0])))[-1]
    corrected, unsent = leaf + np.asarray(old[name]), after.residual[name]
    sums[name] = oracle_inspect.leaf(leaf, corrected, unsent, mean[name][0], of_leaf)
    metrics = found.leaves[f"['{name}']"]
    assert_close(metrics, oracle_inspect.metrics([sums[name]]))
    norm = np.sqrt(np.sum(np.square(unsent)) / WORKERS)
    np.testing.assert_allclose(metrics.residual_norm, norm, rtol=2e-5)
  assert_close(found.total, oracle_inspect.metrics(list(sums.values())))


def like(x):
  return gradcomp.codecs.Leaf(x.shape)


def step_and_look(tx):
  """What a first step of all workers returns, and what inspect shows of it."""
  return of_workers(
    lambda grads: gradcomp.telemetry.inspected_update(tx, grads, tx.init(grads))
  )


# Rows of 512 elements: three of a, and two of b, among four workers. c stays dense.
SHAPES = {"a": (3, 512), "b": (900,), "c": (5,)}
TWO_SHOT = exchange(
  QSGD(bits=4, bucket_size=64), exchange="two_shot", min_leaf_size=100
)


@pytest.fixture(scope="module")
def in_vmap():
  """What inspect shows of a first step in vmap, and the state after it."""
  _, after, found = step_and_look(TWO_SHOT)(gradients(**SHAPES))
  return one(found), after


def test_what_owners_keep_is_that_of_their_leaves(in_vmap):
  found, after = in_vmap
  (rows,) = after.server_residual[("data",)]
  squares = np.sum(np.square(rows), axis=(2, 3)).reshape(-1)
  parts = {"['a']": squares[:3], "['b']": squares[3:5], "['c']": squares[:0]}
  for name, part in parts.items():
    norm = found.leaves[name].owner_residual_norm
    np.testing.assert_allclose(norm, np.sqrt(part.sum()), rtol=2e-5)
  whole = np.sqrt(squares.sum())
  np.testing.assert_allclose(found.total.owner_residual_norm, whole, rtol=2e-5)


def numbers(tree):
  return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])


def looking(tx):
  """Returns numbers in place of the mean, so that modes.run can run it."""

  def update(grads, state, params=None):
    return {
      "found": numbers(gradcomp.telemetry.inspect(tx, grads, state, params))
    }, state

  return optax.GradientTransformation(tx.init, update)


@pytest.mark.parametrize(
  "mode", [modes.EXPLICIT, *slow("shard_map", "shard_map_unchecked", "pmap")]
)
def test_all_modes_show_the_same(mode, in_vmap):
  """And types say that all workers have it, or P() would not be accepted."""
  (output,), _ = modes.run(mode, looking(TWO_SHOT), [gradients(**SHAPES)])
  for own in output["found"]:
    # The same sums in another order.
    np.testing.assert_allclose(own, numbers(in_vmap[0]), rtol=2e-5, atol=1e-6)


def test_the_cosine_of_a_large_leaf_is_estimated():
  """Its tangent has a standard deviation of 3 %: half of sqrt(2 / 1021)."""
  tx = gradcomp.qsgd(bits=2, bucket_size=512, axis_name="data", exchange="all_gather")
  grads = gradients(w=(120, 500))
  mean, _, found = step_and_look(tx)(grads)
  found = one(found)
  m, true = np.asarray(mean["w"][0], np.float64), grads["w"].mean(axis=0)
  cosine = np.sum(m * true) / np.linalg.norm(m) / np.linalg.norm(true)
  tangent = lambda x: np.sqrt(1 / x**2 - 1)
  assert abs(tangent(found.total.cosine) / tangent(cosine) - 1) < 4 * 0.0313


def test_few_bytes_are_sent_beside_those_of_the_exchange():
  """A sketch of 1021 numbers, 256 counts and a dozen sums a leaf, and no gradient."""
  mesh = modes.mesh(WORKERS)
  tx = gradcomp.qsgd(bits=4, axis_name="data", exchange="all_gather")
  grads = {"w": jnp.ones((WORKERS, 128, 256))}
  state = tx.init({"w": grads["w"][0]})

  def sent(function):
    mapped = jax.shard_map(
      lambda grads, state: function(jax.tree.map(lambda x: x[0], grads), state),
      mesh=mesh,
      in_specs=(P("data"), P()),
      out_specs=P(),
    )
    return gradcomp.wire_report(jax.jit(mapped).lower(grads, state).compile())

  exchanged = gradcomp.explain(tx, {"w": grads["w"][0]}, workers=WORKERS)
  inspected = sent(functools.partial(gradcomp.telemetry.inspect, tx))
  more = inspected.bytes_sent - exchanged.bytes_sent
  assert 0 < more <= 2 * 4 * (1021 + 256 + 20)
  # Of one gradient in float32, of which an all-reduce sends each share twice.
  assert inspected.dense_bytes == 2 * 3 * 4 * 128 * 256 // WORKERS


@pytest.mark.parametrize("typed", [False, *slow(True)])
def test_leaves_that_are_cut_over_another_axis_are_measured_as_a_whole(typed):
  """Inside a map, and by their types. Buckets lie inside of the parts."""
  codec = QSGD(bits=4, bucket_size=64, rounding="nearest")
  tx = exchange(codec, exchange="all_gather", feedback=None)
  grads = gradients(workers=2, w=(8, 96), b=(64,))
  kinds = (AxisType.Explicit if typed else AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=jax.devices()[:4])
  cut = {"w": P("data", "model"), "b": P("data")}
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  placed = jax.tree.map(put, grads, cut)
  parts = {"w": P("model"), "b": P()}
  with jax.set_mesh(mesh):
    state = tx.init(jax.tree.map(lambda x, spec: put(x[0], spec), grads, parts))

  def mapped(grads, state):
    def local(grads, state):
      return gradcomp.telemetry.inspect(tx, jax.tree.map(lambda x: x[0], grads), state)

    specs = (cut, gradcomp.state_specs(state, axis_name="data"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(grads, state)

  def of_types(grads, state):
    addends = unreduce(jax.tree.map(lambda x: x / 2, grads), "data")
    return gradcomp.telemetry.inspect(tx, addends, state)

  found = jax.jit(of_types if typed else mapped)(placed, state)
  whole = one(step_and_look(tx)(grads)[2])
  for name in ("gradient_norm", "relative_error", "cosine", "zeros", "saturation"):
    np.testing.assert_allclose(
      getattr(found.total, name), getattr(whole.total, name), rtol=2e-5, err_msg=name
    )


def test_bytes_are_those_that_explain_shows(in_vmap):
  found, _ = in_vmap
  params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
  plan = gradcomp.explain(TWO_SHOT, params, workers=WORKERS)
  assert found.total.bytes_sent == plan.bytes_sent
  for leaf in plan.leaves:  # the sum may be of fractions, which float32 rounds
    assert found.leaves[leaf.path].bytes_sent == np.float32(leaf.bytes_sent)
