"""Complex gradients travel as pairs of reals, and dense() adds float64 as it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.mesh.shard_maps import unreduce
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits

WORKERS = 4  # a mean of four is exact where the sum is
error4 = functools.partial(
  gradcomp.qsgd, bits=4, axis_name="data", feedback="error", min_leaf_size=0
)


def complex_gradients(seed):
  """A complex matrix and scalar, and a real vector."""
  rng = np.random.default_rng(seed)
  parts = rng.standard_normal((WORKERS, 16, 32, 2)).astype(np.float32)
  w = parts[..., 0] + 1j * parts[..., 1]
  return {"w": w, "s": w[:, 0, 0], "b": parts[:, 0, :, 0]}


def pairs(tree):
  """Complex leaves as reals."""
  pair = lambda x: np.stack([x.real, x.imag], -1) if np.iscomplexobj(x) else x
  return jax.tree.map(pair, jax.device_get(tree))


@pytest.mark.parametrize(
  "mode", ["shard_map", modes.EXPLICIT, *slow(modes.AUTO, "pmap", "vmap")]
)
def test_complex_gradients_are_pairs_of_reals(mode):
  """The same bits as those of the pairs, and the same residuals."""
  tx, trees = error4(exchange="two_shot"), [complex_gradients(i) for i in range(2)]
  outputs, residual = modes.run(mode, tx, trees)
  expected, kept = modes.run(mode, tx, [pairs(tree) for tree in trees])
  dtypes = {leaf: x.dtype.name for leaf, x in outputs[0].items()}
  assert dtypes == {"w": "complex64", "s": "complex64", "b": "float32"}
  assert_same_bits([pairs(tree) for tree in outputs], expected)
  assert_same_bits(residual, kept)


def test_a_complex_model_trains():
  """Least squares over the workers, with residuals that init makes."""
  mesh = modes.mesh(WORKERS, AxisType.Explicit)
  x = complex_gradients(0)["w"].reshape(-1, 32)
  loss_fn = lambda params, x: jnp.mean(jnp.abs(x @ params["w"] - 1j * x) ** 2)
  conjugate = optax.stateless(lambda updates, _: jax.tree.map(jnp.conj, updates))
  optimizer = optax.chain(error4(), conjugate, optax.adam(0.1))
  params = {"w": jnp.zeros((32, 32), jnp.complex64)}
  params, state = modes.placed(optimizer, params, mesh)
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  _, state, losses = modes.train(step, params, state, x, steps=30)
  assert losses[-1] < 0.05 * losses[0]
  assert state[0].residual["w"].shape == (WORKERS * 32, 32, 2)


def test_addends_that_stay_where_they_are():
  """Under Explicit axes "local" returns them as unreduced as it takes them."""
  tx = gradcomp.dense(exchange="local")

  @jax.jit
  def update(x):
    grads = unreduce(x, "data")
    got = tx.update(grads, tx.init(grads))[0]
    assert jax.typeof(got) == jax.typeof(grads)
    return jax.reshard(got, P()), jax.reshard(grads, P())

  with jax.set_mesh(modes.mesh(WORKERS, AxisType.Explicit)):
    got, expected = update(jax.device_put(complex_gradients(0)["w"], P("data")))
  np.testing.assert_array_equal(got, expected)


def test_states_norms_and_bad_parts_of_complex_leaves():
  params = jax.ShapeDtypeStruct((3, 4), jnp.complex64)
  assert error4(axis_name=None).init(params).residual.shape == (3, 4, 2)
  clip = gradcomp.wrappers.clip_by_local_norm(2.5)
  update = jax.jit(lambda grads: clip.update(grads, clip.init(grads))[0])
  clipped = update({"w": np.array([3 + 0j, 4j], np.complex64)})
  np.testing.assert_allclose(clipped["w"], [1.5, 2j])
  # The whole bucket is seen with a part, as of real gradients.
  tx = gradcomp.qsgd(bits=4, bucket_size=32, min_leaf_size=0)
  grads = np.ones(1024, np.complex64)
  grads[20] = complex(1.0, np.inf)
  update = jax.jit(lambda grads: tx.update(grads, tx.init(grads))[0])(grads)
  np.testing.assert_array_equal(np.isnan(update), np.arange(1024) // 16 == 1)


# Lost in float32: too large, too small, and too close to 1.
SPECIAL = [1e200, -3e-60, 1 + 1e-12, 0.0]


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


def doubles():
  rng = np.random.default_rng(0)
  w = rng.standard_normal((WORKERS, 8, 16))
  half, single = w.astype(np.float16), w[:, 1].astype(np.float32)
  w[:, 0, :4] = SPECIAL
  return {"half": half, "single": single, "w": w}


@pytest.mark.parametrize("mode", ["shard_map", modes.EXPLICIT, *slow("pmap", "vmap")])
@pytest.mark.parametrize(
  "options",
  [
    {},
    {"exchange": "two_shot", "feedback": "error"},
    *slow({"exchange": "all_gather"}),
  ],
  ids=str,
)
def test_the_dense_mean_is_that_of_float64(mode, options, x64):
  """Bit for bit, but for the order of the addends, which backends choose."""
  trees = [doubles()] * 2
  tx = gradcomp.dense(axis_name="data", **options)
  outputs, residual = jax.device_get(modes.run(mode, tx, trees))
  for output in outputs:
    for name, x in trees[0].items():
      got, few = output[name], 4 * np.finfo(x.dtype).eps
      assert got.dtype == x.dtype
      # In the order of the workers, in float64 for float64 and else in float32.
      total = sum(x.astype(np.promote_types(x.dtype, np.float32)))
      mean = np.stack([(total / WORKERS).astype(x.dtype)] * WORKERS)
      np.testing.assert_allclose(got, mean, few, atol=few)
      assert_same_bits(list(got), [got[0]] * WORKERS)
    np.testing.assert_array_equal(output["w"][0, 0, :4], SPECIAL)
  for name in residual or ():  # of half precision, what the cast of the mean loses
    leaf, info = residual[name], np.finfo(trees[0][name].dtype)
    assert leaf.dtype == np.float32
    assert np.abs(leaf).max(initial=0) <= (info.bits < 32) * 8 * info.eps


def test_one_device_changes_no_bit(x64):
  grads = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), doubles())
  for tx in (gradcomp.dense(), gradcomp.dense(feedback="error")):
    update, _ = jax.jit(tx.update)(grads, tx.init(grads))
    assert_same_bits(update, grads)


def test_float64_crosses_the_wire(x64):
  params = {name: jax.ShapeDtypeStruct((64,), name) for name in ("float64", "float32")}
  tx = gradcomp.dense(axis_name="data")
  explained = gradcomp.explain(tx, params, workers=WORKERS)
  assert explained.bytes_sent == 3 * 64 * (8 + 4) // 2


@pytest.mark.parametrize(
  "make, inf",
  [
    (lambda: gradcomp.qsgd(8, bucket_size=32), np.nan),
    (lambda: gradcomp.dense(jnp.bfloat16, feedback=None), np.inf),
    *slow((gradcomp.redsync, np.inf), (gradcomp.eight_bit, np.nan)),
  ],
)
def test_others_compute_in_float32(make, inf, x64):
  """And give the dtype back, and keep the dtypes of their state."""
  tx = make()
  grads = {"w": jnp.asarray(doubles()["w"][0].repeat(64, axis=0))}
  state = tx.init(grads)
  update, after = jax.jit(tx.update)(grads, state)
  single = {"w": grads["w"].astype(jnp.float32)}
  expected, _ = jax.jit(tx.update)(single, state)
  assert update["w"].dtype == jnp.float64
  assert_same_bits(np.float32(update["w"]), np.asarray(expected["w"]))
  np.testing.assert_array_equal(update["w"][0, 0], inf)
  assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, after)
