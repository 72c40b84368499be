"""What steps refuse: gradients, axes and meshes, batches, losses, and options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.errors import table
from tests.support import modes
from tests.support.option_fields import with_options

N = 4
W = {"w": np.linspace(-1, 1, 8 * 256, dtype=np.float32).reshape(8, 256)}
BATCH = np.ones((8, 8), np.float32)
DENSE = gradcomp.dense(axis_name="data")
TX = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
MESH, EXPLICIT = modes.mesh(N), modes.mesh(N, AxisType.Explicit)
SIX = np.ones(6, np.float32)
CUT = jax.device_put(np.ones(8, np.float32), NamedSharding(MESH, P("data")))
OVER = {"axis_name": "data", "mesh": MESH}
REPLICATED = jax.device_put(W["w"], NamedSharding(MESH, P()))

ROWS = """
# Gradients that are no arrays of floats.
update(f(), {"layer": [jnp.ones(3), {"ids": jnp.ones(3, v)}]}) for f in qsgd, dense for
  v in "int32", "uint8", "bool" -> TypeError: `updates`['layer'][1]['ids'] ... {v!s}
update(qsgd(), jax.grad(lambda p: p["w"], allow_int=True)({"w": 1.0, "ids": 2})) ->
  TypeError: `updates`['ids'] ... complex float ... float0
update(f(2), {"w": jnp.ones(3), "b": v}, {"w": jnp.ones(3), "b": jnp.ones([])}) for f in
  qsgd, clip_by_local_norm for v in 1.5, 2, True -> TypeError: `updates`['b'] ... an
  array ... {v} ... jnp.asarray
jax.eval_shape(f(lambda x: jnp.sum(update(compress(v, min_leaf_size=0), x))), BATCH) for
  f in jax.grad, jax.jacfwd, lambda g: jax.grad(jax.jit(g)) for v in Dense(), QSGD(),
  TopK(density=1 / 2), Dense(dtype=jnp.bfloat16), OneBit(), Ternary(), EightBit(),
  FloatCast() -> TypeError: `updates` ... differentiated ... stop_gradient
# Axes that are not bound, and what stands around.
update(TX, W) -> `axis_name` ... jax.shard_map, jax.pmap or jax.vmap ... 'data' ... not
  bound ... make_train_step ... axis_name=None
jax.vmap(lambda g: update(TX, g), axis_name="model")(W["w"]) ; defer_reduction(W,
  axis_name="data") ; value_and_grad(jnp.sum, axis_name="data")(W["w"]) -> `axis_name`
  ... 'data' ... not bound
in_map(lambda g: update(qsgd(axis_name="date"), g)) ; in_mesh(lambda:
  value_and_grad(jnp.sum, axis_name="date")(W["w"])) -> 'date' ... not bound ...
  ('data',) ... name one of these
in_mesh(lambda: jax.eval_shape(lambda x: update(TX, x), jnp.ones((8, 64)))) ;
  jax.eval_shape(lambda x: update(TX, x), REPLICATED) -> 'data' ... not bound ... plain
  jax.jit ... gradcomp.value_and_grad(
in_map(lambda g: update(qsgd(), g), check_vma=v) for v in True, False ;
  jax.eval_shape(jax.pmap(lambda g: update(qsgd(), g), axis_name="data"), BATCH) ->
  `axis_name` ... ('data',) ... None ... axis_name= ... exchange="local"
in_map(lambda g: update(v, g)) for v in optimizers.adam(0.1), skip_nonfinite(TX, 1) ->
  `axis_name` ... ('data',) ... None
# Gradients and states that are already something else.
in_map(lambda x: update(f(axis_name="data"), jax.grad(loss_fn)(W, x))) for f in qsgd,
  dense -> `updates`['w'] ... 'data' ... jax.grad ... already all-reduced ...
  gradcomp.value_and_grad ... gradcomp.defer_reduction
whole_residual() -> `state.residual`['w'] ... (8, 256) ... (2, 256) ... set_mesh
train_step(TX, rows=v) for v in 8, 9 -> `opt_state`.residual['w'] ... stack ... set_mesh
made_for(v) for v in 8, 2, 1 ; made_for(v, in_train_step) for v in 8, 2 ->
  `state.residual`['w'] ... for {v} worker ... not for 4 ... set_mesh
made_for(1, in_train_step) -> residual ... 4 workers ... set_mesh
# What stands around the exchange, or in its place.
train_step(optax.MultiSteps(qsgd(axis_name="data"), 2)) -> MultiSteps
train_step(optax.chain(optax.apply_if_finite(DENSE, 5), optax.sgd(0.1))) ->
  gradcomp.skip_nonfinite ... after
train_step(optax.chain(v, optax.sgd(0.1))) for v in optax.masked(DENSE, {"w": False}),
  optax.identity() -> `optimizer` ... equal on all workers ... ['w'] ... set_to_zero
# Meshes, batches and parameters of a train step.
make_train_step(loss_fn, TX, axis_name="model", mesh=modes.mesh(2)) ;
  make_train_step(loss_fn, TX, axis_name="model") -> `axis_name` ... axis of the mesh
  ... 'model' ... ( ... ) ... mesh= ... jax.set_mesh
train_step(dense(axis_name="model")) -> `axis_name` ... 'model' ... not bound
train_step(DENSE, batch={"x": jnp.ones((v, 8))}) for v in 1, 6, 9 -> `batch`['x'] ... 4
  workers ... equally ... ({v}, 8)
train_step(DENSE, batch={"x": BATCH, "rate": v}) for v in jnp.float32(1), 1.0 ->
  `batch`['rate'] ... 4 workers ... ()
jax.vmap(lambda x: value_and_grad(loss_fn, axis_name="data")(COUNTING, x),
  axis_name="data")(BATCH[:, None]) -> TypeError: argument 0 of `loss_fn` ...
  ['layer'][0] ... int32[3] ... jnp.asarray
make_train_step(loss_fn, DENSE, axis_name="data", mesh=MESH)(COUNTING, (), BATCH) ->
  TypeError: `params` ... ['layer'][0] ... int32[3] ... jnp.asarray
value_and_grad(jnp.sum, axis_name=None, argnums=v) for v in 1.5, "0", {}, 4j, [0.5] ;
  value_and_grad(jnp.sum, axis_name=None, batch_argnums=v) for v in 1.5, [0.5] ->
  argnums` must be the position ... got
value_and_grad(jnp.sum, axis_name="data", argnums=1)(jnp.ones(2)) -> `argnums` ... got 1
train_step(DENSE, accumulate=3) -> `accumulate` ... 3 ... (2, 8)
train_step(DENSE, model_state="mean", state={"count": np.zeros(2, np.int32)}) ->
  TypeError: `model_state`['count'] ... float ... int32
train_step(DENSE, model_state="local", state={"mean": np.zeros(16, np.float32)}) ->
  `model_state`['mean'] ... first axis of 4 ... (16,)
train_step(DENSE, loss=with_aux) -> TypeError: `loss_fn` ... return loss with
  has_aux=False ... model_state= ... got
train_step(DENSE, has_aux=True) -> TypeError: `loss_fn` ... return (loss, aux) with
  has_aux=True ... model_state= ... got
train_step(DENSE, model_state="mean") -> TypeError: `loss_fn` ... return (loss,
  model_state) with has_aux=False ... got
train_step(DENSE, loss=with_aux, model_state="mean", has_aux=True) -> TypeError:
  `loss_fn` ... return (loss, (model_state, aux)) with has_aux=True ... got
explain(qsgd(), W, workers=v) for v in 0, -2, 1.5, None, (), (2, 0), (2, 2, 2), {},
  {"data": 0} -> `workers` ... 1 or more
explain(TX, W, workers=v) for v in 2**18 + 1, 2**31, (2**16, 8) -> `workers` ... less
explain(f, W, workers=v) for f in qsgd, abs for v in 4, (2, 2) -> `workers` ... factory
explain(*v, workers=4, opt_state=0) for v in (TX, W, W), (abs, W) -> TypeError: `args`
scalars({"loss": jnp.ones(8)}) -> `metrics`['loss'] must be one ... (8,)
scalars({"a": [0.5, v(1)]}) for v in str, complex, jax.random.key -> TypeError: ['a'][1]
scalars({"a": {"b": 1.0}, "a/b": 2.0}) -> `metrics`['a/b'] must have ... rename
# Batches that workers cannot share.
of_batches({"mask": SIX}, batch_argnums=(1, 2)) ->
  argument 2['mask'] ... share equally, got ... (6,)
of_batches(SIX) -> `batch_argnums` ... differ ... got [6, 8]
of_batches(SIX, batch_argnums=3) -> `batch_argnums` must be among the 3 ... got 3
of_batches(np.array([0, 7], np.uint32), batch_argnums=(1, 2)) ->
  uint32 ... (2,) ... jax.random.key(seed)
value_and_grad(lambda w, x: jnp.sum(w * x), axis_name="data")(jnp.float32(1), x=CUT) ->
  would compute the same gradient ... by position
weighted(v) for v in lambda t, w: t, lambda t, w: (t, None), lambda t, w: (t,
  jnp.ones(3)), lambda t, w: (w, w), lambda t, w: ((t, w), w) ->
  TypeError: `loss_fn` ... (total, weight) ... has_weight=True ... got
train_step(DENSE, has_weight=True) -> TypeError: `loss_fn` ... return (total, weight)
"""
# What errors advise, and what is as good as what they ask for.
TAKEN = """
in_map(lambda g: update(qsgd(exchange="local"), g), check_vma=v) for v in True, False ;
  jax.eval_shape(jax.pmap(lambda g: update(qsgd(exchange="local"), g),
  axis_name="data"), BATCH)
jax.eval_shape(jax.grad(lambda x: jnp.sum(update(qsgd(), jax.lax.stop_gradient(x)))),
  W["w"])
in_map(lambda x: update(TX, jax.grad(loss_fn)(defer_reduction(W, axis_name="data"), x)))
value_and_grad(jnp.sum, axis_name=None, argnums=np.int64(0))(jnp.ones(2))[1].all()
qsgd(feedback=None).update(W, qsgd(feedback="error").init(W))
jnp.array_equal(qsgd(key=v).init(W).key, jax.random.key_data(jax.random.key(v))) for v
  in 0, 2**31, 2**32 - 1, -1
QSGD(bits=np.int64(4), bucket_size=np.int32(64)) == QSGD(bits=4, bucket_size=64)
hash(QSGD(bits=np.int64(4), bucket_size=np.int32(64))) == hash(QSGD(bucket_size=64)) ;
  hash(ErrorFeedback(residual_dtype=jnp.bfloat16))
QSGD(bits=1, levels="uniform", norm="rms", rounding="nearest").encode(jnp.ones(3))
QSGD(rounding="nearest").encode(jnp.ones(3)) ; policy([("kernel", QSGD())]).init({})
FloatCast(exponent_bits=3, mantissa_bits=0, scale=1.0, addends=64) ;
  FloatCast(exponent_bits=3, mantissa_bits=0, addends=63)
explain(dense(axis_name="data", exchange=v), W, workers=2**18).bytes_sent >= 2 * 8192
  for v in "psum", "ring"
redsync(momentum=0.9, feedback="momentum").init(W).velocity
redsync(momentum=None, feedback="error").init(W).velocity is None
onebit_sgd(feedback="momentum").init(W).velocity
ErrorFeedback(residual_dtype=jnp.bfloat16) == ErrorFeedback(residual_dtype="bfloat16")
jax.tree.all(jax.tree.map(np.array_equal, FITTED.memory, qsgd(3).update(W,
  FITTED)[1].memory))
Cluster(workers=np.int64(4), link=LINK) == Cluster(workers=4, link=LINK)
cost.plan(W, workers=np.int64(1), link=LINK).chosen
"""
LINK = gradcomp.cost.Link(latency=1e-5, bytes_per_second=1e8)
FITTED = gradcomp.qsgd(3, levels="nonuniform").init(W)
COUNTING = {"w": 2.0, "layer": [jnp.zeros(3, jnp.int32)]}


def loss_fn(params, *rest):
  batch = rest[-1]["x"] if isinstance(rest[-1], dict) else rest[-1]
  return jnp.mean((batch @ params["w"]) ** 2)


def with_aux(params, *rest):
  return loss_fn(params, *rest), {"value": 2.0, "step": 1.0}


def update(tx, grads, params=None):
  """``update`` with a state that it made for these gradients."""
  return tx.update(grads, tx.init(grads if params is None else params))[0]


def of_batches(*more, **options):
  loss = lambda w, x, *_: jnp.sum(w * x)
  grad_fn = gradcomp.value_and_grad(loss, axis_name="data", **options)
  return grad_fn(jnp.float32(1), CUT, *more)


def weighted(result):
  """Gradients of a loss that returns what is made of a total and a weight."""
  loss = lambda w, x: result(jnp.sum(w * x), jnp.int32(3))
  grad_fn = gradcomp.value_and_grad(loss, axis_name=None, has_weight=True)
  return grad_fn(jnp.float32(2), BATCH)


def in_map(function, x=BATCH, **options):
  specs = dict(in_specs=P("data"), out_specs=P("data"))
  return jax.eval_shape(jax.shard_map(function, mesh=MESH, **specs, **options), x)


def in_mesh(call):
  with jax.set_mesh(MESH):
    return call()


def whole_residual():
  """A state that was made outside the mesh is one worker's, and is cut."""
  state = TX.init(W)
  specs = gradcomp.state_specs(state, axis_name="data")
  run = lambda grads, state: TX.update({"w": grads["w"][0]}, state)[0]
  run = jax.shard_map(run, mesh=MESH, in_specs=(P("data"), specs), out_specs=P())
  return jax.eval_shape(run, {"w": np.stack([W["w"]] * N)}, state)


def train_step(optimizer, rows=8, batch=None, loss=loss_fn, state=None, **options):
  """Traces a step, with a state that was made outside the mesh."""
  params = {"w": jnp.ones((rows, 256))}
  batch = jnp.ones((8, rows)) if batch is None else batch
  given = with_options(gradcomp.TrainOptions, options) | OVER
  step = gradcomp.make_train_step(loss, optimizer, **given)
  models = () if "model_state" not in options else (state or {},)
  return step.lower(params, optimizer.init(params), *models, batch)


def in_train_step(loss, tx):
  return gradcomp.make_train_step(loss, tx, axis_name="data", mesh=EXPLICIT)


def made_for(workers, make=modes.user_step):
  """Traces a step of four workers whose state was made for others."""
  auto = gradcomp.exchange.Auto(feedback=False)
  tx = gradcomp.qsgd(axis_name="data", feedback="error", exchange=auto)
  params = {"w": jnp.zeros((8, 256))}
  with jax.set_mesh(modes.mesh(workers, AxisType.Explicit)):
    state = jax.device_get(tx.init(params))
  specs = gradcomp.state_specs(state, axis_name="data")
  with jax.set_mesh(EXPLICIT):
    places = P("data"), P(), specs
    batch, params, state = jax.device_put((BATCH, params, state), places)
    return jax.eval_shape(make(loss_fn, tx), params, state, batch)


test_bad_calls = table.refused(ROWS, globals())


@pytest.mark.parametrize("call", table.rows(TAKEN))
def test_what_is_taken(call):
  assert all(run() for run, _ in table.calls(call, globals()))
