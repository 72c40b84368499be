"""Residuals of fewer bits are unbiased, lose little, and are the same in all modes."""

import jax
import jax.numpy as jnp
import modes
import numpy as np
import optax
import pytest
from assertions import assert_same_bits, says
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from slow_cases import slow

import gradcomp
from gradcomp import ErrorFeedback, MomentumFeedback, residuals

WORKERS = 4
STORED = ("bfloat16", "int8")
each_way = pytest.mark.parametrize("stored", STORED)


to_int8 = jax.jit(residuals.to_int8)
to_bfloat16 = jax.jit(residuals.to_bfloat16)


def read(residual):
  """The numbers of a residual, in NumPy."""
  if not residuals.is_stored(residual):
    return np.asarray(residual).astype(np.float32)
  codes, scales = map(np.asarray, residual)
  size = codes.shape[-1] // max(scales.shape[-1], 1)
  return codes * np.repeat(scales, size, axis=-1)


def rounded(stored, x, lane):
  """What is read of finite numbers that were stored with these random integers."""
  return read((to_int8 if stored == "int8" else to_bfloat16)(x, lane))


def step_of(stored, x):
  """The distance between two numbers that can be stored, of each element."""
  if stored == "int8":
    kept = to_int8(x, np.zeros(x.shape, np.uint16))
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
@pytest.mark.parametrize("lane", [0, 0xFFFF])
def test_extreme_numbers_stay_finite_and_near(stored, lane):
  most = np.finfo(np.float32).max
  blocks = [[most, -most], [127.0, 64.0], [127.5, -127.5], [2.0**-126, 0.0], [0, -0.0]]
  x = np.array(blocks, np.float32)
  found = rounded(stored, x, np.full(x.shape, lane, np.uint16))
  assert np.isfinite(found).all()
  # A step is at most 1/64 of the block's largest. bfloat16 ends a step below float32.
  assert np.all(np.abs(found - x) <= np.abs(x).max(axis=1, keepdims=True) / 64)


@pytest.mark.parametrize(
  ("shape", "blocks"),
  [
    ((1,), (1,)),
    ((10,), (1,)),
    ((3, 512), (3, 2)),
    ((1000,), (4,)),
    ((2, 257), (2, 1)),
    ((0,), (0,)),
    ((2, 0), (2, 0)),
    ((0, 3), (0, 1)),
  ],
)
def test_blocks_divide_the_last_axis(shape, blocks):
  first = jax.eval_shape(lambda: residuals.zeros(shape, "int8"))
  assert (first.codes.shape, first.scales.shape) == (shape, blocks)
  lanes = jax.jit(lambda key: residuals.lanes(key, shape))(np.zeros(2, np.uint32))
  kept = to_int8(np.ones(shape, np.float32), lanes)
  assert jax.tree.map(jnp.shape, kept) == jax.tree.map(jnp.shape, first)
  ones = jax.jit(residuals.read)(kept)
  assert_same_bits(ones, read(kept))
  assert_same_bits(ones, np.ones(shape, np.float32))


def exchange(stored, *, codec=None, feedback=ErrorFeedback, **options):
  codec = codec or gradcomp.codecs.QSGD(bits=2, bucket_size=32, rounding="nearest")
  return gradcomp.compress(
    codec,
    axis_name="data",
    exchange="all_gather",
    min_leaf_size=0,
    feedback=feedback(residual_dtype=stored, **options),
  )


def gradients(seed, workers=WORKERS):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.standard_normal((workers, *shape)).astype(np.float32)
  return {"w": normal(6, 64), "b": normal(7), "s": normal()}


def steps(mode, tx, trees, *, state=None):
  """Outputs and residuals ``[N, ...]`` as floats, of steps one after the other."""
  params = jax.tree.map(lambda leaf: leaf[0], trees[0])
  update = modes.mapped(mode, tx, WORKERS)
  outputs, kept = [], []
  for tree in trees:
    output, state = update(tree, state, params)
    residual = state.residual
    if mode not in ("vmap", "pmap"):
      unstack = lambda x: np.asarray(x).reshape(WORKERS, -1, *x.shape[1:])
      residual = jax.tree.map(unstack, residual)
    floats = jax.tree.map(read, residual, is_leaf=residuals.is_stored)
    if mode == modes.EXPLICIT:  # in the units of addends
      floats = jax.tree.map(lambda x: x * np.float32(WORKERS), floats)
    outputs.append(jax.device_get(output))
    kept.append(floats)
  return outputs, kept


MODES = [
  (modes.EXPLICIT, "int8"),
  *slow((modes.EXPLICIT, "bfloat16")),
  *slow(*((mode, stored) for mode in modes.MODES[:3] for stored in STORED)),
]


@pytest.mark.parametrize(("mode", "stored"), MODES)
def test_all_modes_have_the_same_bits(mode, stored):
  trees = [gradients(i) for i in range(3)]
  trees[1]["w"][2, 3, 5] = np.nan
  tx = exchange(stored)
  assert_same_bits(steps(mode, tx, trees), steps("vmap", tx, trees))


@each_way
@pytest.mark.parametrize("feedback", [ErrorFeedback, *slow(MomentumFeedback)])
def test_nothing_is_lost_but_by_rounding(stored, feedback):
  trees = [gradients(i) for i in range(4)]
  outputs, kept = steps("vmap", exchange(stored, feedback=feedback), trees)
  before = jax.tree.map(np.zeros_like, kept[0])
  momentum = jax.tree.map(np.zeros_like, trees[0])
  decay = 0.9 if feedback is MomentumFeedback else 0.0
  for tree, output, after in zip(trees, outputs, kept, strict=True):
    for name in tree:
      momentum[name] = decay * momentum[name] + tree[name]
      residual = after[name].reshape(tree[name].shape)
      wanted = (momentum[name] + before[name].reshape(residual.shape)).sum(axis=0)
      got = residual.sum(axis=0) + WORKERS * output[name][0]
      # Each worker rounds to a neighbour, and float32 rounds a few sums of about 10.
      step = step_of(stored, after[name])
      bound = step.reshape(residual.shape).sum(axis=0) + 1e-5
      # What is read is a neighbour of what was stored, whose step may be twice as long.
      assert np.all(np.abs(got - wanted) <= 2 * bound)
    before = after


@each_way
def test_rounding_is_unbiased_over_keys(stored):
  """A z-test of the mean error, with the variance that is known exactly."""
  x = gradients(5, 1)["w"][0]
  keys = 64
  codec = gradcomp.codecs.QSGD(bits=2, bucket_size=32, rounding="nearest")

  def residual(stored, key):
    feedback = ErrorFeedback(residual_dtype=stored)
    tx = gradcomp.compress(codec, feedback=feedback, min_leaf_size=0, key=key)
    kept = tx.update(x, tx.init(x))[1].residual
    return residuals.read(kept).astype(jnp.float32)

  exact = np.asarray(jax.jit(lambda: residual("float32", 0))(), np.float64)
  every = jax.jit(jax.vmap(lambda seed: residual(stored, jax.random.key(seed))))
  error = np.asarray(every(np.arange(keys)), np.float64) - exact
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
  tree = [gradients(0)]
  tx = lambda decay: exchange("float32", residual_decay=decay)
  _, (plain,) = steps("vmap", tx(1.0), tree)
  _, (decayed,) = steps("vmap", tx(0.75), tree)
  assert_same_bits(decayed, jax.tree.map(lambda x: x * np.float32(0.75), plain))


@each_way
def test_where_nothing_is_finite_the_old_residual_stays(stored):
  """A row is a block here, which has a scale of its own."""
  trees = [gradients(0), gradients(1)]
  trees[1]["w"][1, 2, ::32] = np.inf
  trees[1]["b"][2, 3] = np.nan
  _, (old, new) = steps("vmap", exchange(stored), trees)
  assert_same_bits(new["w"][:, 2], old["w"][:, 2])
  assert_same_bits(new["b"], old["b"])
  assert all(np.any(new["w"][:, i] != old["w"][:, i]) for i in (0, 1, 3, 4, 5))


def test_a_state_takes_what_the_page_says():
  params = {"w": jnp.zeros((64, 512)), "b": jnp.zeros(512)}
  elements = 65 * 512
  nbytes = {}
  for stored in ("float32", *STORED):
    state = jax.eval_shape(exchange(stored).init, params)
    leaves = jax.tree.leaves(state.residual)
    nbytes[stored] = sum(x.size * x.dtype.itemsize for x in leaves)
  scales = 4 * elements / 256
  expected = {"float32": 4, "bfloat16": 2, "int8": 1 + scales / elements}
  assert nbytes == {name: x * elements for name, x in expected.items()}


loss_fn = lambda params, batch: jnp.mean((batch @ params["w"] + params["b"]) ** 2)


@pytest.mark.parametrize(
  ("axes", "stored"),
  [("one", "int8"), *slow(("one", "bfloat16"), ("two", "int8"), ("two", "bfloat16"))],
)
def test_a_training_keeps_its_state_in_place(axes, stored):
  """And on a mesh whose second axis cuts the parameters."""
  shape = (WORKERS,) if axes == "one" else (WORKERS, 2)
  count = WORKERS * len(shape) if axes == "two" else WORKERS
  mesh = jax.make_mesh(
    shape,
    ("data", "model")[: len(shape)],
    (jax.sharding.AxisType.Auto,) * len(shape),
    devices=jax.devices()[:count],
  )
  specs = {"w": P(None, "model") if axes == "two" else P(), "b": P()}
  params = {"w": jnp.ones((64, 512)), "b": jnp.ones(512)}
  tx = optax.chain(exchange(stored), optax.sgd(0.1))
  with jax.set_mesh(mesh):
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    params = jax.tree.map(place, params, specs)
    state = tx.init(params)
  about = lambda state: jax.tree.map(lambda x: (x.shape, x.dtype), state)
  before = about(state), residuals.shaped(state[0].residual)["w"].sharding.spec
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  batch = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64)), jnp.float32)
  losses = []
  for _ in range(5):
    params, state, metrics = step(params, state, batch)
    losses.append(float(metrics["loss"]))
  after = about(state), residuals.shaped(state[0].residual)["w"].sharding.spec
  assert before == after
  assert losses[-1] < losses[0]


@pytest.mark.slow
@each_way
def test_specs_of_parameters_reach_every_part(stored):
  mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
  params, specs = {"w": jnp.zeros((8, 512))}, {"w": P(None, "model")}
  state = gradcomp.init_state(
    exchange(stored), params, "data", param_specs=specs, mesh=mesh
  )
  for leaf in jax.tree.leaves(state.residual):
    assert leaf.sharding.spec == P("data", "model")
  bare = gradcomp.init_state(
    exchange(stored), params["w"], "data", param_specs=specs["w"], mesh=mesh
  )
  found = gradcomp.state_specs(bare, "data", param_specs=specs["w"])
  assert set(jax.tree.leaves(found.residual)) == {P("data", "model")}


@pytest.mark.slow
@each_way
def test_a_skipped_step_leaves_all_as_it_was(stored):
  tx = gradcomp.skip_nonfinite(exchange(stored), 3, axis_name="data")
  tree = gradients(0)
  update = modes.mapped("vmap", tx, WORKERS)
  params = jax.tree.map(lambda leaf: leaf[0], tree)
  _, state = update(tree, None, params)
  tree["w"][0, 0, 0] = np.nan
  _, after = update(tree, state, params)
  assert_same_bits(after.inner_state, state.inner_state)


@pytest.mark.slow
@each_way
def test_zero_stores_its_residuals_so(stored):
  codec = gradcomp.codecs.QSGD(bits=4, bucket_size=32, rounding="nearest")
  mesh = modes.mesh(WORKERS)
  tx = gradcomp.parallel.zero(
    optax.sgd(0.1),
    grads=codec,
    params=codec,
    axis_name="data",
    feedback=ErrorFeedback(residual_dtype=stored),
  )
  params = {"w": jnp.ones((64, 512)), "b": jnp.ones(512)}
  with jax.set_mesh(mesh):
    state = tx.init(params)
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  params, state, _ = step(params, state, jnp.ones((8, 64)))
  kinds = {residuals.kind(state.gradients.residual[name]) for name in params}
  assert kinds == {stored}


@each_way
def test_a_transformation_without_feedback_sends_what_waits(stored):
  codec = gradcomp.codecs.QSGD(bits=2, bucket_size=32, rounding="nearest")
  feedback = ErrorFeedback(residual_dtype=stored)
  first = gradcomp.compress(codec, feedback=feedback, min_leaf_size=0)
  tx = gradcomp.switch([1], [first, gradcomp.dense()])
  x = gradients(3)["w"][0]
  update = jax.jit(tx.update)
  _, state = update(x, tx.init(x))
  waits = read(state.inner.residual)
  sent, state = update(np.zeros_like(x), state)
  assert waits.any()
  assert_same_bits(sent, waits)
  assert not read(state.inner.residual).any()


def test_what_is_wrong_is_named():
  for bad in (None, "int4", jnp.float16, 8):
    with pytest.raises(ValueError, match=says("`residual_dtype`", "int8")):
      ErrorFeedback(residual_dtype=bad)
  for bad in (0, 1.5, -1, True):
    with pytest.raises(ValueError, match=says("`residual_decay`", "at most 1")):
      MomentumFeedback(residual_decay=bad)
  same = ErrorFeedback(residual_dtype=jnp.bfloat16)
  assert same == ErrorFeedback(residual_dtype="bfloat16") and hash(same)
  params = {"w": jnp.zeros((4, 64))}
  alone = lambda stored: gradcomp.compress(
    gradcomp.codecs.QSGD(bits=4), feedback=ErrorFeedback(residual_dtype=stored)
  )
  state = alone("float32").init(params)
  with pytest.raises(ValueError, match=says("['w']", "as int8", "got float32")):
    alone("int8").update(params, state)
  with pytest.raises(ValueError, match=says("`transformations`[1]", "bfloat16")):
    gradcomp.switch([2], [alone("float32"), alone("bfloat16")]).init(params)
