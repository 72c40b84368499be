"""Complex gradients travel as pairs of reals, in every mode, with the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits

WORKERS = 4
error4 = functools.partial(
  gradcomp.qsgd, bits=4, axis_name="data", feedback="error", min_leaf_size=0
)
MAKERS = {
  "two_shot": functools.partial(error4, exchange="two_shot"),
  "dense": functools.partial(gradcomp.dense, axis_name="data"),
  "redsync": functools.partial(gradcomp.redsync, 0.1, axis_name="data"),
}


def gradients(seed):
  """A complex matrix and scalar, and a real vector."""
  rng = np.random.default_rng(seed)
  parts = rng.standard_normal((WORKERS, 16, 32, 2)).astype(np.float32)
  w = parts[..., 0] + 1j * parts[..., 1]
  return {"w": w, "s": w[:, 0, 0], "b": parts[:, 0, :, 0]}


def pairs(tree):
  """Complex leaves as reals."""

  def pair(x):
    return np.stack([x.real, x.imag], -1) if np.iscomplexobj(x) else np.asarray(x)

  return jax.tree.map(pair, tree)


@pytest.mark.parametrize(
  "mode",
  [
    "shard_map",
    modes.EXPLICIT,
    *slow(modes.AUTO, "shard_map_unchecked", "pmap", "vmap"),
  ],
)
@pytest.mark.parametrize("name", ["two_shot", *slow("dense", "redsync")])
def test_complex_gradients_are_pairs_of_reals(mode, name):
  """The same bits as those of the pairs, and the same residuals."""
  trees = [gradients(seed) for seed in range(2)]
  outputs, residual = modes.run(mode, MAKERS[name](), trees)
  expected, kept = modes.run(mode, MAKERS[name](), [pairs(tree) for tree in trees])
  dtypes = {leaf: x.dtype.name for leaf, x in outputs[0].items()}
  assert dtypes == {"w": "complex64", "s": "complex64", "b": "float32"}
  assert_same_bits([pairs(jax.device_get(tree)) for tree in outputs], expected)
  assert_same_bits(residual, kept)


@pytest.mark.parametrize("kind", [AxisType.Explicit, *slow(AxisType.Auto)], ids=str)
def test_a_complex_model_trains(kind):
  """Least squares over the workers, with residuals that init makes."""
  mesh = modes.mesh(WORKERS, kind)
  x = gradients(0)["w"].reshape(-1, 32)
  loss_fn = lambda params, x: jnp.mean(jnp.abs(x @ params["w"] - 1j * x) ** 2)
  conjugate = optax.stateless(lambda updates, _: jax.tree.map(jnp.conj, updates))
  optimizer = optax.chain(error4(), conjugate, optax.adam(0.1))
  params = {"w": jnp.zeros((32, 32), jnp.complex64)}
  params = jax.device_put(params, NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  losses = []
  for _ in range(30):
    params, state, metrics = step(params, state, x)
    losses.append(float(metrics["loss"]))
  assert losses[-1] < 0.05 * losses[0]
  assert state[0].residual["w"].shape == (WORKERS * 32, 32, 2)


def test_addends_that_stay_where_they_are():
  """Under Explicit axes "local" returns them as unreduced as it takes them."""
  tx = gradcomp.dense(exchange="local")
  mesh = modes.mesh(WORKERS, AxisType.Explicit)
  grad_fn = gradcomp.value_and_grad(
    lambda w, x: jnp.mean(jnp.abs(w * x) ** 2), axis_name="data"
  )

  @jax.jit
  def update(w, x):
    grads = grad_fn(w, x)[1]
    got = tx.update(grads, tx.init(w))[0]
    assert jax.typeof(got) == jax.typeof(grads)
    return jax.reshard(got, P()), jax.reshard(grads, P())

  with jax.set_mesh(mesh):
    x = jax.device_put(gradients(0)["w"].reshape(-1, 32), P("data"))
    w = jax.device_put(jnp.ones(32, jnp.complex64), P())
    got, expected = update(w, x)
  np.testing.assert_array_equal(got, expected)


def test_a_state_of_shapes():
  params = jax.ShapeDtypeStruct((3, 4), jnp.complex64)
  assert error4(axis_name=None).init(params).residual.shape == (3, 4, 2)


def test_the_norm_of_complex_gradients():
  tx = gradcomp.wrappers.clip_by_local_norm(2.5)
  update = jax.jit(lambda grads: tx.update(grads, tx.init(grads))[0])
  clipped = update({"w": np.array([3 + 0j, 4j], np.complex64)})
  np.testing.assert_allclose(clipped["w"], [1.5, 2j])


def test_a_bad_part_is_seen():
  """And the whole bucket with it, as of real gradients."""
  tx = gradcomp.qsgd(bits=4, bucket_size=32, min_leaf_size=0)
  grads = np.ones(1024, np.complex64)
  grads[20] = complex(1.0, np.inf)
  update = jax.jit(lambda grads: tx.update(grads, tx.init(grads))[0])(grads)
  np.testing.assert_array_equal(np.isnan(update), np.arange(1024) // 16 == 1)
