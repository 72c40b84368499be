"""Train steps lower for accelerators for which no kernel is written, without one."""

import jax
import jax.numpy as jnp
import optax
import pytest

import gradcomp
from tests.support import modes
from tests.support.cases.recipe import RECIPES, make


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


@pytest.mark.parametrize("name", RECIPES)
def test_a_train_step_lowers_for_tpu_and_rocm(name):
  """They run the references, which are operations of XLA alone."""
  mesh = modes.mesh(2)
  optimizer = optax.chain(make(name, axis_name="data"), optax.sgd(0.1))
  params = {"w": jnp.ones((512, 256)), "b": jnp.ones(256)}
  with jax.set_mesh(mesh):
    state = jax.eval_shape(optimizer.init, params)
  step = gradcomp.make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
  traced = step.trace(params, state, jax.ShapeDtypeStruct((4, 512), jnp.float32))
  for platform in ("tpu", "rocm"):
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.all_" in text  # gathers, reduces, or goes to all
    assert "custom_call" not in text
