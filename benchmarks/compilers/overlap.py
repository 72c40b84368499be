"""Cases: what computes beside the collectives of a step, by target, exchange and flag.

The net has four dense layers of 2048 in bfloat16, unrolled, and each worker a batch of
2048. Its gradient is exchanged in 4 bits, in one message or in one a layer. Or the net
has eight such layers in a loop, with the exchange behind it or inside; or each of eight
workers owns an eighth of each of them. Then layers are sent in 8 bits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import gradcomp
from benchmarks.common.shapes import mapped
from benchmarks.compilers import program as hlo
from benchmarks.compilers.targets import TARGETS, Extent
from gradcomp import codecs, parallel
from gradcomp.exchange import TwoShot

LAYERS, SCANNED, WIDTH, BATCH = 4, 8, 2048, 2048
ASYNC = "xla_tpu_enable_async_all_to_all"
APART = "xla_gpu_all_gather_combine_threshold_bytes"
PLAIN, ONE, EACH = "plain mean", "one message", "a message a layer"
DEFAULT = "messages of the default size"
SIZES = {ONE: None, DEFAULT: "auto", EACH: 1}  # `message_bytes`
BEHIND, INSIDE = "behind a loop of layers", "inside of a loop of layers"
AHEAD = "layers gathered ahead"
INNER = "layers gathered ahead, inside a host in the backward pass"
OWNERS = "gradients sent to the owners of layers"
FORMS = (AHEAD, INNER, OWNERS)
SLICES = "2 slices of v5e"
QUICK = ("v5e", "H100")
SPARSE_CORES = ("v6e", "tpu7x")  # they send if flags say so
TWINS = ("v6e", "H200", "B200")  # their compilers do as those of others

Flags = tuple[tuple[str, bool | int], ...]  # of a compiler, and their values
SPARSE: Flags = (
  ("xla_tpu_enable_sparse_core_collective_offload_all_gather", True),
  ("xla_tpu_enable_sparse_core_collective_offload_dense_all_to_all", True),
)


class Case(NamedTuple):
  """An exchange to compile."""

  # Of the exchange, or ``PLAIN`` for JAX's own mean of each layer, or where it is in a
  # net whose layers are in a loop.
  messages: str
  exchange: str = "two_shot"  # by name, or "in turn": ``TwoShot(in_turn=True)``
  flags: Flags = ()  # of the compiler

  @property
  def name(self) -> str:
    exchange = [self.exchange] if self.exchange != "two_shot" else []
    return ", ".join([self.messages, *exchange, *dict(self.flags)])


def cases(target: str, extent: Extent) -> dict[str, Case]:
  gpu, sliced = TARGETS[target].platform == "cuda", target == SLICES
  if extent == "quick":
    return {EACH: Case(EACH)} if target in QUICK else {}
  flags: Flags = ((APART, 1) if gpu else (ASYNC, True),)
  whole = extent == "all" or target in (*QUICK, SLICES)
  every = [Case(EACH), Case(EACH, flags=flags)]
  if extent == "all" or target not in TWINS:
    every = [Case(PLAIN), Case(ONE), *every, Case(EACH, "ring")]
  every += [Case(DEFAULT)]
  if not gpu:
    every += [Case(EACH, "in turn", flags)]
  if sliced:
    every += [Case(EACH, "hierarchical"), Case(EACH, "hierarchical", flags)]
  if whole:
    every += [Case(BEHIND)]
  ways = ["two_shot", "hierarchical"] if sliced else ["two_shot"]
  given: list[Flags] = [()] if gpu else [(), flags]
  if target in SPARSE_CORES:
    given += [SPARSE]
    every += [Case(EACH, flags=SPARSE)]
  every += [Case(INSIDE, way, x) for way in ways for x in given]
  if whole:
    every += [Case(form, flags=() if gpu or sliced else flags) for form in FORMS]
  return {case.name: case for case in every}


def row(target: str, case: Case) -> tuple[dict[str, Any], Any]:
  step, args = program(target, case)
  compiled, facts = hlo.compile_for(TARGETS[target], step, args, dict(case.flags))
  report = gradcomp.overlap_report(compiled)
  found = {name: getattr(report, name) for name in ("exposed_share", "hints")}
  overlaps = [
    {"kind": x.collective.kind, "times": x.collective.times, "bytes": x.bytes_sent}
    | {name: getattr(x, name) for name in ("synchronous", "exposed")}
    | {"products": sum(work.flops > 0 for work in x.beside)}
    | {"others": sum(work.flops == 0 for work in x.beside)}
    | {"flops": x.flops, "cycles": x.cycles}
    for x in report.collectives
  ]
  found = {"bytes": report.bytes_sent, **found, "overlaps": overlaps}
  return found | facts, compiled


def program(target: str, case: Case) -> tuple[Any, tuple[Any, ...]]:
  """Returns a step of layers, unrolled or in a loop, which computes them again."""
  if case.messages in FORMS:
    axes = {"host": 2, "chip": 4} if case.messages == INNER else {"data": 8}
    return _sharded(TARGETS[target].mesh(axes), case.messages)
  hierarchical = case.exchange == "hierarchical"
  names: Any = ("slice", "chip") if hierarchical else "data"
  mesh = TARGETS[target].mesh({"slice": 2, "chip": 4} if hierarchical else None)
  exchange = TwoShot(in_turn=True) if case.exchange == "in turn" else case.exchange
  way: Any = {"axis_name": names, "exchange": exchange}
  key = jax.random.key(0, impl="threefry2x32")
  optimizer = gradcomp.qsgd(bits=4, message_bytes=SIZES.get(case.messages), **way)
  scanned, inside = case.messages in (BEHIND, INSIDE), case.messages == INSIDE
  layers = _struct(SCANNED, WIDTH) if scanned else [_struct(WIDTH)] * LAYERS

  def loss(params: Any, x: jax.Array) -> jax.Array:
    if inside:
      x, _ = parallel.scan(_layer, x, params, codec=codecs.QSGD(bits=4), key=key, **way)
    elif scanned:
      x, _ = jax.lax.scan(jax.checkpoint(_layer, prevent_cse=False), x, params)
    for layer in () if scanned else params:
      x, _ = _layer(x, layer)
    return _mean_square(x)

  def step(params: Any, state: Any, x: jax.Array) -> Any:
    varying = lambda x: x if inside else jax.lax.pcast(x, names, to="varying")
    mean = jax.grad(loss)(jax.tree.map(varying, params), x)
    if case.messages == PLAIN:
      mean = [jax.lax.pmean(layer, names) for layer in mean]
    elif not inside:
      before = optimizer.init(params) if scanned else state
      mean, after = optimizer.update(mean, before, params)
      state = () if scanned else after
    moved = lambda x, y: x - (0.1 * y).astype(x.dtype)
    return jax.tree.map(moved, params, mean), state

  whole, state = jax.P(), () if scanned else jax.eval_shape(optimizer.init, layers)
  args, given = (layers, state, _struct(8 * BATCH)), (whole, whole, jax.P(names))
  return mapped(mesh, step, args, given, (whole, whole))


def _struct(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((*shape, WIDTH), jnp.bfloat16)


def _layer(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
  return jnp.tanh(x @ layer), None


def _mean_square(x: jax.Array) -> jax.Array:
  return jnp.mean(jnp.square(x.astype(jnp.float32)))


def _sharded(mesh: Any, form: str) -> tuple[Any, tuple[Any, ...]]:
  """Returns a step of layers in a loop, of which each worker owns an eighth."""
  names: tuple[str, ...] = tuple(mesh.axis_names)
  params = None if form == OWNERS else codecs.EightBit(bucket_size=128)
  way: Any = {"axis_name": names, "axis": 0, "params": params}
  way |= {"codec": codecs.QSGD(bits=4), "key": jax.random.key(0, impl="threefry2x32")}
  way["backward_axis_name"] = "chip" if form == INNER else None

  def step(shards: jax.Array, layers: jax.Array, x: jax.Array) -> jax.Array:
    whole = layers if form == OWNERS else None
    scan = lambda shards: parallel.scan(_layer, x, shards, whole=whole, **way)[0]
    loss = lambda shards: _mean_square(scan(shards))
    return shards - (0.1 * jax.grad(loss)(shards)).astype(shards.dtype)

  cut, layers, batch = jax.P(None, names), _struct(SCANNED, WIDTH), _struct(8 * BATCH)
  return mapped(mesh, step, (layers, layers, batch), (cut, jax.P(), jax.P(names)), cut)
