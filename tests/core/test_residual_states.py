"""States hold residuals of fewer bits as the page says, wherever they are made."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp import ErrorFeedback
from gradcomp._src.core import residual_storage
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.cases.residual import STORED, WORKERS, each_way, exchange


def test_a_state_takes_what_the_page_says():
  params = {"w": jnp.zeros((64, 512)), "b": jnp.zeros(512)}
  elements = 65 * 512
  nbytes = {}
  for stored in ("float32", *STORED):
    state = jax.eval_shape(exchange(stored).init, params)
    leaves = jax.tree.leaves(state.residual)
    nbytes[stored] = sum(x.size * x.dtype.itemsize for x in leaves)
  scales = 4 * elements / 256
  expected = {"float32": 4, "bfloat16": 2, "int8": 1 + scales / elements}
  assert nbytes == {name: x * elements for name, x in expected.items()}


loss_fn = lambda params, batch: jnp.mean((batch @ params["w"] + params["b"]) ** 2)


@pytest.mark.parametrize(
  ("axes", "stored"),
  [("one", "int8"), *slow(("one", "bfloat16"), ("two", "int8"), ("two", "bfloat16"))],
)
def test_a_training_keeps_its_state_in_place(axes, stored):
  """And on a mesh whose second axis cuts the parameters."""
  shape = (WORKERS,) if axes == "one" else (WORKERS, 2)
  count = WORKERS * len(shape) if axes == "two" else WORKERS
  mesh = jax.make_mesh(
    shape,
    ("data", "model")[: len(shape)],
    (jax.sharding.AxisType.Auto,) * len(shape),
    devices=jax.devices()[:count],
  )
  specs = {"w": P(None, "model") if axes == "two" else P(), "b": P()}
  params = {"w": jnp.ones((64, 512)), "b": jnp.ones(512)}
  tx = optax.chain(exchange(stored), optax.sgd(0.1))
  with jax.set_mesh(mesh):
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    params = jax.tree.map(place, params, specs)
    state = tx.init(params)
  about = lambda state: jax.tree.map(lambda x: (x.shape, x.dtype), state)
  before = about(state), residual_storage.shaped(state[0].residual)["w"].sharding.spec
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  batch = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64)), jnp.float32)
  losses = []
  for _ in range(5):
    params, state, metrics = step(params, state, batch)
    losses.append(float(metrics["loss"]))
  after = about(state), residual_storage.shaped(state[0].residual)["w"].sharding.spec
  assert before == after
  assert losses[-1] < losses[0]


@pytest.mark.slow
@each_way
def test_specs_of_parameters_reach_every_part(stored):
  mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
  params, specs = {"w": jnp.zeros((8, 512))}, {"w": P(None, "model")}
  state = gradcomp.init_state(
    exchange(stored), params, axis_name="data", param_specs=specs, mesh=mesh
  )
  for leaf in jax.tree.leaves(state.residual):
    assert leaf.sharding.spec == P("data", "model")
  bare = gradcomp.init_state(
    exchange(stored), params["w"], axis_name="data", param_specs=specs["w"], mesh=mesh
  )
  found = gradcomp.state_specs(bare, axis_name="data", param_specs=specs["w"])
  assert set(jax.tree.leaves(found.residual)) == {P("data", "model")}


@pytest.mark.slow
@each_way
def test_zero_stores_its_residuals_so(stored):
  codec = gradcomp.codecs.QSGD(bits=4, bucket_size=32, rounding="nearest")
  mesh = modes.mesh(WORKERS)
  tx = gradcomp.parallel.zero(
    optax.sgd(0.1),
    grads=codec,
    params=codec,
    axis_name="data",
    feedback=ErrorFeedback(residual_dtype=stored),
  )
  params = {"w": jnp.ones((64, 512)), "b": jnp.ones(512)}
  with jax.set_mesh(mesh):
    state = tx.init(params)
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  params, state, _ = step(params, state, jnp.ones((8, 64)))
  kinds = {residual_storage.kind(state.gradients.residual[name]) for name in params}
  assert kinds == {stored}
