"""Residuals are rounded to fewer bits without bias, and keep what a step did not send.

The table of codecs says that nothing else is lost, and that all places have equal bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import ErrorFeedback
from gradcomp._src.core import feedback
from gradcomp.codecs import QSGD
from tests.support import laws, modes
from tests.support.assertions import assert_same_bits

WORKERS = 4
CODEC = QSGD(bits=2, bucket_size=32, rounding="nearest")
STORED = ("bfloat16", "int8")
each_way = pytest.mark.parametrize("stored", STORED)
store = {
  "bfloat16": jax.jit(feedback.to_bfloat16),
  "int8": jax.jit(feedback.to_int8),
}


def read(residual):
  """The numbers of a residual, in NumPy."""
  if not feedback.is_stored(residual):
    return np.asarray(residual).astype(np.float32)
  codes, scales = map(np.asarray, residual)
  size = codes.shape[-1] // max(scales.shape[-1], 1)
  return codes * np.repeat(scales, size, axis=-1)


def rounded(stored, x, lane):
  """What is read of numbers that were stored with these random integers."""
  return read(store[stored](x, np.broadcast_to(np.asarray(lane, np.uint16), x.shape)))


def step_of(stored, x):
  """The distance between two numbers that can be stored, of each element."""
  if stored == "int8":
    kept = store["int8"](x, np.zeros(x.shape, np.uint16))
    return read(kept._replace(codes=np.ones(x.shape, np.int8)))
  return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0**-126))) - 7)


@each_way
def test_the_mean_over_all_random_integers_is_the_number(stored):
  """Exactly: of 2**16 equally likely ones, a fraction rounds up."""
  x = np.random.default_rng(0).standard_normal(16).astype(np.float32)
  x = np.append(x, [0.0, -0.0, 2.0**-100, -3.99]).astype(np.float32)
  every = np.broadcast_to(np.arange(2**16, dtype=np.uint16)[:, None], (2**16, 20))
  found = rounded(stored, np.broadcast_to(x, every.shape), every)
  mean = np.asarray(found, np.float64).mean(axis=0)
  # int8 has 16 bits of fraction: it drops less than that of a step.
  bound = 0 if stored == "bfloat16" else 2.0**-17
  step = step_of(stored, x)
  assert np.all(np.abs(mean - x) <= bound * step)
  assert np.all(np.abs(found - x) < step)


@each_way
def test_what_is_stored_already_stays(stored):
  rng = np.random.default_rng(1)
  x = rng.standard_normal((3, 512)).astype(np.float32)
  lane = lambda: rng.integers(2**16, size=x.shape, dtype=np.uint16)
  once = rounded(stored, x, lane())
  assert_same_bits(rounded(stored, once, lane()), once)


@each_way
def test_extreme_numbers_stay_finite_and_near(stored):
  most = np.finfo(np.float32).max
  blocks = [[most, -most], [127.0, 64.0], [127.5, -127.5], [2.0**-126, 0.0], [0, -0.0]]
  x = np.array(blocks, np.float32)
  for lane in (0, 0xFFFF):
    found = rounded(stored, x, lane)
    assert np.isfinite(found).all()
    # A step is at most 1/64 of a block's largest. bfloat16 ends a step below float32.
    assert np.all(np.abs(found - x) <= np.abs(x).max(axis=1, keepdims=True) / 64)


# The shapes of scales, by those of numbers; the last are of none.
SHAPES = {(1,): (1,), (10,): (1,), (3, 512): (3, 2), (1000,): (4,), (2, 257): (2, 1)}
SHAPES |= {(0,): (0,), (2, 0): (2, 0), (0, 3): (0, 1)}


def test_blocks_divide_the_last_axis():
  """All shapes in one program."""

  @jax.jit
  def stored(key):
    kept = []
    for shape in SHAPES:
      lanes = feedback.lanes(key, shape)
      kept.append(feedback.to_int8(jnp.ones(shape), lanes))
    return [(x, feedback.read_residual(x)) for x in kept]

  found = zip(SHAPES.items(), stored(np.zeros(2, np.uint32)), strict=True)
  for (shape, blocks), (kept, ones) in found:
    first = jax.eval_shape(functools.partial(feedback.first_residual, shape, "int8"))
    assert (first.codes.shape, first.scales.shape) == (shape, blocks)
    assert jax.tree.map(jnp.shape, kept) == jax.tree.map(jnp.shape, first)
    assert_same_bits(ones, read(kept))
    assert_same_bits(ones, np.ones(shape, np.float32))


def exchange(stored, **options):
  feedback = stored if stored == "ef21" else ErrorFeedback(residual_dtype=stored)
  options = {"exchange": "all_gather", "axis_name": "data"} | options
  return gradcomp.compress(CODEC, min_leaf_size=0, feedback=feedback, **options)


def gradients(seed):
  return laws.tree({"w": (6, 64), "b": (7,), "s": ()}, WORKERS, seed=seed)


@each_way
def test_rounding_is_unbiased_over_keys(stored):
  """A z-test of the mean error, with the variance that is known exactly."""
  x = gradients(5)["w"][0]
  keys = 64

  def residual(stored, key):
    tx = exchange(stored, axis_name=None, exchange="auto", key=key)
    kept = tx.update(x, tx.init(x))[1].residual
    return feedback.read_residual(kept).astype(jnp.float32)

  def both(seeds):
    rounded = jax.vmap(lambda seed: residual(stored, jax.random.key(seed)))(seeds)
    return residual("float32", 0), rounded

  exact, every = (np.asarray(x, np.float64) for x in jax.jit(both)(np.arange(keys)))
  error = every - exact
  step = step_of(stored, exact.astype(np.float32))
  fraction = np.mod(exact / step, 1.0)
  variance = keys * np.sum(step**2 * fraction * (1 - fraction))
  assert len(np.unique(error.reshape(keys, -1), axis=0)) == keys
  # Beyond 4 standard deviations once in 16,000; the keys are fixed.
  assert abs(error.sum()) <= 4 * np.sqrt(variance)
  # And not because nothing was random: as much noise as there should be, within a few
  # times the relative deviation of 24,576 squares.
  assert np.sum(error**2) == pytest.approx(variance, rel=0.05)


def test_what_waits_decays():
  x = gradients(0)["w"][0]

  def kept(decay):
    feedback = ErrorFeedback(residual_decay=decay)
    tx = gradcomp.compress(CODEC, feedback=feedback, min_leaf_size=0)
    return tx.update(x, tx.init(x))[1].residual

  plain, decayed = jax.jit(lambda: (kept(1.0), kept(0.75)))()
  assert np.any(plain)
  assert_same_bits(decayed, plain * np.float32(0.75))


@each_way
def test_where_nothing_is_finite_the_old_residual_stays(stored):
  """A row is a block here, which has a scale of its own."""
  trees = [gradients(0), gradients(1)]
  trees[1]["w"][1, 2, ::32] = np.inf
  trees[1]["b"][2, 3] = np.nan
  update = modes.started("vmap", exchange(stored), WORKERS).update
  state, kept = None, []
  for tree in trees:
    _, state = update(tree, state, jax.tree.map(lambda leaf: leaf[0], tree))
    is_stored = feedback.is_stored
    kept.append(jax.tree.map(read, state.residual, is_leaf=is_stored))
  old, new = kept
  assert_same_bits(new["w"][:, 2], old["w"][:, 2])
  assert_same_bits(new["b"], old["b"])
  assert all(np.any(new["w"][:, i] != old["w"][:, i]) for i in (0, 1, 3, 4, 5))


@each_way
def test_a_transformation_without_feedback_sends_what_waits(stored):
  first = exchange(stored, axis_name=None, exchange="auto")
  tx = gradcomp.wrappers.switch([1], [first, gradcomp.dense()])
  x = gradients(3)["w"][0]
  update = jax.jit(tx.update)
  _, state = update(x, tx.init(x))
  waits = read(state.inner.residual)
  sent, state = update(np.zeros_like(x), state)
  assert waits.any()
  assert_same_bits(sent, waits)
  assert not read(state.inner.residual).any()


PARAMS = {"w": np.ones((64, 512), np.float32), "b": np.ones(512, np.float32)}


def test_a_state_takes_what_the_page_says():
  elements = 65 * 512
  scales = 4 * elements / 256
  expected = {"float32": 4, "bfloat16": 2, "int8": 1 + scales / elements}
  for stored, each in expected.items():
    state = jax.eval_shape(exchange(stored).init, PARAMS)
    leaves = jax.tree.leaves(state.residual)
    assert sum(x.size * x.dtype.itemsize for x in leaves) == each * elements
    codecs = {"grads": CODEC, "params": CODEC, "axis_name": "data"}
    rule = ErrorFeedback(residual_dtype=stored)
    tx = gradcomp.parallel.zero(optax.sgd(0.1), feedback=rule, **codecs)
    options = {"axis_name": "data", "workers": WORKERS}
    state = gradcomp.checkpoint.state_shapes(tx, PARAMS, **options)
    kinds = {feedback.kind(state.gradients.residual[name]) for name in PARAMS}
    assert kinds == {stored}


@pytest.mark.parametrize("stored", [*STORED, "ef21"])
def test_specs_of_parameters_reach_every_part(stored):
  """And a training keeps its state there, on a mesh whose second axis cuts them."""
  # Eight emulated devices could hold all threads and wait for each other.
  mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2)
  specs, over = {"w": P(None, "model"), "b": P()}, {"axis_name": "data"}
  tx = exchange(stored, exchange="two_shot")
  state = gradcomp.init_state(tx, PARAMS, param_specs=specs, mesh=mesh, **over)
  of = lambda x: x.sharding.spec
  for found in (
    gradcomp.state_specs(state, param_specs=specs, **over),
    jax.tree.map(of, state),
  ):
    assert set(jax.tree.leaves(found.residual["w"])) == {P("data", "model")}
    assert found.estimate == (specs if stored == "ef21" else None)
  tx = optax.chain(tx, optax.sgd(0.1))
  place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  params = jax.tree.map(place, PARAMS, specs)
  with jax.set_mesh(mesh):
    state = tx.init(params)

  def about(state):
    placed = feedback.shaped(state[0].residual), state[0].estimate
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    return shapes, [of(tree["w"]) for tree in placed if tree]

  before = about(state)
  loss_fn = lambda params, x: jnp.mean((x @ params["w"] + params["b"]) ** 2)
  step = gradcomp.make_train_step(loss_fn, tx, mesh=mesh, **over)
  batch = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
  _, state, losses = modes.train(step, params, state, batch)
  assert before == about(state)
  assert losses[-1] < losses[0]
