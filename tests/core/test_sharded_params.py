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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.support import modes

WORKERS = 4
CUT = P("data", None)
# Every sentence names the leaf, the axis and the cure.
SAYS = r"\['w'\].*'data'.*different rows.*Gather the parameters before jax.grad"

residual4 = functools.partial(gradcomp.qsgd, bits=4, feedback="error")


def problem(mesh, spec=CUT):
  rng = np.random.default_rng(0)
  batch = rng.standard_normal((8, 64)).astype(np.float32)
  place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  return {"w": place(jnp.ones((64, 64)), spec)}, place(batch, P("data"))


def gathering_loss(params, batch):
  """As FSDP is written: JAX reduces the gradient and gives each worker its rows."""
  whole = lax.all_gather(params["w"], "data", tiled=True)
  return jnp.mean((batch @ whole) ** 2)


def sharded_step(tx, mesh, specs, check_vma):
  """A step with its own rows of the parameters on each worker."""

  def step(params, state, batch):
    grads = jax.grad(gathering_loss)(params, batch)
    return tx.update(grads, state, params)[0]

  return jax.shard_map(
    step,
    mesh=mesh,
    in_specs=({"w": CUT}, specs, P("data")),
    out_specs={"w": CUT},
    check_vma=check_vma,
  )


@pytest.mark.parametrize("make", [gradcomp.dense, gradcomp.qsgd])
def test_types_show_it(make):
  mesh, tx = modes.mesh(WORKERS), make(axis_name="data")
  params, batch = problem(mesh)
  state = tx.init({"w": jnp.ones((64, 64))})
  step = sharded_step(
    tx, mesh, gradcomp.state_specs(state, axis_name="data"), check_vma=True
  )
  with pytest.raises(ValueError, match=rf"`params`{SAYS}.*defer_reduction"):
    jax.eval_shape(step, params, state, batch)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
def test_residuals_show_it(axis, check_vma):
  """The state is of whole parameters; neither types nor `params` are needed."""
  mesh, tx = modes.mesh(WORKERS), residual4(axis_name="data", exchange="all_gather")
  with jax.set_mesh(mesh):
    state = tx.init({"w": jnp.ones((64, 64))})
  specs = gradcomp.state_specs(state, axis_name="data")
  cut = P(*[None] * axis, "data")
  params, _ = problem(mesh, cut)
  update = jax.shard_map(
    lambda rows, state: tx.update(rows, state)[0],
    mesh=mesh,
    in_specs=({"w": cut}, specs),
    out_specs={"w": cut},
    check_vma=check_vma,
  )
  with pytest.raises(ValueError, match=rf"`state.residual`{SAYS}.*gradcomp.init_state"):
    jax.eval_shape(update, params, state)


@pytest.mark.parametrize("axis_name", ["data", ("host", "data")])
@pytest.mark.parametrize("spec", [CUT, P(None, ("model", "data"))], ids=str)
def test_specs_show_it(spec, axis_name):
  tx, specs = residual4(axis_name=axis_name), {"w": spec, "b": P()}
  params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
  with pytest.raises(ValueError, match=rf"`param_specs`{SAYS}"):
    gradcomp.init_state(tx, params, axis_name=axis_name, param_specs=specs)
  with pytest.raises(ValueError, match=rf"`param_specs`{SAYS}"):
    gradcomp.state_specs(tx.init(params), axis_name=axis_name, param_specs=specs)
  found = gradcomp.state_specs(tx.init(params), axis_name="chip", param_specs=specs)
  assert found.residual["b"] == P("chip")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_placement_shows_it(kind):
  """Also with a whole optimizer around, and before any mesh is set."""
  mesh = modes.mesh(WORKERS, kind)
  params, _ = problem(mesh)
  optimizer = optax.chain(gradcomp.dense(axis_name="data"), optax.adam(1e-2))
  with pytest.raises(ValueError, match=f"`params`{SAYS}"):
    optimizer.init(params)
  with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"`params`{SAYS}"):
    optimizer.init(params)


def test_train_step_shows_it():
  """By its type, where the state was made of whole parameters."""
  mesh = modes.mesh(WORKERS, AxisType.Explicit)
  optimizer = optax.chain(residual4(axis_name="data"), optax.sgd(0.1))
  params, batch = problem(mesh)
  with jax.set_mesh(mesh):
    state = optimizer.init(problem(mesh, P())[0])
  step = gradcomp.make_train_step(
    lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
    optimizer,
    axis_name="data",
    mesh=mesh,
  )
  with pytest.raises(ValueError, match=f"`params`{SAYS}"):
    step.lower(params, state, batch)


def test_what_averages_nothing_takes_rows():
  mesh, tx = modes.mesh(WORKERS), gradcomp.qsgd(axis_name="data", exchange="local")
  params, batch = problem(mesh)
  state = tx.init(params)
  specs = gradcomp.state_specs(state, axis_name="data")
  step = sharded_step(tx, mesh, specs, check_vma=True)
  assert jax.eval_shape(step, params, state, batch)["w"].shape == (64, 64)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_cure(check_vma):
  """Gathered before jax.grad, exchanged whole, and cut: the plain step's rows."""
  mesh, tx = modes.mesh(WORKERS), gradcomp.dense(axis_name="data")
  params, batch = problem(mesh)
  loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)

  def step(params, batch):
    whole = {"w": lax.all_gather(params["w"], "data", tiled=True)}
    _, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(whole, batch)
    mean, _ = tx.update(grads, tx.init(whole))
    start = lax.axis_index("data") * params["w"].shape[0]
    return {"w": lax.dynamic_slice_in_dim(mean["w"], start, params["w"].shape[0])}

  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=({"w": CUT}, P("data")),
    out_specs={"w": CUT},
    check_vma=check_vma,
  )
  got = jax.jit(mapped)(params, batch)["w"]
  expected = jax.grad(loss_fn)(problem(mesh, P())[0], np.asarray(batch))["w"]
  # A mean of 4 means and a mean of all: a few ulp of values about 1.
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
