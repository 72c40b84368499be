"""Times how long a train step's update takes to trace and to compile, by its leaves.

  python -m benchmarks.codecs.compile_time [--methods 'QSGD, 4 bits' ...]
    [--models '8B' ...] [--quick] [--output FOLDER]

The update is that of adamw behind an exchange over eight emulated devices. Arguments
are shapes alone, so that models of any size do. Nothing runs. Models are layers of a
transformer, each leaf by itself, or Llama-like ones whose layers are stacked for
`jax.lax.scan`. Times are CPU seconds of this process, because XLA compiles on several
threads and the machine may have other things to do.

With --output, writes compile_time.json and compile_time.md there. What is there already
of other methods and models stays, unless it was read with another version of JAX.
"""

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import gradcomp
from benchmarks.common import cli, quiet
from benchmarks.common.tables import table
from gradcomp.codecs import QSGD

WORKERS = 8
_OVER: Any = {"axis_name": "data"}

METHODS: dict[str, Callable[[], Any]] = {
  "plain mean": lambda: gradcomp.dense(**_OVER),
  "QSGD, 4 bits": lambda: gradcomp.qsgd(bits=4, **_OVER),
  "QSGD, `ring`": lambda: gradcomp.qsgd(bits=4, exchange="ring", **_OVER),
  "QSGD, error feedback": lambda: gradcomp.qsgd(bits=4, feedback="error", **_OVER),
  "1-bit SGD": lambda: gradcomp.onebit_sgd(**_OVER),
  "natural": lambda: gradcomp.natural(**_OVER),
  "APS": lambda: gradcomp.aps(**_OVER),
  "TernGrad": lambda: gradcomp.terngrad(**_OVER),
  "RedSync, 0.1 %": lambda: gradcomp.redsync(**_OVER),
  "zero, 4 + 4 bits": lambda: gradcomp.parallel.zero(
    optax.adamw(1e-3), grads=QSGD(bits=4), params=QSGD(bits=4), **_OVER
  ),
}
QUICK = "plain mean"


def layer(width: int, inner: int, kv: int, *depth: int) -> dict[str, Any]:
  """Returns the shapes of a layer's leaves; with a depth those of a stack of layers."""
  shapes = {
    "q": (width, width),
    "k": (width, kv),
    "v": (width, kv),
    "o": (width, width),
    "gate": (width, inner),
    "up": (width, inner),
    "down": (inner, width),
    "norm1": (width,),
    "norm2": (width,),
  }
  like = lambda x: jax.ShapeDtypeStruct((*depth, *x), jnp.float32)
  return {name: like(shape) for name, shape in shapes.items()}


def apart(leaves: int) -> Any:
  """Returns layers of a transformer of width 1024, cut off after so many leaves."""
  layers = [layer(1024, 2816, 1024) for _ in range(-(-leaves // 9))]
  return jax.tree.leaves(layers)[:leaves]


def stacked(depth: int, width: int, inner: int) -> Any:
  """Returns a Llama-like model whose layers are stacked."""
  end = jax.ShapeDtypeStruct((128_256, width), jnp.float32)
  return layer(width, inner, 1024, depth), end, end


MODELS: dict[str, Callable[[], Any]] = {
  "100 leaves": lambda: apart(100),
  "300 leaves": lambda: apart(300),
  "8B, stacked": lambda: stacked(32, 4096, 14_336),
  "70B, stacked": lambda: stacked(80, 8192, 28_672),
}


def measure(method: str, params: Any) -> dict[str, float]:
  """Returns the CPU seconds to trace and lower an update, and to compile it."""
  jax.clear_caches()
  mesh = jax.make_mesh((WORKERS,), ("data",))
  exchange = METHODS[method]()
  if not method.startswith("zero"):
    exchange = optax.chain(exchange, optax.adamw(1e-3))
  with jax.set_mesh(mesh):
    state = jax.eval_shape(exchange.init, params)
  specs = gradcomp.state_specs(state, axis_name="data")

  def update(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    gradient = gradcomp.defer_reduction(gradient, axis_name="data")
    updates, state = exchange.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  mapped = jax.shard_map(
    update, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs)
  )
  place = lambda x, spec: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)
  )
  params = jax.tree.map(functools.partial(place, spec=P()), params)
  state = jax.tree.map(place, state, specs)
  started = time.process_time()
  lowered = jax.jit(mapped, donate_argnums=(1, 2)).lower(params, state, params)
  traced = time.process_time()
  lowered.compile()
  return {"trace": traced - started, "compile": time.process_time() - traced}


def markdown(found: dict[tuple[str, str], dict[str, float]]) -> str:
  """Returns a line for each method: CPU seconds to trace, and to compile."""
  models = [name for name in MODELS if any(x == name for _, x in found)]
  lines = []
  for method in METHODS:
    row = [found.get((method, model)) for model in models]
    cells = [f"{x['trace']:.1f} + {x['compile']:.1f}" if x else "" for x in row]
    if any(row):
      lines.append([method, *cells])
  return f"{table(['', *models], lines)}\n"


def main() -> None:
  options = cli.options(
    __doc__,
    "one method and ten leaves",
    "folder of the two files",
    methods=cli.Option([*METHODS], [QUICK], choices=METHODS),
    models=cli.Option([*MODELS], ["100 leaves"], choices=MODELS),
  )
  jax.config.update("jax_num_cpu_devices", WORKERS)
  models = {name: MODELS[name] for name in options.models}
  models |= {"100 leaves": lambda: apart(10)} if options.quick else {}
  quiet.keep(unless=options.quick)
  found = {}
  for model, make in models.items():
    for method in options.methods:
      seconds = found[method, model] = measure(method, make())
      print(f"{model}, {method}: {seconds}", flush=True)
  if options.output:
    write(options.output, found)
  print(markdown(found))


def write(folder: pathlib.Path, found: dict[tuple[str, str], dict[str, float]]) -> None:
  """Writes both files, with what they had of other methods and models."""
  about = {"jax": jax.__version__, "workers": WORKERS}
  old = cli.rows_of(folder / "compile_time.json", about)
  found = {(x.pop("method"), x.pop("model")): x for x in old} | found
  rows = [{"method": x, "model": y, **seconds} for (x, y), seconds in found.items()]
  cli.write(folder, "compile_time", {**about, "rows": rows}, markdown(found))


if __name__ == "__main__":
  main()
