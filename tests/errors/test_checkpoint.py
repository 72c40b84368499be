"""What is no state of N workers, and what cannot be placed, is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp
from tests.errors import table
from tests.support import modes
from tests.support.cases import reshard as cases

ROWS = """
reshard(workers=v) for v in 0, 1.5 ; shapes_of(workers=v) for v in 0, "4" -> `workers`
  must be a number of workers, ... got {v}
reshard(old_workers=-1) -> `old_workers` must be ... got -1
reshard(axis_name="model") -> `axis_name` must be ... 'data', got 'model'
reshard(keep="both") -> `keep` must be one of
under_mesh(reshard) ; reshard(mesh=MESH) -> `workers` ... 'data': 4 ... got 2; pass mesh
jax.eval_shape(lambda state: reshard(opt_state=state), state()) -> `opt_state`.count ...
  inside a transformed function; call gradcomp.reshard_state
f(platform=v) for f in functools.partial(make_record, TX, cases.PARAMS, workers=4),
  shapes_of, functools.partial(explain, TX, {}, workers=4), PlanOptions for v in "TPU",
  3 ; reshard(old_platform=v) for v in "TPU", 3 -> platform` must be one of ('cpu',
  'gpu', 'tpu'), ... got {v}
# States of others.
reshard(old_workers=8) -> `opt_state` must be the global state of 8 workers ...
  .residual['b'] must be float32[56], got float32[28], as if made for 4 workers ... Pass
  old_workers=
reshard(params=cases.PARAMS | {"w": jnp.zeros((40, 33))}) -> `opt_state` ...
  .residual['w'] must be float32[160, 33], got ... [160, 32]
reshard(params={"w": cases.PARAMS["w"]}) -> ['b'] is too much; .residual['one'] is too
reshard(optimizer=cases.compressed("ring", "error")) -> .server_residual ... too much
reshard(optimizer=cases.compressed("two_shot", "momentum")) -> .velocity ... is missing
reshard(opt_state=[*state()]) ; reshard(optimizer=optax.chain(TX)) -> state` ... missing
reshard(opt_state=state()._replace(server_residual=None)) -> .server_residual ...
  missing
reshard(opt_state=state()._replace(residual=state().residual | {"b": HALF})) ->
  `opt_state` ... ['b'] must be float32[28], got float16[28]. Pass
reshard(optimizer=optax.GradientTransformation(counted, TX.update)) -> `optimizer.init`
  must return ... `count`
check_record(v, RECORD) for v in None, {}, {"format": 1} -> TypeError: `saved` must be
check_record(RECORD, {"format": 1, "gradcomp": "0"}) -> TypeError: `record` must be
put_on_mesh({"x": [np.zeros(s)]}, MESH, {"x": v}) for s in (6, 3), () for v in
  P("data"), P(None, "data"), P("model"), P(("data", "model")) ->
  `specs['x'][0]` must cut ... {s} ... {'data': 4} ... {v!s}
put_on_mesh({"x": np.zeros(4)}, MESH, {"y": P()}) -> `specs` must be a tree of Partition
"""
TX = cases.compressed("two_shot", "error")
MESH = modes.mesh(4)
HALF = np.zeros(28, np.float16)
shapes_of = functools.partial(
  gradcomp.checkpoint.state_shapes, TX, cases.PARAMS, workers=4, axis_name="data"
)
RECORD = gradcomp.checkpoint.make_record(TX, cases.PARAMS, workers=4)


@functools.cache
def state():
  return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), cases.shapes(TX, 4))


def reshard(**options):
  given = {"opt_state": state(), "old_workers": 4, "workers": 2, "optimizer": TX}
  given |= {"params": cases.PARAMS, "axis_name": "data"} | options
  return gradcomp.reshard_state(**given)


def under_mesh(call):
  with jax.set_mesh(MESH):
    return call()


def counted(params):
  return TX.init(params)._replace(count=jnp.zeros([], jnp.int32))


test_bad_calls = table.refused(ROWS, globals())


def test_an_init_in_jit_is_looked_into():
  jitted = optax.GradientTransformation(jax.jit(TX.init), TX.update)
  jax.tree.map(np.testing.assert_array_equal, reshard(optimizer=jitted), reshard())


def test_a_state_whose_owners_forget_stays_without():
  """It was made where nobody knew the number of workers."""
  tx = cases.compressed("two_shot", None)
  made = tx.init(cases.PARAMS)
  assert made.server_residual is None
  assert reshard(opt_state=made, optimizer=tx).server_residual is None
