"""inspect shows what update does, to NumPy's arithmetic, and changes nothing."""

import functools

import jax
import jax.numpy as jnp
import modes
import numpy as np
import optax
import oracle_inspect
import pytest
from assertions import assert_same_bits, says
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from slow_cases import slow

import gradcomp
from gradcomp.codecs import (
  QSGD,
  EightBit,
  FloatCast,
  OneBit,
  PowerSGD,
  RandomK,
  Ternary,
  TopK,
)
from gradcomp.workers import unreduce

WORKERS = 4
# Of each codec, how many elements a bucket of a leaf has.
CODECS = {
  "qsgd": (QSGD(bits=4, bucket_size=64), 64),
  "ternary": (Ternary(), 512),
  "top_k": (TopK(density=0.05, selection="exact"), None),
  "one_bit": (OneBit(bucket_size=64), 64),
  "aps": (FloatCast(accumulate="float32"), None),
}


def gradients(seed=0, workers=WORKERS, **shapes):
  """Of each worker its own, with something in common."""
  rng = np.random.default_rng(seed)
  shapes = shapes or {"a": (20, 48), "b": (900,)}
  return {
    name: (rng.standard_normal(shape) + rng.standard_normal((workers, *shape))).astype(
      np.float32
    )
    for name, shape in shapes.items()
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


@pytest.mark.parametrize("codec, width", CODECS.values(), ids=CODECS)
def test_numbers_are_those_of_numpy(codec, width):
  """In the second step, when there are residuals."""
  tx = exchange(codec, exchange="all_gather")

  def steps(before, grads):
    _, state = tx.update(before, tx.init(before))
    found = gradcomp.inspect(tx, grads, state)
    return state.residual, found, *tx.update(grads, state)

  grads = gradients(seed=2)
  old, found, mean, after = of_workers(steps)(gradients(seed=1), grads)
  found = one(found)
  sums = {}
  for name, leaf in grads.items():
    of_leaf = width or gradcomp.codecs.tile_shape(codec.bind(like(leaf[0])))[-1]
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

  def both(grads):
    state = tx.init(grads)
    return gradcomp.inspect(tx, grads, state), *tx.update(grads, state)

  return of_workers(both)


def test_what_owners_keep_is_that_of_their_leaves():
  """Rows of 512 elements: five of a, and two of b, among four workers."""
  tx = exchange(QSGD(bits=4, bucket_size=64), exchange="two_shot")
  found, _, after = step_and_look(tx)(gradients(a=(5, 512), b=(1024,)))
  found = one(found)
  (rows,) = after.server_residual[("data",)]
  squares = np.sum(np.square(rows), axis=(2, 3)).reshape(-1)
  parts = {"['a']": squares[:5], "['b']": squares[5:7]}
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
    return {"found": numbers(gradcomp.inspect(tx, grads, state, params))}, state

  return optax.GradientTransformation(tx.init, update)


@pytest.fixture(scope="module")
def of_vmap():
  """The numbers of the test below in vmap."""
  found, *_ = step_and_look(MODES_TX)(gradients())
  return numbers(one(found))


MODES_TX = exchange(QSGD(bits=4, bucket_size=64), exchange="two_shot")


@pytest.mark.parametrize(
  "mode", ["shard_map", modes.EXPLICIT, *slow("shard_map_unchecked", "pmap")]
)
def test_all_modes_show_the_same(mode, of_vmap):
  """And types say that all workers have it, or P() would not be accepted."""
  (output,), _ = modes.run(mode, looking(MODES_TX), [gradients()])
  for own in output["found"]:
    # The same sums in another order.
    np.testing.assert_allclose(own, of_vmap, rtol=2e-5, atol=1e-6)


def test_the_cosine_of_a_large_leaf_is_estimated():
  """Its tangent has a standard deviation of 3 %: half of sqrt(2 / 1021)."""
  tx = gradcomp.qsgd(bits=2, bucket_size=512, axis_name="data", exchange="all_gather")
  grads = gradients(w=(300, 500))
  found, mean, _ = step_and_look(tx)(grads)
  found = one(found)
  m, true = np.asarray(mean["w"][0], np.float64), grads["w"].mean(axis=0)
  cosine = np.sum(m * true) / np.linalg.norm(m) / np.linalg.norm(true)
  tangent = lambda x: np.sqrt(1 / x**2 - 1)
  assert abs(tangent(found.total.cosine) / tangent(cosine) - 1) < 4 * 0.0313


def test_few_bytes_are_sent_beside_those_of_the_exchange():
  """A sketch of 1021 numbers, 256 counts and a dozen sums a leaf, and no gradient."""
  mesh = modes.mesh(WORKERS)
  tx = gradcomp.qsgd(bits=4, axis_name="data", exchange="all_gather")
  grads = {"w": jnp.ones((WORKERS, 512, 512))}
  state = tx.init({"w": grads["w"][0]})

  def sent(function):
    mapped = jax.shard_map(
      lambda grads, state: function(jax.tree.map(lambda x: x[0], grads), state),
      mesh=mesh,
      in_specs=(P("data"), P()),
      out_specs=P(),
    )
    return gradcomp.wire_report(jax.jit(mapped).lower(grads, state).compile())

  exchanged = sent(lambda grads, state: tx.update(grads, state)[0])
  inspected = sent(functools.partial(gradcomp.inspect, tx))
  more = inspected.bytes_sent - exchanged.bytes_sent
  assert 0 < more <= 2 * 4 * (1021 + 256 + 20)
  assert inspected.dense_bytes == exchanged.dense_bytes


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
      return gradcomp.inspect(tx, jax.tree.map(lambda x: x[0], grads), state)

    specs = (cut, gradcomp.state_specs(state, "data"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(grads, state)

  def of_types(grads, state):
    addends = unreduce(jax.tree.map(lambda x: x / 2, grads), "data")
    return gradcomp.inspect(tx, addends, state)

  found = jax.jit(of_types if typed else mapped)(placed, state)
  whole = one(step_and_look(tx)(grads)[0])
  for name in ("gradient_norm", "relative_error", "cosine", "zeros", "saturation"):
    np.testing.assert_allclose(
      getattr(found.total, name), getattr(whole.total, name), rtol=2e-5, err_msg=name
    )


def test_bytes_are_those_that_explain_shows():
  tx = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.adam(1e-3))
  grads = gradients(a=(64, 64), b=(128,))
  found = one(step_and_look(tx)(grads)[0])
  params = jax.tree.map(lambda x: x[0], grads)
  plan = gradcomp.explain(tx, params, workers=WORKERS)
  assert found.total.bytes_sent == plan.bytes_sent
  assert {leaf.path: leaf.bytes_sent for leaf in plan.leaves} == {
    path: metrics.bytes_sent for path, metrics in found.leaves.items()
  }


def inspected(tx, grads):
  """What inspect shows of a first step on one device."""
  return jax.jit(lambda grads: gradcomp.inspect(tx, grads, tx.init(grads)))(grads)


WRAPS = {
  "chain": lambda tx: optax.chain(optax.scale(2.0), tx, optax.adam(0.1)),
  "masked": lambda tx: optax.masked(tx, {"a": True, "b": False}),
  "partition": lambda tx: optax.partition(
    {"x": tx, "y": gradcomp.qsgd(bits=8, min_leaf_size=0)}, {"a": "x", "b": "y"}
  ),
  "switch": lambda tx: gradcomp.switch([100], [tx, optax.identity()]),
  "skip_nonfinite": lambda tx: gradcomp.skip_nonfinite(tx, 3),
  "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
  "MultiSteps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
}


RARE = ("skip_nonfinite", "apply_if_finite", "masked")


def some(cases, rare):
  """The cases, of which these are slow."""
  marks = lambda name: pytest.mark.slow if name in rare else ()
  return [pytest.param(x, id=name, marks=marks(name)) for name, x in cases.items()]


@pytest.mark.parametrize("wrap", some(WRAPS, RARE))
def test_it_is_found_wherever_it_is(wrap):
  tx = gradcomp.qsgd(bits=4, min_leaf_size=0)
  grads = jax.tree.map(lambda x: x[0], gradients())
  found = inspected(wrap(tx), grads)
  paths = "a" if wrap is WRAPS["masked"] else "ab"
  assert list(found.leaves) == [f"['{path}']" for path in paths]
  for metrics in found.leaves.values():
    assert 0 < metrics.relative_error < 0.5
    assert 0.9 < metrics.cosine <= 1.000001
  assert 0.9 < found.total.cosine <= 1.000001


def test_the_same_leaf_may_be_sent_twice():
  tx = optax.chain(gradcomp.qsgd(bits=4), gradcomp.qsgd(bits=8))
  found = inspected(tx, {"w": jnp.linspace(-1, 1, 4096)})
  assert list(found.leaves) == ["['w']", "['w'] #2"]


def test_what_a_step_does_not_run_is_nan():
  tx = optax.MultiSteps(gradcomp.qsgd(bits=4), 2).gradient_transformation()
  found = inspected(tx, {"w": jnp.ones(4096)})
  assert np.isnan(found.total.relative_error)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_makes_numbers_nan(bad):
  tx = gradcomp.qsgd(bits=4, min_leaf_size=0, feedback="error")
  grads = {"a": jnp.ones(64).at[3].set(bad), "b": jnp.linspace(-1, 1, 64)}
  found = inspected(tx, grads)
  for name in ("relative_error", "cosine", "wen_bound"):
    assert np.isnan(getattr(found.leaves["['a']"], name)), name
    assert np.isnan(getattr(found.total, name)), name
    assert np.isfinite(getattr(found.leaves["['b']"], name)), name
  assert not np.isfinite(found.total.gradient_norm)
  assert found.leaves["['a']"].exponents[255] == 1 / 64


def test_zeros_and_nothing_have_numbers():
  tx = gradcomp.qsgd(bits=4, min_leaf_size=0, feedback="error")
  found = inspected(tx, {"w": jnp.zeros(100), "x": jnp.zeros((0, 3))})
  assert found.total.zeros == 1 and found.total.levels == 1
  for leaf in jax.tree.leaves(found):
    assert np.all(np.isfinite(leaf))
  empty = gradcomp.inspect(tx, {}, tx.init({}))
  assert empty.leaves == {} and empty.total.zeros == 0


OTHERS = {
  "power_sgd": gradcomp.compress(PowerSGD(rank=2)),
  "dense": gradcomp.dense(),
  "redsync": gradcomp.redsync(0.1, min_leaf_size=0),
  "random_k": gradcomp.compress(RandomK(density=0.1), min_leaf_size=0),
  "eight_bit": gradcomp.compress(EightBit(), min_leaf_size=0),
  "column": gradcomp.compress(OneBit(per_column=True), min_leaf_size=0),
}


@pytest.mark.parametrize("tx", some(OTHERS, ("random_k", "eight_bit", "column")))
def test_any_codec_can_be_seen(tx):
  grads = {"w": jnp.sin(jnp.arange(64.0 * 64)).reshape(64, 64).astype(jnp.bfloat16)}
  for leaf in jax.tree.leaves(inspected(tx, grads)):
    assert leaf.dtype == jnp.float32 and np.all(np.isfinite(leaf))


def test_complex_gradients_are_seen_as_pairs():
  tx = gradcomp.qsgd(bits=4, min_leaf_size=0)
  found = inspected(tx, {"w": jnp.array([3 + 4j, 0j] * 50)})
  np.testing.assert_allclose(found.total.gradient_norm, 5 * np.sqrt(50), rtol=1e-6)


def test_exponents_of_a_large_leaf_are_sampled():
  """In 128 runs of 128, evenly spaced: the share of each half is exact."""
  x = jnp.concatenate([jnp.full(2**17, 0.75), jnp.full(2**17, -3.0)])
  found = inspected(gradcomp.qsgd(bits=4), {"w": x})
  assert found.total.exponents[126] == found.total.exponents[128] == 0.5


@pytest.mark.parametrize("axis_name", ["data", *slow(None)])
def test_make_train_step_shows_a_step_and_changes_nothing(axis_name):
  """The third step is inspected in one of two runs, which end with the same bits."""
  exchange = gradcomp.qsgd(bits=4, feedback="error", axis_name=axis_name)
  optimizer = optax.chain(exchange, optax.adam(0.1))
  mesh = modes.mesh(WORKERS)
  step = gradcomp.make_train_step(
    lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
    optimizer,
    axis_name=axis_name,
    mesh=mesh,
    donate=False,
  )
  params = {"w": jnp.ones((64, 64))}
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  for i in range(3):
    given = params, state, jnp.sin(jnp.arange(8.0 * 64) + i).reshape(8, 64)
    params, state, metrics = step(*given)
    assert "inspection" not in metrics
  *seen, metrics = step(*given, inspect=True)
  assert_same_bits(seen, [params, state])
  assert 0 < metrics["inspection"].total.residual_norm
  assert 0.9 < metrics["inspection"].total.cosine <= 1.000001


def test_a_table_has_a_line_for_each_leaf():
  found = inspected(gradcomp.qsgd(bits=4), {"w": jnp.linspace(-1, 1, 4096)})
  header, leaf, total = str(found).splitlines()
  assert header.split()[:3] == ["leaf", "bytes", "sent"]
  assert leaf.startswith("['w']") and total.startswith("total")
  assert leaf.split()[1:] == total.split()[1:]


QSGD4 = gradcomp.qsgd(bits=4)
W = {"w": jnp.ones(64)}


BAD = {
  "no transformation": (
    QSGD4.update,
    (),
    TypeError,
    ["`optimizer` must be an optax.Grad", "got <func"],
  ),
  "none of ours": (
    optax.adam(0.1),
    None,
    ValueError,
    ["`optimizer` must have a gradcomp tr", "init"],
  ),
  "no state": (QSGD4, (), ValueError, ["`opt_state`", "0 states", "optimizer.init"]),
  "another state": (
    optax.chain(QSGD4, QSGD4),
    QSGD4.init(W),
    ValueError,
    ["`opt_state` must be that of `optimizer`", "2 gradcomp", "states of 1", "init"],
  ),
}


@pytest.mark.parametrize("optimizer, state, error, parts", BAD.values(), ids=BAD)
def test_errors_name_the_argument_the_rule_and_the_cure(optimizer, state, error, parts):
  state = optimizer.init(W) if state is None else state
  with pytest.raises(error, match=says(*parts)):
    gradcomp.inspect(optimizer, W, state)


def test_inspect_is_a_flag_of_a_step():
  step = gradcomp.make_train_step(lambda params, batch: 0.0, QSGD4, axis_name=None)
  with pytest.raises(ValueError, match=says("`inspect` must be a bool, got 50")):
    step(W, QSGD4.init(W), jnp.ones(2), inspect=50)
