"""What recipes, wrappers and optimizers refuse: options, and states of others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp
from gradcomp.codecs import QSGD, Dense, TopK
from tests.errors import table

ROWS = """
f(exchange=v) for f in qsgd, dense for v in "gossip", "", None, True, 3, ["auto"],
  TwoShot -> `exchange` ... auto ... two_shot ... psum ... ring ... local ... {v}
f(feedback=v) for f in qsgd, dense for v in "none", "", True, False, 1, ["error"], "sum"
  -> `feedback` ... "auto" ... "error" ... "momentum" ... None ... {v}
qsgd(axis_name=v) for v in (), 3, ("data", 3), ("data", "data"), ["data"] ;
  clip_by_local_norm(1.0, axis_name=v) for v in 3, () -> `axis_name` ... {v}
compress(v) for v in QSGD, "qsgd", None, 4 -> TypeError: `codec` ... {v}
qsgd(key=v).init(W) for v in None, "4", [4], 1.5, 2**63, -(2**63) - 1, 4j -> `key` must
qsgd(key=jax.random.key(0, impl="rbg")).init(W) -> `key` ... uint32[4] ... threefry2x32
# Exchanges, and codecs that they do not take.
qsgd(axis_name="data", exchange=Hierarchical()) ; qsgd(axis_name=("a", "b"),
  exchange=Hierarchical(group_size=2)) ; qsgd(axis_name=("a", "b", "c"),
  exchange="hierarchical") -> `axis_name` ... two axes ... group_size=
step(qsgd(axis_name="data", exchange=Hierarchical(group_size=3))) -> `group_size` ... 3
compress(v, exchange="psum") for v in QSGD(), Dense(dtype=jnp.bfloat16), OneBit(),
  EightBit(), Ternary(share_scale=False), BlockTop(), Natural(), Sign(), TopK() ->
  `exchange` must not be "psum" ... cannot be added ... "auto" ... gradcomp.dense()
f(exchange="psum") for f in aps, functools.partial(loss_scaling_cast, 2.0), blocktop,
  natural, functools.partial(powersgd, bits=8) -> `exchange` ... "psum"
compress(Sign(scale="one"), axis_name="data", exchange=v, feedback=None) for v in
  "psum", "ring" -> `exchange` ... {v!s} ... two_shot
Sign(vote="majority") -> `vote` ... majority ... scale="one"
compress(Ternary(), exchange=v) for v in "ring", "hierarchical" ; qsgd(axis_name="data",
  share_scale=True, exchange=v) for v in "ring", Hierarchical(group_size=2) ->
  `exchange` ... share_scale=False
compress(v, axis_name="data", exchange="ring") for v in TopK(), BlockTop(), RandomK() ->
  `exchange` ... "ring" ... sparse ... {v}
compress(RandomK(), axis_name="data", exchange=v) for v in "two_shot", "hierarchical" ->
  `exchange` ... "{v!s}" ... the same elements ... psum
compress(TopK(selection="sampled"), axis_name="data", exchange="hierarchical") ->
  thresholds again ... sampled
policy([("a", QSGD()), ("b", TopK())], axis_name="data", exchange=v) for v in "ring" ;
  policy([("a", QSGD()), ("b", Dense())], axis_name="data", exchange=v) for v in "psum"
  -> `exchange` ... "{v!s}"
explain(v, {"a": WIDE, "b": WIDE}, workers=40_000) for v in SHARED, compress(Policy(
  [("a", QSGD(share_scale=True)), ("b", SUMS)]), axis_name="data") -> `codec` ... 2**31
  ... 40000 ... with QSGD(bits=16, ... ; use fewer bits
onebit_sgd(feedback=None) ; powersgd(feedback=None) -> `feedback` ... error ... None
redsync(momentum=0.9, feedback=v) for v in "error", None ; redsync(momentum=None,
  feedback=v) for v in "momentum" -> `feedback` ... momentum= ... {v} ... momentum=
redsync(axis_name="data", exchange=Hierarchical(group_size=2)) -> `feedback` ... TopK
redsync(momentum=1.0) ; MomentumFeedback(decay=1.0) ; adam(0.1, b2=1.0) ; adam(0.1,
  floor=1.0) ; dion(0.1, rank=1, mu=1.0) -> must ... below 1 ... 1.0
f(residual_dtype=v) for f in ErrorFeedback, MomentumFeedback for v in None, "int4",
  jnp.float16, 8, np.float32(0.5) -> `residual_dtype` ... int8
of("ef21", axis_name="data", exchange="local") -> `exchange` ... "local" ... 'data'
of("ef21", axis_name="data", exchange=AllGather(merge="senders")) -> ` ... "senders"
zero(SGD, grads=OneBit(), params=NEAREST, axis_name="data", feedback="ef21") ;
  parallel.compress_in_scan(OneBit(), axis_name="data", feedback="ef21") -> `feedback`
  ... 'ef21'
update(clip_by_local_norm(1.0, axis_name="data"), W) -> `axis_name` ... 'data'
update(clip_by_local_norm(1.0), [jnp.ones(3, jnp.int32)]) -> TypeError: `updates` ...
  int
switch(v, [SGD, SGD]) for v in [0], [-1], [2, 2], [3, 2], [1.5], [True], 3, [5, 2**31]
  -> `boundaries` ... ascending
switch(v, [SGD, SGD]) for v in [], [1, 2] -> `transformations` ... one more ... 2
start(switch([3], [redsync(0.02, axis_name="data"), v])) for v in optax.trace(0.9),
  optax.scale_by_adam(), compress(TopK(), exchange=Hierarchical(group_size=2),
  axis_name="data"), redsync(0.02, exchange="two_shot", axis_name="data") ->
  `transformations` ... must keep
switch([2], [of("error"), of(ErrorFeedback(residual_dtype="bfloat16"))]).init(W) ->
  `transformations`[1] ... bfloat16
citation(v) for v in SGD, optax.inject_hyperparams(natural)() -> `optimizer` ... inject_
# Numbers that inject_hyperparams turned into arrays.
injected(loss_scaling_cast, (), factor=2.0) -> `factor` ... static_args
jax.eval_shape(lambda: injected(qsgd, STATIC - {v}, min_leaf_size=3)) for v in *STATIC
  -> `{v!s}` ... static_args
adam(0.1, local=3, axis_name=None) -> `axis_name` ... `local` ... None
adam(0.1, local=3, warmup=2, axis_name="data").init(W) -> `axis_name` ... set_mesh
Stable(ratio=2) -> `ratio` ... above 0 ... 2
dion(0.1, rank=1).init({"w": jnp.zeros((2, 2)), "b": v}) for v in jnp.zeros(3),
  jnp.zeros(()), jnp.zeros((0, 3)) -> `params` ... 'b' ... optax.partition
update(dion(0.1, rank=1), jnp.zeros((2, 2)), jnp.zeros((2, 2), v)) for v in "int32",
  "complex64" -> TypeError: `updates` ... real float ... {v!s}
rounds(delay=4) -> `delay` must be a number, from 0 to 3 ... 4
rounds(fragments=5) -> `fragments` must be a number, from 1 to 4 ... 5
rounds(merge="senders") -> `merge` must be "mean" for a codec that sends all elements
rounds(merge="senders", codec=TopK(), exchange="two_shot") -> `exchange` must be "auto"
rounds(exchange="local") ; dion(0.1, rank=1, exchange="local") ->
  `exchange` must ... local
local_steps(v, SGD, **ROUNDS) for v in 0.5, optax.sgd -> TypeError: `inner` ... got {v}
# What goes inside of what.
step(zero(v, **CODED)) for v in local_steps(SGD, SGD, **ROUNDS), zero(SGD, **CODED),
  optax.chain(dense(axis_name="data"), SGD) -> `inner` must
step(zero(optax.lookahead(SGD, 2, 0.5), **CODED), params_of=PAIR) ;
  step(local_steps(optax.lookahead(SGD, 2, 0.5), SGD, **ROUNDS), params_of=PAIR) ->
  `params` ... LookaheadParams ... around
rounds().init(W) -> `axis_name` must be an axis that init can
rounds().init({"w": jnp.ones(3, jnp.complex64)}) -> TypeError: `params`['w'] ... float
start(rounds(fragments=2)) -> `fragments` must be at most the number of
local_params(W, start(rounds())) -> must be that of one worker
on_all(lambda x: rounds().update(x, (), x)) ->
  TypeError: `state` must be a gradcomp.state.LocalStepsState
on_all(lambda x: rounds().update(x, rounds().init(x))) -> `params` must be given
local_steps(SGD, v, **ROUNDS) for v in 0.5, optax.sgd -> TypeError: `outer` ... got {v}
replicable(OWNERS, axis_name="data", workers=v) for v in (2, 2), None ;
  replicable(OWNERS, axis_name=("a", "b"), workers=v) for v in 4, 2.0 -> `workers` must
  be ... {v}
init_state(OWNERS, W, axis_name="data", replicate=0) -> `replicate` must be ... got 0
init_state(OWNERS, W, axis_name="data", replicate=4, param_specs=1) -> `param_specs`
init_state(OWNERS, W, axis_name="data") -> `mesh` must be ... jax.set_mesh(mesh)
# Residuals that would grow, at every door.
compress(v, feedback="error") for v in TWO_BITS, QSGD(bits=2, bucket_size=128,
  share_scale=True), QSGD(bits=1, levels="uniform", bucket_size=32, rounding="nearest"),
  QSGD(bits=4, norm="l2"), Ternary(), Ternary(clip_sigmas=None), Sign(scale="one") ->
  `codec` ... contraction above 0 ... grows ... smaller buckets ... nearest ... more
  bits ... feedback=None
compress(v) for v in Sign(scale="one"), Policy([("b", OneBit()), ("w", Policy([("w",
  TWO_BITS)]))]) ; qsgd(bits=2, feedback=v) for v in ErrorFeedback(), "momentum", "ef21"
  ; policy([("w", TWO_BITS)], feedback="error") ; adam(0.1, codec=TWO_BITS) ;
  rounds(codec=TWO_BITS) ; mean_state(jnp.ones((1, 8)), codec=TWO_BITS) ;
  parallel.compress_in_scan(TWO_BITS, axis_name="data", feedback="error") ;
  on_all(lambda x: reshard(x, axis_name="data", codec=TWO_BITS, residual=x, key=KEY)) ->
  `codec` ... contraction above 0 ... grows ... None
zero(SGD, grads=TWO_BITS, params=OneBit(), axis_name="data", feedback="error") ;
  on_all(lambda x: gather(x, axis_name="data", params=None, grads=TWO_BITS, residual=x,
  key=KEY)) -> `grads` ... contraction above 0 ... grows ... None
f({"w": np.ones(4)}, codec=Dense(), axis=1) for f in *MEANS -> `tree`['w'] ... axis 1
f({"w": np.ones(4)}, codec=Dense(), axis="x") for f in *MEANS -> `axis` must be
f({}, codec=Dense()) for f in *MEANS -> one number of rows ... on axis 0, ... got none
f(np.ones((0, 4)), codec=Dense()) for f in *MEANS -> got 0 in `tree`
f({"a": np.ones((4, 2)), "b": np.ones((3, 2))}, codec=Dense()) for f in *MEANS -> got 4
  in `tree`['a'], 3 in `tree`['b']
f([v], codec=Dense()) for f in *MEANS for v in np.ones((4, 2), int), 1.0 -> TypeError:
  [0]
f(np.ones((4, 2)), codec=Dense(), mesh_axis="data") for f in *MEANS -> mesh_axis` ...
  set_
f(np.ones((4, 2)), codec=Dense) for f in *MEANS -> TypeError: `codec` must be
mean_over(np.ones((4, 8)), codec=QSGD()) -> `key` must be given for ... another one
mean_over(W, codec=QSGD(), state=mean_state(W, codec=QSGD()), key=KEY) -> `key` ... None
jax.grad(lambda x: mean_over(x, codec=Dense())[0])(W["w"]) -> TypeError: differentiated
# States that are another's.
qsgd(feedback="error").update(W, qsgd(feedback=None).init(W)) -> `state.residual` must
of("momentum").update(W, of("error").init(W)) -> `state.velocity` ... must be kept
of("momentum").update(W, of("momentum").init({"w": W["w"][:3]})) ->
  `state.residual`['w'] ... (8, 256)
of("ef21").update(W, of("error").init(W)) -> `state.estimate` ... must be kept
of(v).update(W, of("ef21").init(W)) for v in "error", None -> `state.estimate` ... None
of(ErrorFeedback(residual_dtype="int8")).update(W, of("error").init(W)) ->
  `state.residual`['w'] ... as int8 ... got float32
qsgd(v, levels="nonuniform").update(W, qsgd(6 - v, levels="nonuniform").init(W)) for v
  in 2, 4 -> `state.memory.shared ... the shapes ... bits={v}
qsgd(3, levels="nonuniform").update(W, qsgd(3).init(W)) -> `state.memory.shared ... must
qsgd().update(W, v.init(W)) for v in optax.adam(0.1), optax.trace(0.9) -> TypeError:
  `state` ... gradcomp.state.CompressState ... optax.chain
step(OWNERS, OWNERS.init({"w": LEAF})) -> `state.server_residual` ... 4 workers ...
  set_mesh ... replicable( ... workers=4)
two_of_four(qsgd(axis_name="data", feedback="error", exchange="two_shot")) ->
  `state.server_residual` ... (4, 8, 512) ... (2, 8, 512) ... as many workers
parallel.compress_in_scan(QSGD(), axis_name="data", feedback="momentum") ->
  `feedback` ... momentum
on_all(lambda x: update(IN_SCAN, x)) -> `scan_residual` ... make_train_step
IN_SCAN.init(W) -> `axis_name` ... 'data'
zeroed(grads=4) -> TypeError: `grads` must be an instance of a codec, got 4
zeroed(**{v: TopK(density=0.01)}) for v in "grads", "params" ->
  `{v!s}` ... sparse codec TopK
zeroed(params=QSGD(bits=1, levels="uniform")) ->
  `params` ... to nearest ... 2 bits or more
zeroed(params=Ternary()) -> `params` ... alone ... share_scale=False
zeroed(axis_name=None) -> `axis_name` must be the name of an axis
zeroed(optax.chain(optax.clip_by_global_norm(1.0), SGD)) ->
  `inner` must ... clip_by_local_norm
zeroed(optax.flatten(optax.adam(0.1))) -> `inner` must ... no optax.flatten
on_all(lambda x: rounds().update([x] * 3, rounds(fragments=3).init([x] * 3), [x] * 3))
  -> must be made for 1 fragments, got 3
"""
W = {"w": np.linspace(-1, 1, 8 * 256, dtype=np.float32).reshape(8, 256)}
LEAF = jax.ShapeDtypeStruct((64, 512), jnp.float32)
WIDE = jax.ShapeDtypeStruct((512, 512), jnp.float32)
SGD = optax.sgd(0.1)
TWO_BITS = QSGD(bits=2)
NEAREST = QSGD(rounding="nearest")
SUMS = QSGD(bits=16, levels="uniform", share_scale=True)
SHARED = gradcomp.compress(SUMS, axis_name="data")
OWNERS = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
IN_SCAN = gradcomp.parallel.compress_in_scan(
  QSGD(), axis_name="data", exchange="two_shot", feedback="error"
)
CODED = dict(grads=QSGD(), params=QSGD(bits=8), axis_name="data")
PAIR = optax.LookaheadParams.init_synced
ROUNDS = dict(codec=Dense(), axis_name="data", every=4)
MEANS = [table.NAMES[name] for name in ("mean_over", "mean_state")]
STATIC = {"bits", "bucket_size", "min_leaf_size", "refit_every"}


def of(feedback, **options):
  return gradcomp.compress(TopK(density=0.1), feedback=feedback, **options)


def update(tx, params, grads=None):
  return tx.update(params if grads is None else grads, tx.init(params))


def step(tx, state=None, params_of=lambda x: x):
  """Traces an update of four workers, of a state that is the same on all of them."""

  def worker(g):
    params = params_of(g)
    return tx.update(g, tx.init(params) if state is None else state, params)

  stack = {"w": jax.ShapeDtypeStruct((4, 64, 512), jnp.float32)}
  return jax.eval_shape(jax.vmap(worker, axis_name="data"), stack)


def zeroed(inner=SGD, **options):
  return step(gradcomp.parallel.zero(inner, **CODED | options))


def two_of_four(tx):
  """Traces an update of two workers, with their states of four."""
  half = lambda x: jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype)
  state = jax.tree.map(half, start(tx))
  grads = {"w": jax.ShapeDtypeStruct((2, 64, 512), jnp.float32)}
  return jax.eval_shape(jax.vmap(tx.update, axis_name="data"), grads, state)


def on_all(function):
  return jax.eval_shape(jax.vmap(function, axis_name="data"), jnp.ones((2, 8, 8)))


def start(tx):
  """Traces what four workers start with."""
  return step(optax.GradientTransformation(tx.init, lambda *given: given[1]))


def injected(make, static_args, **given):
  return optax.inject_hyperparams(make, static_args=static_args)(**given).init(W)


def rounds(**given):
  return gradcomp.local.local_steps(SGD, SGD, **ROUNDS | given)


test_bad_calls = table.refused(ROWS, globals())
