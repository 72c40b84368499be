"""Plain jit under Auto axes: gradients of all workers, and updates that take them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.auto import OVER, WORKERS, loss_fn, problem


def test_each_worker_has_its_own_key_and_rows():
  mesh = modes.mesh(WORKERS)

  def loss(scale, batch, rng, *, more):
    assert batch["x"].shape == (2, 3)
    assert more.shape == (4,)
    return scale * jnp.sum(batch["x"]) * jax.random.uniform(rng), jnp.sum(more)

  grad_fn = gradcomp.value_and_grad(loss, has_aux=True, **OVER)
  x = np.arange(24.0, dtype=np.float32).reshape(8, 3)
  batch = {"x": jax.device_put(x, NamedSharding(mesh, P("data"))), "name": "digits"}
  key = jax.random.key(3)
  (value, aux), grads = grad_fn(jnp.float32(2), batch, key, more=jnp.ones(4))
  each = [
    np.sum(x[2 * i : 2 * i + 2]) * jax.random.uniform(jax.random.fold_in(key, i))
    for i in range(WORKERS)
  ]
  np.testing.assert_allclose(grads.rows, each, rtol=1e-6)  # sums in another order
  np.testing.assert_allclose(value, 2 * np.mean(each), rtol=1e-6)
  assert aux == 4
  assert grads.axis_name == "data"


def test_a_batch_that_workers_cannot_share_is_named():
  mesh = modes.mesh(WORKERS)
  x = jax.device_put(np.ones((8, 3), np.float32), NamedSharding(mesh, P("data")))
  loss = lambda w, x, y: jnp.sum(w * x) + jnp.sum(y)
  given = jnp.float32(1), x, {"mask": np.ones(6, np.float32)}
  both = gradcomp.value_and_grad(loss, batch_argnums=(1, 2), **OVER)
  with pytest.raises(ValueError, match=r"argument 2 .* share equally, got .*\(6,\)"):
    both(*given)
  with pytest.raises(ValueError, match=r"`batch_argnums` .* differ .* got \[6, 8\]"):
    gradcomp.value_and_grad(loss, **OVER)(*given)
  only = gradcomp.value_and_grad(
    lambda *args: loss(*args[:2], 1.0), batch_argnums=-2, **OVER
  )
  _, grads = only(*given)
  np.testing.assert_array_equal(grads.rows, np.full(WORKERS, 6.0))
  with pytest.raises(ValueError, match=r"`batch_argnums` must be among the 3 .* got 3"):
    gradcomp.value_and_grad(loss, batch_argnums=3, **OVER)(*given)
  with pytest.raises(ValueError, match=r"uint32 .* \(2,\) .* jax.random.key\(seed\)"):
    both(*given[:2], jax.random.PRNGKey(0))
  with pytest.raises(ValueError, match="would compute the same gradient.* by position"):
    gradcomp.value_and_grad(lambda w, x: jnp.sum(w * x), **OVER)(given[0], x=x)


def product(w, x, y):
  return jnp.sum(w * x * y)


# What a call does with the second of two batches, and how the error names it.
UNCUT = {
  "keyword": (
    lambda grad, w, x, y: grad(product)(w, x, y=y),
    "keyword y",
  ),
  "in_front": (
    lambda grad, w, x, y: grad(lambda y, w, x: product(w, x, y), argnums=1)(y, w, x),
    "argument 0",
  ),
  "closed_over": (
    lambda grad, w, x, y: grad(lambda w, x: product(w, x, y))(w, x),
    "what `loss_fn` closes over",
  ),
  "held": (
    lambda grad, w, x, y: grad(jax.tree_util.Partial(product, y=y))(w, x),
    r"`loss_fn` .*\['y'\]",
  ),
}


@pytest.mark.parametrize("way", UNCUT)
def test_a_batch_that_no_worker_cuts_is_an_error(way):
  """With one row a worker it broadcast, and the gradient was another."""
  call, name = UNCUT[way]
  grad = functools.partial(gradcomp.value_and_grad, **OVER)
  place = NamedSharding(modes.mesh(WORKERS), P("data"))
  x, y = (
    jax.ShapeDtypeStruct((WORKERS, n), jnp.float32, sharding=place) for n in (3, 1)
  )
  step = lambda grad: jax.eval_shape(
    lambda *args: call(grad, *args), jnp.ones(()), x, y
  )
  with pytest.raises(
    ValueError, match=rf"`batch_argnums` .*float32\[4, 1\] in {name},"
  ):
    step(grad)
  # What is as long by chance is whole, where batches are named.
  step(functools.partial(grad, batch_argnums=2 if way == "in_front" else 1))


def test_statistics_are_whole_on_each_worker_and_come_back_averaged():
  """With micro-batches: those that a worker has of its own rows."""
  mesh = modes.mesh(WORKERS)
  x = np.arange(48.0, dtype=np.float32).reshape(16, 3)
  rows = jax.device_put(x, NamedSharding(mesh, P("data")))

  def loss(w, statistics, x):
    assert (statistics["mean"].shape, x.shape) == ((WORKERS,), (2, 3))
    return jnp.sum(w * x), {"mean": statistics["mean"] + jnp.mean(x)}

  options = {"has_aux": True, "accumulate": 2, "batch_argnums": 2}
  grad_fn = gradcomp.value_and_grad(loss, **options, **OVER)
  (_, after), grads = grad_fn(jnp.float32(1), {"mean": jnp.ones(WORKERS)}, rows)
  # Sums of small integers, and halves and quarters of them, are exact.
  np.testing.assert_array_equal(grads.rows, x.reshape(WORKERS, -1).sum(1) / 2)
  np.testing.assert_array_equal(after["mean"], np.full(WORKERS, 1 + x.mean()))


def test_all_batches_are_cut_into_the_same_micro_batches():
  """Not the first alone, which would be compared with all rows of the others."""
  mesh = modes.mesh(WORKERS)
  x = np.arange(8.0, dtype=np.float32)
  rows = jax.device_put(x, NamedSharding(mesh, P("data")))

  def loss(frozen, w, x, y, rng):
    assert (frozen.shape, x.shape, y.shape) == ((7,), (1,), (1,))
    return w * jnp.sum(x * y)

  options = {"argnums": 1, "accumulate": 2}
  grad_fn = gradcomp.value_and_grad(loss, **options, **OVER)
  _, grads = grad_fn(x[:7], jnp.float32(1), rows, rows, jax.random.key(0))
  # Sums of small integers, and halves of them, are exact.
  np.testing.assert_array_equal(grads.rows, (x * x).reshape(WORKERS, 2).mean(1))


def test_plain_gradients_are_an_error_with_the_cure():
  tx, mesh = gradcomp.qsgd(bits=4, **OVER), modes.mesh(WORKERS)
  params, batch = problem(mesh)
  with jax.set_mesh(mesh):
    state = tx.init(params)
    grads = jax.grad(loss_fn)(params, batch)
    with pytest.raises(ValueError, match=r"gradcomp\.value_and_grad"):
      tx.update(grads, state, params)
  marked = gradcomp.value_and_grad(loss_fn, **OVER)(params, batch)[1]
  with pytest.raises(ValueError, match="must name the axes of the gradients"):
    gradcomp.qsgd(bits=4, axis_name="host").update(marked, state, params)
  with pytest.raises(ValueError, match=r"\['b'\] must stack the gradients of 4 .*256,"):
    tx.update(gradcomp.PerWorker(params, "data"), state, params)


def test_a_mark_may_be_on_top_or_on_each_leaf():
  """Trainers and other transformations look into the tree, which is like params."""
  mesh = modes.mesh(WORKERS)
  params, batch = problem(mesh)
  local = gradcomp.wrappers.clip_by_local_norm(0.5, **OVER)
  sent = gradcomp.qsgd(bits=4, **OVER)
  masked = optax.masked(sent, jax.tree.map(lambda _: True, params))
  guarded = gradcomp.skip_nonfinite(masked, 3, **OVER)
  rows = lambda grads: {name: x.rows for name, x in grads.items()}

  @jax.jit
  def updates(params, batch):
    grads = gradcomp.value_and_grad(loss_fn, **OVER)(params, batch)[1]
    top = gradcomp.PerWorker(rows(grads), "data")
    given = (sent, grads), (sent, top), (masked, grads), (guarded, grads)
    given += (local, grads), (local, top)
    return [tx.update(x, tx.init(params), params)[0] for tx, x in given]

  with jax.set_mesh(mesh):
    leaves, *same, clipped, clipped_top = updates(params, batch)
  for other in same:
    assert_same_bits(other, leaves)
  assert_same_bits(rows(clipped), rows(clipped_top))
  assert set(clipped) == set(params)


def test_gradients_with_a_mark_on_some_leaves_are_an_error():
  rows = gradcomp.PerWorker(jnp.ones((WORKERS, 3)), "data")
  tx = gradcomp.qsgd(bits=4, **OVER)
  for other in (jnp.ones(3), gradcomp.PerWorker(rows.rows, "host")):
    with pytest.raises(ValueError, match="gradients of all workers of one axis"):
      tx.update({"w": rows, "b": other}, tx.init({"w": jnp.ones(3)}))
