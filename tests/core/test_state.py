"""States that would go wrong in silence are refused, or kept whole."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.core.state import seed_words
from tests.support import modes, saved
from tests.support.assertions import assert_same_bits
from tests.support.cases.steps import N, put


def loss_fn(params, batch):
  return sum(jnp.mean((batch @ leaf) ** 2) for leaf in jax.tree.leaves(params))


def sent(**options):
  given = {"bits": 4, "axis_name": "data", "feedback": "error"}
  return gradcomp.qsgd(**given | options)


def test_residuals_that_are_not_stacked_are_refused_in_plain_jit():
  """Else each device would take the one residual for its own, typed as replicated."""
  mesh, tx = modes.mesh(N, AxisType.Explicit), sent(axis_name=None)
  first = {"w": np.ones((8, 256), np.float32)}
  batch = put(jnp.ones((8, 8)), mesh, "data")
  params, state = modes.placed(tx, first, mesh)

  def step(params, state, batch):
    grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, batch)[1]
    return tx.update(grads, state)

  stacked = r"`state.residual`\['w'\] must stack .*set_mesh"
  with pytest.raises(ValueError, match=stacked):
    jax.jit(step).lower(params, state, batch)


def test_parameters_of_the_shape_of_a_tile():
  """What an owner keeps has rows of 8 buckets of 512, as this parameter has."""
  mesh = modes.mesh(N)
  optimizer = optax.chain(sent(exchange="two_shot"), optax.sgd(0.1))
  params, state = modes.placed(optimizer, {"w": jnp.ones((8, 8, 512))}, mesh)
  chex.assert_shape(state[0].server_residual[("data",)], (8, 8, 512))
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  step.lower(params, state, jnp.ones((8, 8)))


def test_a_parameter_may_have_the_name_of_a_field():
  """What owners keep is told from a residual by its place in the state."""
  mesh, optimizer = modes.mesh(N), sent()
  params = {".memory": jnp.ones((8, 256)), "x.server_residual": jnp.ones(8)}
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  with pytest.raises(ValueError, match=r"residual\['.memory'\] must stack"):
    step(params, optimizer.init(params), jnp.ones((8, 8)))


def test_orbax_restores_what_owners_of_two_axes_keep(tmp_path):
  """The keys of these arrays are tuples of axes, which a file can only spell."""
  axes, kinds = ("data", "model"), (AxisType.Explicit,) * 2
  mesh = jax.make_mesh((2, 2), axes, kinds, devices=jax.devices()[:4])
  params = put({"b": jnp.ones(4096)}, mesh)
  params["w"] = put(jnp.ones((64, 128)), mesh, None, "model")
  with jax.set_mesh(mesh):
    new = sent(exchange="two_shot", min_leaf_size=0).init(params)
  assert sorted(new.server_residual) == [("data",), axes]
  numbers = np.random.default_rng(0).normal(size=10**5).astype(np.float32)
  fill = lambda x: np.resize(numbers, x.shape).astype(x.dtype)
  state = jax.tree.map(lambda x: jax.device_put(fill(x), x.sharding), new)
  restored = saved.through_orbax(state, tmp_path)
  chex.assert_trees_all_equal_structs(restored, state)
  assert_same_bits(restored, state)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_are_copied_into_the_state(make):
  """Two transformations may share one, and a step that donates the state takes none."""
  mesh, key = modes.mesh(2), make(3)
  parts = {name: sent(bits=8, key=key, feedback=None) for name in "xy"}
  optimizer = optax.chain(optax.partition(parts, {"a": "x", "b": "y"}), optax.sgd(1))
  params = put({"a": jnp.ones((8, 256)), "b": jnp.ones((8, 256))}, mesh)
  with jax.set_mesh(mesh):
    state = optimizer.init(params)
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  step(params, state, jnp.ones((8, 8)))
  assert not jax.random.key_data(key).is_deleted()
  words = np.asarray(jax.random.key_data(key))
  assert_same_bits(seed_words(words), words)
  optimizer.init({"a": jnp.ones(3), "b": jnp.ones(3)})


@pytest.mark.parametrize("bare", [False, True])
def test_states_of_a_part_of_the_parameters(bare):
  """optax.partition leaves holes, and one bare array looks like any number."""
  mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
  tx, dense = sent(bits=8), gradcomp.dense(axis_name="data")
  parts = optax.partition({"x": tx, "y": dense}, {"w": "x", "c": "y"})
  specs = {"w": P(None, "model"), "c": P()}
  params = {"w": jnp.ones((8, 256)), "c": jnp.ones((8, 16))}
  tx, specs, params = (tx, specs["w"], params["w"]) if bare else (parts, specs, params)
  optimizer = optax.chain(tx, optax.adam(0.1))
  over = {"axis_name": "data", "param_specs": specs}
  state = gradcomp.init_state(optimizer, params, mesh=mesh, **over)
  found = gradcomp.state_specs(state, **over)
  chex.assert_trees_all_equal_structs(found, state)
  residual = optax.tree.get(found, "residual", filtering=lambda _, x: x is not None)
  assert (residual if bare else residual["w"]) == P("data", "model")
  mu, count = (optax.tree.get(found[1], name) for name in ("mu", "count"))
  assert mu == specs and count == P()
