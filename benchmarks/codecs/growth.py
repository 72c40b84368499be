"""Measures how tracing, compiling and memory of an update grow with a model's leaves.

  python -m benchmarks.codecs.growth

The update is that of adamw behind an exchange over eight emulated devices, beside
adamw alone and beside the mean of jax.lax.pmean. Arguments are shapes alone, so that
models of any size do. Nothing runs. Models are layers of a transformer, each leaf by
itself, or Llama-like ones, whose layers are stacked for `jax.lax.scan` or, with
*leaves* behind their names, are not; these are traced alone. 300 leaves are those of
some methods, unless --methods names others. Times are CPU seconds of this process,
because XLA compiles on several threads and the machine may have other things to do.
Temporaries are those of one device, by the compiler's own count.

What --output has already of other methods and models stays, unless it was read with
another version of JAX.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradcomp
from benchmarks.common import cli, quiet, tables
from benchmarks.common.shapes import mapped
from gradcomp import local, parallel
from gradcomp.codecs import QSGD

WORKERS = 8
_OVER: Any = {"axis_name": "data"}
_HOSTS = ("host", "chip")  # the axes of two hosts, for an exchange within and between
_BETWEEN: Any = {"axis_name": _HOSTS, "exchange": "hierarchical"}

_LOCAL: Any = {"every": 30, "codec": QSGD(bits=4)}
_BOTH: Any = {"grads": QSGD(bits=4), "params": QSGD(bits=4)}
_ADAM = optax.adamw(1e-3)

ALONE = "adamw alone"
MEAN = "`jax.lax.pmean`"
METHODS: dict[str, Callable[[], Any]] = {
  ALONE: optax.identity,
  MEAN: optax.identity,
  "plain mean": lambda: gradcomp.dense(**_OVER),
  "QSGD, 4 bits": lambda: gradcomp.qsgd(bits=4, **_OVER),
  "QSGD, `ring`": lambda: gradcomp.qsgd(bits=4, exchange="ring", **_OVER),
  "QSGD, `hierarchical`": lambda: gradcomp.qsgd(bits=4, **_BETWEEN),
  "QSGD, nearest": lambda: gradcomp.qsgd(bits=4, rounding="nearest", **_OVER),
  "QSGD, error feedback": lambda: gradcomp.qsgd(bits=4, feedback="error", **_OVER),
  "1-bit SGD": lambda: gradcomp.onebit_sgd(**_OVER),
  "natural": lambda: gradcomp.natural(**_OVER),
  "APS": lambda: gradcomp.aps(**_OVER),
  "TernGrad": lambda: gradcomp.terngrad(**_OVER),
  "RedSync, 0.1 %": lambda: gradcomp.redsync(**_OVER),
  "PowerSGD, rank 4": lambda: gradcomp.powersgd(rank=4, **_OVER),
  "local steps": lambda: local.local_steps(_ADAM, optax.sgd(0.7), **_LOCAL, **_OVER),
  "zero, 4 + 4 bits": lambda: parallel.zero(_ADAM, **_BOTH, **_OVER),
}


def layer(width: int, inner: int, kv: int, *depth: int) -> dict[str, Any]:
  """Returns the shapes of a layer's leaves; with a depth those of a stack of layers."""
  shapes = {"q o": (width, width), "k v": (width, kv), "gate up": (width, inner)}
  shapes |= {"down": (inner, width), "norm1 norm2": (width,)}
  like = lambda x: jax.ShapeDtypeStruct((*depth, *x), jnp.float32)
  return {name: like(x) for names, x in shapes.items() for name in names.split()}


def apart(leaves: int) -> Any:
  """Returns layers of a transformer of width 1024, cut off after so many leaves."""
  layers = [layer(1024, 2816, 1024) for _ in range(-(-leaves // 9))]
  return jax.tree.leaves(layers)[:leaves]


def llama(depth: int, width: int, inner: int, *, stacked: bool) -> Any:
  """Returns a Llama-like model, whose layers may be stacked."""
  end = jax.ShapeDtypeStruct((128_256, width), jnp.float32)
  if stacked:
    return layer(width, inner, 1024, depth), end, end
  return [layer(width, inner, 1024) for _ in range(depth)], end, end


MODELS: dict[str, Callable[[], Any]] = {
  "100 leaves": lambda: apart(100),
  "300 leaves": lambda: apart(300),
  "8B, stacked": lambda: llama(32, 4096, 14_336, stacked=True),
  "70B, stacked": lambda: llama(80, 8192, 28_672, stacked=True),
  "8B, 290 leaves": lambda: llama(32, 4096, 14_336, stacked=False),
  "70B, 722 leaves": lambda: llama(80, 8192, 28_672, stacked=False),
}
TRACED = ("8B, 290 leaves", "70B, 722 leaves")  # not compiled, which takes minutes
# The rows with 300 leaves, unless --methods names others, which take minutes.
AT_300 = (ALONE, MEAN, "plain mean", "QSGD, 4 bits", "QSGD, `ring`")
AT_300 += ("QSGD, error feedback", "TernGrad")


def measure(method: str, params: Any, *, compiled: bool = True) -> dict[str, float]:
  """Returns the CPU seconds to trace, lower and compile an update, and temporaries."""
  jax.clear_caches()
  axes = _HOSTS if "hierarchical" in method else ("data",)
  mesh = jax.make_mesh((2, WORKERS // 2) if axes == _HOSTS else (WORKERS,), axes)
  exchange = METHODS[method]()
  if not method.startswith(("zero", "local")):
    exchange = optax.chain(exchange, _ADAM)
  with jax.set_mesh(mesh):
    state = jax.eval_shape(exchange.init, params)
  specs = gradcomp.state_specs(state, axis_name=axes)

  # XLA gives donated memory to the first result of its shape. So parameters come first
  # among arguments and results, as in make_train_step, or all would be copied around.
  def update(params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
    if method != ALONE:
      gradient = gradcomp.defer_reduction(gradient, axis_name=axes)
    if method == MEAN:
      gradient = jax.lax.pmean(gradient, axes)
    updates, state = exchange.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  whole, args = jax.P(), (params, state, params)
  given, made = (whole, specs, whole), (whole, specs)
  step, args = mapped(mesh, update, args, given, made, donate_argnums=(0, 1))
  clock, leaves = time.process_time, jax.tree.leaves(params)
  started = clock()
  traced = step.trace(*args)
  found = {"trace": clock() - started, "leaves": len(leaves)}
  if compiled:
    lowered = traced.lower()
    found["lower"] = clock() - started
    began = clock()
    analysis = lowered.compile().memory_analysis()
    found["compile"] = clock() - began
    gradient = 4 * sum(x.size for x in leaves)
    found["temporaries"] = analysis.temp_size_in_bytes / gradient
  return found


Rows = dict[tuple[str, str], dict[str, float]]


def markdown(found: Rows) -> str:
  """Returns three tables, a line a method: seconds, ms of trace a leaf, temporaries."""
  cells = [
    lambda x: f"{x['lower']:.1f} + {x['compile']:.1f}" if "compile" in x else "",
    lambda x: f"{1e3 * x['trace'] / x['leaves']:.1f}" if "leaves" in x else "",
    lambda x: f"{x['temporaries']:.2f}" if "temporaries" in x else "",
  ]
  parts = []
  for cell in cells:
    shown = {key: text for key, row in found.items() if (text := cell(row))}
    models = [name for name in MODELS if any(x == name for _, x in shown)]
    rows = {x: [shown.get((x, model), "") for model in models] for x in METHODS}
    lines = [[method, *row] for method, row in rows.items() if any(row)]
    parts.append(f"{tables.table(['', *models], lines)}\n")
  return "\n".join(parts)


def main() -> None:
  options = cli.options(
    __doc__,
    "one method and ten leaves",
    "folder of the two files",
    methods=cli.Option([*METHODS], ["plain mean"], choices=METHODS),
    models=cli.Option([*MODELS], ["100 leaves"], choices=MODELS),
  )
  jax.config.update("jax_num_cpu_devices", WORKERS)
  models = {name: MODELS[name] for name in options.models}
  models |= {"100 leaves": lambda: apart(10)} if options.quick else {}
  quiet.keep(unless=options.quick)
  found, every = {}, options.methods == [*METHODS]
  for model, make in models.items():
    for method in AT_300 if every and model == "300 leaves" else options.methods:
      row = measure(method, make(), compiled=model not in TRACED)
      found[method, model] = row
      print(f"{model}, {method}: {row}", flush=True)
  print(markdown(found))
  about = {"jax": jax.__version__, "workers": WORKERS}
  old = cli.rows_of(options.output, "growth", about)
  known = {(x.pop("method"), x.pop("model")): x for x in old}
  found = known | {key: known.get(key, {}) | row for key, row in found.items()}
  rows = [{"method": x, "model": y, **row} for (x, y), row in found.items()]
  cli.write(options.output, "growth", {**about, "rows": rows}, markdown(found))


if __name__ == "__main__":
  main()
