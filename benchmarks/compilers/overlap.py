"""Cases: what computes beside the collectives of a step, by target, exchange and flag.

The net has four dense layers of 2048 in bfloat16, unrolled, and each worker a batch of
2048. Its gradient is exchanged in 4 bits, in one message or in one a layer. Or the net
has eight such layers in a loop, with the exchange behind it or inside. Those of
`benchmarks.compilers.sharded` are sharded, too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import gradcomp
from benchmarks.compilers import reading, sharded
from benchmarks.compilers.targets import TARGETS, Extent

LAYERS, SCANNED, WIDTH, BATCH = 4, 8, 2048, 2048
ASYNC = "xla_tpu_enable_async_all_to_all"
APART = "xla_gpu_all_gather_combine_threshold_bytes"
PLAIN, ONE, EACH = "plain mean", "one message", "a message a layer"
BEHIND, INSIDE = "behind a loop of layers", "inside of a loop of layers"
SLICES = "2 slices of v5e"
QUICK = ("v5e", "H100")
TWINS = ("v6e", "H200", "B200")  # their compilers do as those of others


class Case(NamedTuple):
  """An exchange to compile.

  Attributes:
    messages: of the exchange, or ``PLAIN`` for JAX's own mean of each layer, or where
      it is in a net whose layers are in a loop.
    exchange: an exchange by name.
    flag: of the compiler.
  """

  messages: str
  exchange: str = "two_shot"
  flag: tuple[str, bool | int] | None = None

  @property
  def name(self) -> str:
    exchange = [self.exchange] if self.exchange != "two_shot" else []
    return ", ".join([self.messages, *exchange, *([self.flag[0]] if self.flag else [])])


def cases(target: str, extent: Extent) -> dict[str, Case]:
  """Returns the cases of a target, by their names."""
  gpu = TARGETS[target].platform == "cuda"
  flag: tuple[str, bool | int] = (APART, 1) if gpu else (ASYNC, True)
  if extent == "quick":
    every = [Case(EACH)] * (target in QUICK)
  else:
    every = [Case(EACH), Case(EACH, flag=flag)]
    if extent == "all" or target not in TWINS:
      every = [Case(PLAIN), Case(ONE), *every, Case(EACH, "ring")]
    if target == SLICES:
      every += [Case(EACH, "hierarchical"), Case(EACH, "hierarchical", flag)]
    if extent == "all" or target in (*QUICK, SLICES):
      every += [Case(BEHIND), Case(INSIDE), *([] if gpu else [Case(INSIDE, flag=flag)])]
  if extent != "quick" and (extent == "all" or target in (*QUICK, SLICES)):
    own = None if gpu or target == SLICES else flag
    every += [Case(form, flag=own) for form in sharded.FORMS]
  return {case.name: case for case in every}


def row(target: str, case: Case) -> tuple[dict[str, Any], str]:
  """Compiles a case: what its report says, and the text of the program."""
  step, args = program(target, case)
  flags = dict([case.flag]) if case.flag else {}
  compiled, facts = reading.compile_for(TARGETS[target], step, args, flags)
  report = gradcomp.overlap_report(compiled)
  found = {
    "bytes": report.bytes_sent,
    "exposed_share": report.exposed_share,
    "hints": report.hints,
    "overlaps": [
      {
        "kind": x.collective.kind,
        "times": x.collective.times,
        "bytes": x.bytes_sent,
        "synchronous": x.synchronous,
        "exposed": x.exposed,
        "products": sum(work.flops > 0 for work in x.beside),
        "others": sum(work.flops == 0 for work in x.beside),
        "flops": x.flops,
        "cycles": x.cycles,
      }
      for x in report.collectives
    ],
  }
  return found | facts, compiled.as_text()


def program(target: str, case: Case) -> tuple[Any, tuple[Any, ...]]:
  """Returns the jitted step, and structs of its arguments."""
  if case.messages in (BEHIND, INSIDE):
    return _scanned(target, case)
  if case.messages in sharded.FORMS:
    mesh = TARGETS[target].mesh(sharded.axes_of(case.messages))
    return sharded.program(mesh, case.messages)
  axes = {"slice": 2, "chip": 4} if case.exchange == "hierarchical" else {"data": 8}
  mesh, names = TARGETS[target].mesh(axes), tuple(axes)
  optimizer = gradcomp.qsgd(
    bits=4,
    axis_name=names if len(names) > 1 else names[0],
    exchange=case.exchange,
    message_bytes=None if case.messages == ONE else 1,
  )
  layers = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)] * LAYERS
  batch = jax.ShapeDtypeStruct(
    (8 * BATCH, WIDTH),
    jnp.bfloat16,
    sharding=jax.NamedSharding(mesh, jax.P(names)),
  )

  def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for layer in params:
      x = jnp.tanh(x @ layer)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))

  def step(params: list[jax.Array], state: Any, x: jax.Array) -> Any:
    own = [jax.lax.pcast(layer, names, to="varying") for layer in params]
    grads = jax.grad(loss)(own, x)
    if case.messages == PLAIN:
      mean = [jax.lax.pmean(layer, names) for layer in grads]
    else:
      mean, state = optimizer.update(grads, state, params)
    moved = [x - (0.1 * y).astype(x.dtype) for x, y in zip(params, mean, strict=True)]
    return moved, state

  state = jax.eval_shape(optimizer.init, layers)
  whole = jax.P()
  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(whole, whole, jax.P(names)), out_specs=(whole, whole)
  )
  return jax.jit(mapped), (*reading.replicated(mesh, (layers, state)), batch)


def _scanned(target: str, case: Case) -> tuple[Any, tuple[Any, ...]]:
  """Returns a step of layers in a loop, each computed again in the backward pass."""
  mesh, data = TARGETS[target].mesh(), jax.P("data")
  key = jax.random.key(0, impl="threefry2x32")
  codec = gradcomp.codecs.QSGD(bits=4)
  way: dict[str, Any] = {"axis_name": "data", "exchange": case.exchange}
  behind = gradcomp.compress(codec, feedback=None, message_bytes=None, **way)
  shape = jax.ShapeDtypeStruct((SCANNED, WIDTH, WIDTH), jnp.bfloat16)
  batch = jax.ShapeDtypeStruct(
    (8 * BATCH, WIDTH), jnp.bfloat16, sharding=jax.NamedSharding(mesh, data)
  )

  def body(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ layer), None

  def loss(layers: jax.Array, x: jax.Array) -> jax.Array:
    if case.messages == INSIDE:
      x, _ = gradcomp.parallel.scan(body, x, layers, codec=codec, key=key, **way)
    else:
      again = jax.checkpoint(body, prevent_cse=False)
      x, _ = jax.lax.scan(again, x, layers)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))

  def step(layers: jax.Array, x: jax.Array) -> jax.Array:
    if case.messages == INSIDE:
      mean = jax.grad(loss)(layers, x)
    else:
      own = jax.lax.pcast(layers, "data", to="varying")
      mean, _ = behind.update(jax.grad(loss)(own, x), behind.init(layers))
    return layers - (0.1 * mean).astype(layers.dtype)

  specs = {"in_specs": (jax.P(), data), "out_specs": jax.P()}
  mapped = jax.shard_map(step, mesh=mesh, **specs)
  return jax.jit(mapped), (*reading.replicated(mesh, (shape,)), batch)
