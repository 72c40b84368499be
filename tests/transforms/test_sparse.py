"""RedSync trains as momentum does, and its state has its place on a mesh."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import RandomK, TopK
from tests.support import modes
from tests.support.assertions import says
from tests.support.sparse_steps import N, redsync


@pytest.mark.parametrize(
  "codec, exchange, selects",
  [
    (TopK(density=0.05, selection="sampled"), "two_shot", True),
    (TopK(density=0.05), "all_gather", True),
    (RandomK(density=0.05), "psum", False),
  ],
  ids=["sampled-two_shot", "auto-all_gather", "RandomK-psum"],
)
def test_states_are_stacked_under_a_mesh(codec, exchange, selects):
  """What a worker has of its own is sharded over the axis, all else is replicated."""
  tx = gradcomp.compress(
    codec, axis_name="data", exchange=exchange, feedback="momentum", min_leaf_size=64
  )
  params = {"b": jnp.ones(3), "w": jnp.ones((10, 70))}
  with jax.set_mesh(modes.mesh(N)):
    state = jax.eval_shape(tx.init, params)
  specs = gradcomp.state_specs(state, axis_name="data")
  chex.assert_shape([state.velocity["w"], state.residual["w"]], (4 * 10, 70))
  assert specs.velocity["w"] == specs.residual["w"] == P("data")
  assert specs.count == specs.key == P()
  if not selects:
    assert state.memory is None and specs.memory is None
    return
  rows = N if exchange == "two_shot" else 1
  chex.assert_shape(state.memory.own[("data",)][1].used, (N * rows,))
  assert all(spec == P("data") for spec in specs.memory.own[("data",)][1])
  assert bool(state.server_residual) == (exchange == "two_shot")
  init = jax.vmap(lambda _: tx.init(params), axis_name="data")
  local = jax.eval_shape(init, jnp.arange(N))
  chex.assert_shape(local.memory.own[("data",)][1].used, (N, rows))


def test_without_a_map_or_a_mesh_nothing_is_selected_again():
  """Nobody knows the workers; only what uses thresholds again needs them."""
  params, given = {"w": np.ones((10, 70), np.float32)}, {"w": np.ones((N, 10, 70))}
  exact, sampled = (redsync(0.05, selection=x) for x in ("exact", "sampled"))

  def update(tx):
    state = tx.init(params)
    assert state.memory is None
    return jax.jit(jax.vmap(lambda g: tx.update(g, state)[0], axis_name="data"))

  assert np.count_nonzero(update(exact)(given)["w"][0]) == 35
  with pytest.raises(ValueError, match=says("`memory`", "thresholds", "got none")):
    update(sampled)(given)
