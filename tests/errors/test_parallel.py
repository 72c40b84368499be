"""What collectives of models and loops over layers refuse."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from examples.lib.cut_layers import sub_batches as sub_batches
from gradcomp import parallel
from gradcomp.codecs import QSGD, BlockFloat, Dense, EightBit
from gradcomp.parallel import gather_matmul
from tests.errors import table
from tests.support import modes
from tests.support.cases.parallel import mapped as mapped

ROWS = """
gathered(codec=v) for v in TopK(), RandomK(), BlockTop() ; scanned(codec=TopK()) ;
  on_mesh(lambda x: reshard(x, P(), codec=v)) for v in TopK(), RandomK() -> `codec` ...
  every element
gathered(codec=OneBit()) -> `codec` ... error feedback ... OneBit
gathered(codec=QSGD(levels="nonuniform")) -> `codec` ... memory ... nonuniform
residual_of(TopK()) -> `codec` ... memory ... TopK
gathered(codec=Policy([(".", EIGHT)])) -> `codec` ... one array
gathered(codec="int8") ; scanned(codec="int8") -> TypeError: `codec` ... 'int8'
gathered(backward=TopK()) -> `backward` ... every
gathered(own="mine") -> `own` ... exact ... 'mine'
gathered(along=1) -> TypeError: `along` ... all_gather ... backward
on_all(lambda x: psum(x, **PLAIN, own="coded")) -> TypeError: `own` ... psum
gathered(to="invarying") -> `to` ... coded
gathered(axis=2) ; shards(axis=2) -> `axis` ... 2 axes ... got 2
gathered(backward=QSGD()) ; gathered(codec=QSGD()) ; scanned(codec=QSGD(bits=4)) ;
  shards(grads=QSGD(bits=4)) ; of_shards(codec=QSGD(bits=4)) ;
  on_mesh(lambda x: reshard(x, P(), codec=QSGD())) -> `key` ... QSGD
on_all(lambda x: psum(x > 0, **PLAIN)) -> TypeError: `x`
on_all(lambda x: psum(x, axis_name="model", codec=EIGHT)) ; shards(axis_name="model") ;
  scanned(axis_name="model") ; on_all(lambda x: gather_residual(x, axis_name="model"))
  -> `axis_name` ... model
on_all(lambda x: psum_scatter(x, **PLAIN)) -> `axis` ... 4 workers ... (3, 2)
on_all(lambda x: all_to_all(x, split_axis=1, concat_axis=0, **PLAIN)) -> `split_axis`
on_all(lambda x: ppermute(x, perm=v, **PLAIN)) for v in [(0, 1), (2, 1)], [(0, 4)] ->
  perm`
on_all(lambda x: sub_batches(lambda x, s: x, x, axis_name="data", passes=2,
  codec=EIGHT)) -> `passes` ... divides ... 2 of 3
shards(**{v: TopK()}) for v in "params", "grads" -> `{v!s}` ... every element ... TopK
shards(grads=OneBit()) ; scanned(codec=OneBit()) -> ` ... `residual` is None
shards(params=OneBit(), residual=jnp.zeros((12, 2))) -> `params` ... error feedback
shards(shape=(4, 5)) -> `w_shard` ... (5,) ... (3, 2) ... jnp.pad
shards(residual=jnp.zeros((3, 2))) -> `residual` ... (12, 2) ... (3, 2) ... gather_
shards(residual=jnp.zeros((12, 2), int)) -> TypeError: `residual` ... float dtype
shards(params="int8") -> TypeError: `params`
on_all(lambda x: gather(x > 0, **SHARDS)) -> TypeError: `w_shard` ... float
scanned(exchange="local") -> `exchange` ... 'local'
scanned(codec=QSGD(bits=4, rounding="nearest"), exchange="psum") -> `exchange` ... psum
scanned(layers=(jnp.ones((3, 8)), jnp.ones((2, 8)))) -> `layers` ... [2, 3] ... stack
scanned(layers=STACK[:0]) -> `layers` ... one layer or more ... [0] ... leave the scan
scanned(layers=STACK.astype(v)) for v in "int32", "complex64" -> TypeError: `layers` ...
  {v!s}
scanned(body=lambda x, w: x @ w) -> TypeError: `body` ... pair
scanned(residual=STACK) ; scanned(codec=FOUR, exchange="two_shot",
  residual=residual_of(FOUR, "all_gather")) -> `residual` ... compress_in_scan
jax.eval_shape(shard_map(lambda w, e: jax.grad(lambda e: jnp.sum(gather(w, residual=e,
  **SHARDS)))(e), (P("data"), P()), P("data")), jnp.ones((8, 2)), jnp.ones((8, 2))) ;
  jax.eval_shape(shard_map(lambda x, e: parallel.scan(LAYER, x, STACK, residual=e,
  **MEAN)[0], (P("data"), P()), P("data")), jnp.ones((4, 8)), residual_of(Dense())) ->
  `residual` ... ['data'] ... in_specs
jax.eval_shape(shard_map(lambda x, w: parallel.scan(LAYER, x, jax.lax.pcast(w, "data",
  to="varying"), **MEAN)[0], (P("data"), P()), P("data")), jnp.ones((4, 8)), STACK) ->
  `layers` ... ['data'] ... jax.grad
# A map over examples around a loop, in each map of workers; and a second derivative.
jax.eval_shape(mapped(v, lambda x: jax.grad(of_examples, 1)(x, STACK), 4), ROWS_OF_ALL)
  for v in "vmap", "shard_map", "shard_map_unchecked", "pmap" -> `scan` ... inside of
  `body`
on_all(jax.grad(lambda x: jnp.sum(jax.vmap(jax.jit(one))(x))), jnp.ones((4, 3, 8))) ;
  jax.eval_shape(jax.vmap(jax.vmap(jax.grad(lambda x: jnp.sum(jax.jit(one)(x))),
  axis_name="data")), jnp.ones((3, 4, 8))) ; on_all(lambda x: jax.grad(lambda w:
  jnp.sum(jax.vmap(lambda x: parallel.scan(SQUARES, x, w, axis=0, **MEAN)[0])(x)))(
  jnp.ones((2, 8))), jnp.ones((4, 3, 2, 8))) -> `scan` ... jax.vmap
twice(lambda w, x: jnp.sum(gather(w, **SHARDS) ** 2) * x) ; twice(lambda w, x:
  jnp.sum(all_gather(w, **MEAN) ** 2) * x) ; twice(lambda w, x: parallel.scan(SQUARES,
  x, w, **MEAN)[0]) ; twice(lambda w, x: parallel.scan(SQUARES, x, w, axis=0,
  **MEAN)[0]) ; twice(lambda w, x: jnp.sum(gather_matmul(jnp.ones((6, 64)), w[0, 0] *
  jnp.ones((8, 64)), **PRODUCT) ** 2) * x) -> TypeError: must be differentiated once
of_shards(codec=OneBit()) -> `codec` ... `residual` is None
of_shards(codec=TopK()) ; of_shards(params=TopK()) -> ` ... every element ... TopK
of_shards(axis=2) -> `axis` ... 1 axes
of_shards(exchange="two_shot") -> `exchange` ... left out ... owners ... 'two_shot'
scanned(**{v: "data"}) for v in "params", "backward_axis_name" ->
  `{v!s}` must be None ... 'data' ... axis=0
scanned(whole=[STACK]) -> `whole` must be None ... PyTreeDef([*]) ... axis=0
of_shards(residual=jax.tree.map(lambda x: x[..., :16], WHOLE)) ->
  `residual` ... (3, 32, 32) ... gather_residual
of_shards(params=EightBit(), whole=WHOLE) -> `params` ... None with `whole` ... EightBit
of_shards(backward_axis_name="data", whole=WHOLE) -> `backward_axis_name` ... 'data'
of_shards(whole=OWN) -> `whole` ... (3, 32, 32) ... (3, 8, 32) ... all_gather
of_shards(whole=[*WHOLE.values()]) -> `whole` ... a tree like `layers`
of_shards(whole=WHOLE | {"b": jnp.ones((2, 32))}) ->
  `whole` ... the same number in each ... [2, 3]
product(params=Dense()) -> TypeError: matrix units ... Dense ... BlockFloat
product(inputs=FOUR) -> TypeError: matrix units ... QSGD
product(params=BlockFloat(element="e3m2")) -> `element` ... e3m2
product(params=BlockFloat(element="e2m1", rotate=8)) -> `rotate` ... 8
product(inputs=BlockFloat(element="e2m1", scale="e4m3", block_size=16)) ->
  `inputs` ... float8_e8m0fnu ... float8_e4m3fn
product(params=BlockFloat(rounding="stochastic")) -> `key`
product(residual=jnp.zeros((4, 64))) -> `residual` ... (32, 64) ... gather_residual
product(axis_name="model") -> model
product(jnp.ones((6, 48)), jnp.ones((8, 48))) -> last axis ... multiple of 32 ... 48
product(w=jnp.ones(512)) -> `w_shard` ... gather
product(jnp.ones(v)) for v in (6, 32), (0, 64) -> `x` ... {v}
product(jnp.ones((6, 64), int)) -> TypeError: `x` ... int32
product(w=1j * jnp.ones((8, 64))) -> TypeError: `w_shard` ... complex64
on_mesh(lambda x: reshard(x, P("data"), codec=EIGHT)) ; reshard(jnp.ones((8, 8)), P(),
  codec=EIGHT) -> `spec` ... jax.reshard
on_mesh(lambda x: reshard(x, P(None, "data"), codec=EIGHT)) -> `spec` ... one array axis
on_mesh(lambda x: reshard(x, codec=EIGHT, **v)) for v in {}, dict(spec=P(),
  axis_name="data") -> `spec` or `axis_name` ... not both
on_mesh(lambda x: reshard(x, "data", codec=EIGHT)) ->
  TypeError: `spec` must be a jax.P ... axis_name=
on_mesh(jax.grad(lambda x: jnp.sum(reshard(x, P(), codec=EIGHT, residual=x)[0]))) ->
  `residual` ... differentiated
"""
EIGHT = EightBit(bucket_size=64)
FOUR = QSGD(bits=4, rounding="nearest", bucket_size=32)
PLAIN = dict(axis_name="data", codec=EIGHT)
MEAN = dict(axis_name="data", codec=Dense())
SHARDS = dict(axis_name="data", params=None, grads=None)
PRODUCT = dict(axis_name="data", params=BlockFloat(), grads=None)
STACK = jnp.ones((3, 8, 8))
ROWS_OF_ALL, THREE_ROWS = jnp.ones((4, 2, 8)), jnp.ones((4, 3, 2))
LAYER = lambda x, w: (x @ w, None)
SQUARES = lambda x, w: (jnp.sum(w * w) * x, None)
OWN = {"b": jnp.ones((3, 8)), "w": jnp.ones((3, 8, 32))}  # parts of layers
WHOLE = {"b": jnp.ones((3, 32)), "w": jnp.ones((3, 32, 32))}


def on_all(function, x=THREE_ROWS):
  return jax.eval_shape(jax.vmap(function, axis_name="data"), x)


def shard_map(function, in_specs, out_specs):
  specs = dict(in_specs=in_specs, out_specs=out_specs)
  return jax.shard_map(function, mesh=modes.mesh(4), **specs)


def gathered(**options):
  return on_all(lambda x: parallel.all_gather(x, **PLAIN | options))


def shards(**options):
  return on_all(lambda x: parallel.gather(x, **SHARDS | options))


def scanned(body=LAYER, layers=STACK, **options):
  run = lambda x: parallel.scan(body, x, layers, **MEAN | options)
  return on_all(run, ROWS_OF_ALL)


def of_shards(**options):
  layer = lambda x, w: (jnp.tanh(x @ w["w"] + w["b"]), None)
  run = lambda x: parallel.scan(layer, x, OWN, **MEAN | dict(axis=0) | options)
  return on_all(run, jnp.ones((4, 8, 32)))


def product(x=None, w=None, **options):
  x = jnp.ones((6, 64)) if x is None else x
  w = jnp.ones((8, 64)) if w is None else w
  return on_all(lambda _: gather_matmul(x, w, **PRODUCT | options))


def on_mesh(function):
  """Traces it in plain jit for rows of four workers."""
  with jax.set_mesh(modes.mesh(4, AxisType.Explicit)):
    x = jax.device_put(jnp.ones((8, 8)), P("data"))
    return jax.eval_shape(function, x)


def residual_of(codec, exchange="auto"):
  """The residual of one of four workers, of zeros."""
  given = dict(axis_name="data", exchange=exchange, feedback="error")
  first = parallel.compress_in_scan(codec, **given)
  layers = STACK if codec in (FOUR, Dense()) else jnp.ones((2, 256, 256))
  made = on_all(lambda _: first.init(layers).residual, jnp.ones(4))
  return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), made)


def one(x):
  return parallel.scan(LAYER, x, STACK, **MEAN)[0]


def of_examples(x, layers):
  return jnp.sum(jax.vmap(lambda x: parallel.scan(LAYER, x, layers, **MEAN)[0])(x))


def twice(loss):
  """Differentiates the sum of a gradient."""
  of_one = lambda x: jax.grad(lambda w: jnp.sum(jax.grad(loss)(w, x)))(jnp.ones((3, 2)))
  return on_all(of_one, jnp.ones(2))


test_bad_calls = table.refused(ROWS, globals())
