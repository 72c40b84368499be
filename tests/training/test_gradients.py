"""Gradients stay each worker's own, in every place, until an exchange takes them."""

import contextlib
import functools

import chex
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
from tests.support.cases.steps import OVER, N, explicit_mesh, put, unreduced_axes

dense = gradcomp.dense(**OVER)
grads_of = functools.partial(gradcomp.value_and_grad, **OVER)


def loss_fn(params, batch):
  hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
  return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def problem():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  params = {"w": normal(16, 64) / 4, "b": normal(64), "v": normal(64, 8) / 8}
  return params, {"x": normal(8 * N, 16), "y": normal(8 * N, 8)}


def both(params, batch):
  """What ``value_and_grad`` returns, and ``jax.grad`` of deferred parameters."""
  deferred = gradcomp.defer_reduction(params, **OVER)
  return *grads_of(loss_fn)(params, batch), jax.grad(loss_fn)(deferred, batch)


@pytest.mark.parametrize("mode", [*modes.MODES, modes.AUTO])
def test_they_stay_per_worker(mode):
  """The loss is the mean of all, by ``value_and_grad``; gradients are a worker's."""
  params, batch = problem()
  rows = jax.tree.map(lambda x: x.reshape(N, -1, x.shape[1]), batch)
  own = jax.jit(jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0)))
  losses, expected = own(params, rows)
  if mode in ("pmap", "vmap"):
    each = getattr(jax, mode)(both, in_axes=(None, 0), **OVER)
    loss, *found = each(params, rows)
  elif mode == modes.AUTO:
    batch = put(batch, modes.mesh(N), "data")
    loss, grads = jax.jit(grads_of(loss_fn))(params, batch)
    found = [{name: x.rows for name, x in grads.items()}]
  else:
    stacked = lambda *given: jax.tree.map(lambda x: x[None], both(*given))
    places = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    checked = {"mesh": modes.mesh(N), "check_vma": mode == "shard_map"}
    loss, *found = jax.jit(jax.shard_map(stacked, **places, **checked))(params, batch)
  # Batched matrix products add in another order: 1e-6 is 8 ulp of values about 1.
  np.testing.assert_allclose(loss, np.broadcast_to(np.mean(losses), loss.shape), 1e-6)
  for grads in found:
    chex.assert_trees_all_close(grads, expected, rtol=1e-5, atol=1e-6)


def test_argnums_and_aux():
  def loss(scale, params, x):
    return jnp.mean(scale * params["w"] * x), {"largest": jnp.max(x)}

  grad_fn = grads_of(loss, argnums=(0, 1), has_aux=True)
  run = jax.vmap(grad_fn, in_axes=(None, None, 0), **OVER)
  x, half = np.arange(8, dtype=np.float32).reshape(N, 2), np.array([0.5, 2.5, 4.5, 6.5])
  found = jax.jit(run)(jnp.float32(2), {"w": jnp.float32(3)}, x)
  expected = (np.full(N, 21.0), {"largest": x[:, 1]}), (3 * half, {"w": 2 * half})
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_without_an_axis_it_is_jaxs_own():
  ours = jax.jit(gradcomp.value_and_grad(loss_fn, axis_name=None))
  theirs = jax.jit(jax.value_and_grad(loss_fn))
  assert_same_bits(ours(*problem()), theirs(*problem()))


# In plain jit under Auto axes.


def test_each_worker_has_its_own_key_and_rows():
  def loss(scale, batch, rng, *, more):
    assert (batch["x"].shape, more.shape) == ((2, 3), (4,))
    return scale * jnp.sum(batch["x"]) * jax.random.uniform(rng), jnp.sum(more)

  x, key = np.arange(24, dtype=np.float32).reshape(8, 3), jax.random.key(3)
  batch = {"x": put(x, modes.mesh(N), "data"), "name": "digits"}
  grad_fn = grads_of(loss, has_aux=True)
  (value, aux), grads = grad_fn(jnp.float32(2), batch, key, more=jnp.ones(4))
  drawn = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))
  each = x.reshape(N, 6).sum(1) * drawn(np.arange(N))
  np.testing.assert_allclose(grads.rows, each, rtol=1e-6)  # sums in another order
  np.testing.assert_allclose(value, 2 * np.mean(each), rtol=1e-6)
  assert (aux, grads.axis_name) == (4, "data")


def test_statistics_are_whole_on_each_worker_and_come_back_averaged():
  """With micro-batches: those that a worker has of its own rows."""

  def loss(w, statistics, x):
    assert (statistics["mean"].shape, x.shape) == ((N,), (2, 3))
    return jnp.sum(w * x), {"mean": statistics["mean"] + jnp.mean(x)}

  x = np.arange(48, dtype=np.float32).reshape(16, 3)
  grad_fn = grads_of(loss, has_aux=True, accumulate=2, batch_argnums=-1)
  given = jnp.float32(1), {"mean": jnp.ones(N)}, put(x, modes.mesh(N), "data")
  (_, after), grads = jax.jit(grad_fn)(*given)
  # Sums of small integers, and halves and quarters of them, are exact.
  np.testing.assert_array_equal(grads.rows, x.reshape(N, -1).sum(1) / 2)
  np.testing.assert_array_equal(after["mean"], np.full(N, 1 + x.mean()))


def test_all_batches_are_cut_into_the_same_micro_batches():
  """Not the first alone, which would be compared with all rows of the others."""

  def loss(frozen, w, x, y, rng):
    assert (frozen.shape, x.shape, y.shape) == ((7,), (1,), (1,))
    return w * jnp.sum(x * y)

  x = np.arange(8, dtype=np.float32)
  rows = put(x, modes.mesh(N), "data")
  grad_fn = jax.jit(grads_of(loss, argnums=1, accumulate=2))
  _, grads = grad_fn(x[:7], jnp.float32(1), rows, rows, jax.random.key(0))
  np.testing.assert_array_equal(grads.rows, (x * x).reshape(N, 2).mean(1))


def product(w, x, y):
  return jnp.sum(w * x * y)


# What a call does with the second of two batches, and how the error names it.
UNCUT = {
  "keyword": (lambda grad, w, x, y: grad(product)(w, x, y=y), "keyword y"),
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
  place = NamedSharding(modes.mesh(N), P("data"))
  x, y = (jax.ShapeDtypeStruct((N, n), np.float32, sharding=place) for n in (3, 1))
  step = lambda grad: jax.eval_shape(functools.partial(call, grad), jnp.ones(()), x, y)
  message = rf"`batch_argnums` .*float32\[4, 1\] in {name},"
  with pytest.raises(ValueError, match=message):
    step(grads_of)
  # What is as long by chance is whole, where batches are named.
  step(functools.partial(grads_of, batch_argnums=2 if way == "in_front" else 1))


def test_marks_are_on_top_or_on_each_leaf():
  """Trainers and other transformations look into the tree, which is like params."""
  mesh, tx = modes.mesh(N), gradcomp.qsgd(bits=4, **OVER)
  params, batch = problem()
  local = gradcomp.wrappers.clip_by_local_norm(0.5, **OVER)
  masked = optax.masked(tx, jax.tree.map(lambda _: True, params))
  guarded = gradcomp.skip_nonfinite(masked, 3, **OVER)
  rows = lambda grads: {name: x.rows for name, x in grads.items()}

  @jax.jit
  def updates(params, batch):
    grads = grads_of(loss_fn)(params, batch)[1]
    top = gradcomp.PerWorker(rows(grads), "data")
    given = (tx, grads), (tx, top), (masked, grads), (guarded, grads)
    given += (local, grads), (local, top)
    return grads, [x.update(g, x.init(params), params)[0] for x, g in given]

  with jax.set_mesh(mesh):
    grads, (leaves, *same, clipped, top) = updates(params, put(batch, mesh, "data"))
    state = tx.init(params)
  for other in same:
    assert_same_bits(other, leaves)
  assert_same_bits(rows(clipped), rows(top))
  other = gradcomp.PerWorker(grads["b"].rows, "host")
  one_axis = "gradients of all workers of one axis"
  stack = r"\['b'\] must stack the gradients of 4 .*64,"
  for given, message in (
    (params, r"gradcomp\.value_and_grad"),
    (gradcomp.PerWorker(params, "data"), stack),
    (grads | {"b": params["b"]}, one_axis),
    (grads | {"b": other}, one_axis),
  ):
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
      tx.update(given, state, params)
  with pytest.raises(ValueError, match="must name the axes of the gradients"):
    gradcomp.qsgd(bits=4, axis_name="host").update(grads, state, params)


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
def test_a_mesh_is_named_where_no_array_has_it():
  """NumPy's arrays outside of ``jax.set_mesh``, also ``with mesh:``."""
  mesh = modes.mesh(N)
  for around in (contextlib.nullcontext(), mesh):
    with around, pytest.raises(ValueError, match=r"mesh= of gradcomp\.value_and_grad"):
      jax.eval_shape(grads_of(loss_fn), *problem())
    with around:
      _, grads = jax.eval_shape(grads_of(loss_fn, mesh=mesh), *problem())
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, problem()[0])


# In plain jit under Explicit axes.


def test_aux_and_static_arguments():
  """``aux`` is averaged; what is no array passes through."""

  def loss(params, batch, *, norm, scale):
    assert norm in ("l1", "l2")
    error = batch["x"] @ params["w"] - batch["y"][:, :1]
    value = jnp.mean(jnp.abs(error) if norm == "l1" else error**2)
    return scale * value, {"mean": batch["x"].mean()}

  @functools.partial(jax.jit, static_argnames="norm")
  def mean_gradient(params, batch, scale, norm):
    found, grads = grads_of(loss, has_aux=True)(params, batch, norm=norm, scale=scale)
    assert unreduced_axes(grads) == {"data"}
    return found, dense.update(grads, dense.init(params))[0]

  params, batch = problem()
  mesh = explicit_mesh()
  given = put(params, mesh), put(batch, mesh, "data")
  got = mean_gradient(*given, jnp.float32(2), norm="l1")
  alone = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnames="norm")
  # A mean of 4 means and a mean of all: a few ulp of values about 1.
  expected = alone(params, batch, norm="l1", scale=2.0)
  chex.assert_trees_all_close(got, expected, rtol=1e-6, atol=2e-6)


def test_defer_reduction_in_plain_jit():
  """For a model of matrix products, which JAX can differentiate to addends itself."""

  def loss(params, batch):
    hidden = jax.nn.relu(jnp.einsum("bi,ih->bh", batch["x"], params["w"]))
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)

  def updates(params, batch):
    ours = grads_of(loss)(params, batch)[1]
    theirs = jax.grad(loss)(gradcomp.defer_reduction(params, **OVER), batch)
    assert unreduced_axes((ours, theirs)) == {"data"}
    return [dense.update(grads, dense.init(params))[0] for grads in (ours, theirs)]

  params, batch = problem()
  del params["b"]
  mesh = explicit_mesh()
  got, expected = jax.jit(updates)(put(params, mesh), put(batch, mesh, "data"))
  # Divided by N before or after the backward pass: a few ulp of values below 1.
  chex.assert_trees_all_close(got, expected, rtol=0, atol=1e-6)
  assert all(x.sharding.is_fully_replicated for x in got.values())


def test_arguments_that_are_cut_wrongly_are_refused():
  params, batch = problem()
  mesh = explicit_mesh()
  whole, cut = put(params, mesh), put(batch, mesh, "data")
  rows = whole | {"b": put(params["b"], mesh, "data")}
  for given, message in (
    ((whole, put(batch, mesh)), r"sharded over 'data'.*jax\.device_put\(batch"),
    ((rows, cut), r"`argnums`.*sharded over \['data'\]"),
  ):
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(grads_of(loss_fn), *given)
