"""Parameters that are sharded over the averaged axis are refused wherever that shows.

Their gradients are each worker's own rows, and an exchange would average different rows
with each other.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.support import modes
from tests.support.cases.steps import OVER, N, put

CUT = P("data", None)
WHOLE = {"w": np.ones((64, 64), np.float32)}
# Every sentence names the leaf, the axis and the cure.
SAYS = r"\['w'\].*'data'.*different rows.*Gather the parameters before jax.grad"

residual4 = functools.partial(gradcomp.qsgd, bits=4, feedback="error")


def problem(mesh, spec=CUT):
  batch = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
  return put(WHOLE, mesh, *spec), put(batch, mesh, "data")


def loss_fn(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2)


def of_rows(step, mesh, check_vma, *specs, cut=CUT):
  """A step with its own rows of the parameters on each worker."""
  places = {"in_specs": ({"w": cut}, *specs), "out_specs": {"w": cut}}
  return jax.shard_map(step, mesh=mesh, check_vma=check_vma, **places)


def sharded_step(tx, state, mesh):
  """As FSDP is written: JAX reduces the gradient and gives each worker its rows."""
  gathered = lambda params: {"w": lax.all_gather(params["w"], "data", tiled=True)}
  grad = jax.grad(lambda params, batch: loss_fn(gathered(params), batch))
  step = lambda params, state, x: tx.update(grad(params, x), state, params)[0]
  return of_rows(step, mesh, True, gradcomp.state_specs(state, **OVER), P("data"))


@pytest.mark.parametrize("make", [gradcomp.dense, gradcomp.qsgd])
def test_types_show_it(make):
  mesh, tx = modes.mesh(N), make(**OVER)
  params, batch = problem(mesh)
  state = tx.init(WHOLE)
  with pytest.raises(ValueError, match=rf"`params`{SAYS}.*defer_reduction"):
    jax.eval_shape(sharded_step(tx, state, mesh), params, state, batch)
  # What averages nothing takes rows.
  alone = gradcomp.qsgd(exchange="local", **OVER)
  state = alone.init(params)
  found = jax.eval_shape(sharded_step(alone, state, mesh), params, state, batch)
  assert found["w"].shape == (64, 64)


@pytest.mark.parametrize("axis, check_vma", [(0, True), (1, False)])
def test_residuals_show_it(axis, check_vma):
  """The state is of whole parameters; neither types nor ``params`` are needed."""
  mesh, tx = modes.mesh(N), residual4(exchange="all_gather", **OVER)
  cut = P(*[None] * axis, "data")
  with jax.set_mesh(mesh):
    state = tx.init(WHOLE)
  specs = gradcomp.state_specs(state, **OVER)
  step = of_rows(lambda *args: tx.update(*args)[0], mesh, check_vma, specs, cut=cut)
  with pytest.raises(ValueError, match=rf"`state.residual`{SAYS}.*gradcomp.init_state"):
    jax.eval_shape(step, problem(mesh, cut)[0], state)


@pytest.mark.parametrize("axis_name", ["data", ("host", "data")])
@pytest.mark.parametrize("spec", [CUT, P(None, ("model", "data"))], ids=str)
def test_specs_show_it(spec, axis_name):
  tx, specs = residual4(axis_name=axis_name), {"w": spec, "b": P()}
  params = WHOLE | {"b": np.ones(64, np.float32)}
  state = jax.eval_shape(tx.init, params)
  given = {"axis_name": axis_name, "param_specs": specs}
  with pytest.raises(ValueError, match=rf"`param_specs`{SAYS}"):
    gradcomp.init_state(tx, params, **given)
  with pytest.raises(ValueError, match=rf"`param_specs`{SAYS}"):
    gradcomp.state_specs(state, **given)
  found = gradcomp.state_specs(state, axis_name="chip", param_specs=specs)
  assert found.residual["b"] == P("chip")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_placement_shows_it(kind):
  """With a whole optimizer around, before a mesh is set; a step sees it by its type."""
  mesh = modes.mesh(N, kind)
  params, batch = problem(mesh)
  optimizer = optax.chain(residual4(**OVER), optax.sgd(0.1))
  refused = pytest.raises(ValueError, match=f"`params`{SAYS}")
  with refused:
    optimizer.init(params)
  with jax.set_mesh(mesh):
    with refused:
      optimizer.init(params)
    state = optimizer.init(problem(mesh, P())[0])
  step = gradcomp.make_train_step(loss_fn, optimizer, mesh=mesh, **OVER)
  if kind == AxisType.Explicit:
    with refused:
      step.eval_shape(params, state, batch)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_cure(check_vma):
  """Gathered before jax.grad, exchanged whole, and cut: the plain step's rows."""
  mesh, tx = modes.mesh(N), gradcomp.dense(**OVER)
  params, batch = problem(mesh)

  def step(params, batch):
    whole = {"w": lax.all_gather(params["w"], "data", tiled=True)}
    _, grads = gradcomp.value_and_grad(loss_fn, **OVER)(whole, batch)
    mean, _ = tx.update(grads, tx.init(whole))
    start = lax.axis_index("data") * params["w"].shape[0]
    return {"w": lax.dynamic_slice_in_dim(mean["w"], start, params["w"].shape[0])}

  got = jax.jit(of_rows(step, mesh, check_vma, P("data")))(params, batch)["w"]
  expected = jax.grad(loss_fn)(WHOLE, np.asarray(batch))["w"]
  # A mean of 4 means and a mean of all: a few ulp of values about 1.
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
