"""States that would go wrong in silence are refused, or kept whole."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD
from tests.support import modes
from tests.support.assertions import assert_same_bits

WORKERS = 4


def loss_fn(params, batch):
  return sum(jnp.mean((batch @ leaf) ** 2) for leaf in jax.tree.leaves(params))


WHOLE = P()


def placed(tree, mesh, spec=WHOLE):
  return jax.device_put(tree, NamedSharding(mesh, spec))


@pytest.mark.parametrize("axis_name, on_mesh", [(None, True), ("data", False)])
def test_residuals_that_are_not_stacked_are_refused_in_plain_jit(axis_name, on_mesh):
  """Else each device would take the one residual for its own, typed as replicated."""
  mesh = modes.mesh(WORKERS, AxisType.Explicit)
  tx = gradcomp.qsgd(bits=4, axis_name=axis_name, feedback="error")
  params = placed({"w": jnp.ones((8, 256))}, mesh)
  batch = placed(jnp.ones((8, 8)), mesh, P("data"))
  with jax.set_mesh(mesh):
    state = tx.init(params)
  state = state if on_mesh else tx.init({"w": np.ones((8, 256), np.float32)})

  @jax.jit
  def step(params, state, batch):
    grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, batch)[1]
    return tx.update(grads, state)

  with pytest.raises(
    ValueError, match=r"`state.residual`\['w'\] must stack .*set_mesh"
  ):
    step(params, state, batch)


def test_parameters_of_the_shape_of_a_tile():
  """What an owner keeps has rows of 8 buckets of 512, as this parameter has."""
  mesh = modes.mesh(WORKERS)
  optimizer = optax.chain(
    gradcomp.qsgd(bits=4, axis_name="data", exchange="two_shot", feedback="error"),
    optax.sgd(0.1),
  )
  params = placed({"w": jnp.ones((8, 8, 512))}, mesh)
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  chex.assert_shape(state[0].server_residual[("data",)], (8, 8, 512))
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  step(params, state, jnp.ones((8, 8)))


def test_a_parameter_may_have_the_name_of_a_field():
  """What owners keep is told from a residual by its place in the state."""
  mesh = modes.mesh(WORKERS)
  optimizer = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
  params = {".memory": jnp.ones((8, 256)), "x.server_residual": jnp.ones(8)}
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  with pytest.raises(ValueError, match=r"residual\['.memory'\] must stack"):
    step(params, optimizer.init(params), jnp.ones((8, 8)))


def test_orbax_restores_what_owners_of_two_axes_keep(tmp_path):
  """The keys of these arrays are tuples of axes, which a file can only spell."""
  axes = ("data", "model")
  kinds = (AxisType.Explicit,) * 2
  mesh = jax.make_mesh((2, 2), axes, kinds, devices=jax.devices()[:4])
  tx = gradcomp.qsgd(
    bits=4, axis_name="data", exchange="two_shot", feedback="error", min_leaf_size=0
  )
  params = {
    "w": placed(jnp.ones((64, 128)), mesh, P(None, "model")),
    "b": placed(jnp.ones(4096), mesh),
  }
  with jax.set_mesh(mesh):
    new = tx.init(params)
  assert sorted(new.server_residual) == [("data",), axes]
  numbers = np.random.default_rng(0).normal(size=10**5).astype(np.float32)

  def filled(x):
    return jax.device_put(np.resize(numbers, x.shape).astype(x.dtype), x.sharding)

  state = jax.tree.map(filled, new)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", new)
  chex.assert_trees_all_equal_structs(restored, state)
  assert_same_bits(restored, state)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_are_copied_into_the_state(make):
  """Two transformations may share one, and a step that donates the state takes none."""
  mesh = modes.mesh(2)
  key = make(3)
  tx = functools.partial(gradcomp.qsgd, bits=8, axis_name="data", key=key)
  labels = {"a": "x", "b": "y"}
  optimizer = optax.chain(optax.partition({"x": tx(), "y": tx()}, labels), optax.sgd(1))
  params = placed({"a": jnp.ones((8, 256)), "b": jnp.ones((8, 256))}, mesh)
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  step(params, state, jnp.ones((8, 8)))
  assert not jax.random.key_data(key).is_deleted()
  optimizer.init({"a": jnp.ones(3), "b": jnp.ones(3)})


def test_what_half_precision_does_not_hold_of_a_mean_waits():
  """64,992 and a residual of 2,000 are more than its 65,504."""
  codec = QSGD(bits=4, bucket_size=32, rounding="nearest")
  tx = gradcomp.compress(codec, axis_name="data", feedback="error")
  grads = {"w": jnp.full((2, 1024), 64992, jnp.float16)}

  @functools.partial(jax.vmap, axis_name="data")
  def update(grads):
    state = tx.init(grads)._replace(residual={"w": jnp.full(1024, 2000.0)})
    return tx.update(grads, state)

  output, state = update(grads)
  assert (output["w"] == 65504).all()
  assert (state.residual["w"] == 66992 - 65504).all()


@pytest.mark.parametrize("bare", [False, True])
def test_states_of_a_part_of_the_parameters(bare):
  """optax.partition leaves holes, and one bare array looks like any number."""
  mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
  tx = gradcomp.qsgd(bits=8, axis_name="data", feedback="error")
  specs = {"w": P(None, "model"), "c": P()}
  params = {"w": jnp.ones((8, 256)), "c": jnp.ones((8, 16))}
  optimizer = optax.chain(
    optax.partition(
      {"x": tx, "y": gradcomp.dense(axis_name="data")}, {"w": "x", "c": "y"}
    ),
    optax.adam(0.1),
  )
  if bare:
    specs, params = specs["w"], params["w"]
    optimizer = optax.chain(tx, optax.adam(0.1))
  init = functools.partial(
    gradcomp.init_state, optimizer, params, axis_name="data", mesh=mesh
  )
  state = init(param_specs=specs)
  found = gradcomp.state_specs(state, axis_name="data", param_specs=specs)
  chex.assert_trees_all_equal_structs(found, state)
  residual = optax.tree.get(found, "residual", filtering=lambda _, x: x is not None)
  assert (residual if bare else residual["w"]) == P("data", "model")
  mu, count = (optax.tree.get(found[1], name) for name in ("mu", "count"))
  assert mu == specs and count == P()
