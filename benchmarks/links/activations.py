"""Times the sending of activations between hosts, and layers cut over them.

Activations (Dettmers 2016, table 3): each host has those of a quarter of the units of a
dense layer, of 128 samples, and gathers the others'. In the backward pass the errors of
all units are added up at the hosts of these units. Beside JAX's own collectives are the
functions of gradcomp.parallel, with float32 and with the 8-bit types.

A step (section 5.2): each host has 128 samples of 9216 activations, and a quarter of
the columns of a layer of 1024 units. sub_batches of the examples takes all samples
through the layer in 1, 2, 4 or 8 passes, forward and backward, with and without
gathering ahead. The paper's model stands beside it, with constants that were measured
in the same run: the transfer of a pass and the products of a pass, each alone. With
gathering ahead, only what a product does not hide is added; without, all is. Beside it
is the paper's own rule, which multiplies what is not hidden by the other hosts, not
by the other passes.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from benchmarks.common import cli, tables
from benchmarks.links import launch, process, results
from benchmarks.links.hosts import Host, bits_per_second
from benchmarks.models.papers import dettmers
from benchmarks.study.model_parallel.ways import ARMS
from examples.lib.cut_layers import sub_batches
from gradcomp import parallel

FILE = "parallel_links"
QUICK = "2 hosts, small arrays, 1 repeat"
OPTIONS = {
  "rates": cli.Option(["1gbit", "100mbit"], ["1gbit"], "in tc's words"),
  "hosts": cli.Option(4, 2),
  "repeats": cli.Option(5, 1, "at most 2 below 500 Mbit/s"),
}
PLAIN = "lax"  # JAX's own collective, in float32


def compiled(mesh: Mesh, function: Any, *shapes: tuple[int, ...]) -> process.Timed:
  """Compiles a function of one host's arrays, drawn here; its results stay there."""
  rng = np.random.default_rng(jax.process_index())
  local = [rng.standard_normal(shape, np.float32) for shape in shapes]
  arrays = tuple(process.spread(mesh, x) for x in local)
  mapped = jax.shard_map(
    function, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")
  )
  program = jax.jit(mapped).lower(*arrays).compile()
  return process.Timed(program, lambda: arrays)


def transfer(
  kind: str, mesh: Mesh, codec: str, rows: int, columns: int, axis: int
) -> process.Timed:
  """Sends ``[rows, columns]`` of each host to all others, or adds those of all."""
  shape, way = [rows, columns], {"axis_name": "data", "tiled": True}
  plain = functools.partial(lax.all_gather, axis=axis, **way)
  ours: Any = parallel.all_gather
  if kind == "scatter":
    plain = functools.partial(lax.psum_scatter, scatter_dimension=axis, **way)
    ours, shape[axis] = parallel.psum_scatter, shape[axis] * mesh.size
  own = lambda x: ours(x, axis_name="data", axis=axis, codec=ARMS[codec])
  return compiled(mesh, plain if codec == PLAIN else own, tuple(shape))


def layer(w: jax.Array, batch: jax.Array) -> jax.Array:
  """Returns a number that needs all outputs of the columns of a dense layer."""
  return jnp.sum(jax.nn.relu(batch @ w) ** 2)


def products(
  backward: bool, mesh: Mesh, rows: int, inputs: int, outputs: int
) -> process.Timed:
  """Computes the layer of one pass, whose inputs are there, forward or both ways."""
  forward = lambda w, batch: layer(w, batch)[None]
  call = jax.grad(layer, (0, 1)) if backward else forward
  return compiled(mesh, call, (inputs, outputs // mesh.size), (rows, inputs))


def whole_step(
  mesh: Mesh, codec: str, rows: int, inputs: int, outputs: int, passes: int, ahead: bool
) -> process.Timed:
  """Computes the gradients of the layer and of its inputs, in so many passes."""
  way: dict[str, Any] = {"axis_name": "data", "passes": passes, "prefetch": ahead}
  way["codec"] = ARMS[codec]
  losses = lambda w, x: sub_batches(lambda batch, _: layer(w, batch), x, **way)
  grads = jax.grad(lambda w, x: jnp.sum(losses(w, x)), (0, 1))
  return compiled(mesh, grads, (inputs, outputs // mesh.size), (rows, inputs))


PROGRAMS: dict[str, Callable[..., process.Timed]] = {
  "gather": functools.partial(transfer, "gather"),
  "scatter": functools.partial(transfer, "scatter"),
  "product": functools.partial(products, False),
  "products": functools.partial(products, True),
  "step": whole_step,
}

_STEPS = ("f32", "dynamic_tree", "linear")


class Sizes(NamedTuple):
  """Says what the hosts compute."""

  samples: int = 128  # of each host
  inputs: int = dettmers.ACTIVATIONS  # of the dense layer in the step
  outputs: int = 1024  # of the same
  sent: tuple[int, ...] = (9216, 3072)  # for each layer in table 3, its activations
  passes: tuple[int, ...] = (1, 2, 4, 8)  # of the step


SMALL = Sizes(8, 64, 32, (64,), (1, 2))
Name = list[Any]
name_of = json.dumps  # makes the key of a program in the results


def syncs(sizes: Sizes, hosts: int) -> list[Name]:
  """Returns the programs that send activations, of all types."""
  return [
    [kind, codec, sizes.samples, width // hosts, 1]
    for kind in ("gather", "scatter")
    for width in sizes.sent
    for codec in (PLAIN, *ARMS)
  ]


def parts(sizes: Sizes, hosts: int, codec: str, passes: int) -> list[Name]:
  """Returns the transfers and the products of one pass, each alone."""
  own = sizes.samples // passes
  layer = [hosts * own, sizes.inputs, sizes.outputs]
  sent = [[kind, codec, own, sizes.inputs, 0] for kind in ("gather", "scatter")]
  return [*sent, ["product", *layer], ["products", *layer]]


def step(sizes: Sizes, codec: str, passes: int, prefetch: bool) -> Name:
  """Returns the program of a step."""
  return ["step", codec, sizes.samples, sizes.inputs, sizes.outputs, passes, prefetch]


def programs(sizes: Sizes, hosts: int) -> list[Name]:
  """Returns all programs of a run, each once."""
  found = syncs(sizes, hosts)
  for passes in sizes.passes:
    for codec in _STEPS:
      found += parts(sizes, hosts, codec, passes)
      ahead = (True, False) if passes > 1 else (True,)
      found += [step(sizes, codec, passes, prefetch) for prefetch in ahead]
  return [json.loads(name) for name in dict.fromkeys(map(name_of, found))]


def predicted(
  seconds: dict[str, float], sizes: Sizes, hosts: int, codec: str, passes: int
) -> dict[str, float]:
  """Returns the model's seconds of a step, by what hides; "paper" by its own rule."""
  there, back, forward, both = (
    seconds[name_of(call)] for call in parts(sizes, hosts, codec, passes)
  )
  # Each of the two transfers hides under the products of its own direction.
  pairs = (there, forward), (back, max(0.0, both - forward))
  of_pair = functools.partial(dettmers.exposed_seconds, passes=passes, nodes=hosts)
  exposed = {
    "ahead": sum(of_pair(*pair, penalty="passes") for pair in pairs),
    "after": passes * (there + back),
    "paper": sum(of_pair(*pair, penalty="nodes") for pair in pairs),
  }
  return {rule: passes * both + seconds for rule, seconds in exposed.items()}


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
  sizes = SMALL if args.quick else Sizes()
  for rate in args.rates:
    speed = bits_per_second(rate)
    repeats = min(args.repeats, 2) if speed and speed < 5e8 else args.repeats
    cell = {"rate": rate, "hosts": args.hosts, "sizes": sizes._asdict()}
    yield cell | {"repeats": repeats, "programs": {}}


def measure(hosts: list[Host], cell: dict[str, Any], args: argparse.Namespace) -> None:
  calls = programs(Sizes(**cell["sizes"]), cell["hosts"])
  job = {"programs": calls, "repeats": cell["repeats"]}
  reports = launch.run_workers(hosts, "activations", job, args.limit)
  cell["programs"] = results.combine(reports, "steps", hosts[0].interface)


def markdown(found: dict[str, Any]) -> str:
  return results.page(found, tables.page(__file__, "activations"), "programs", _tables)


def _tables(run: dict[str, Any]) -> list[str]:
  sizes, hosts = Sizes(**run["sizes"]), run["hosts"]
  seconds = {name: x["median_seconds"] for name, x in run["programs"].items()}
  speed, lines = bits_per_second(run["rate"]), []
  for call in syncs(sizes, hosts):
    kind, codec, *shape = call
    entry, own = run["programs"][name_of(call)], seconds[name_of(call)]
    plain = (seconds[name_of([kind, x, *shape])] for x in (PLAIN, "f32"))
    bound = f"{8e3 * entry['bytes_wire_report'] / speed:.1f}" if speed else ""
    lines.append([kind, f"[{shape[0]}, {shape[1] * hosts}/{hosts}]", codec])
    lines[-1] += [f"{1e3 * own:.1f}", f"{entry['bytes_sent'] / 1e6:.2f}", bound]
    lines[-1] += [f"{x / own:.2f}" for x in plain]
  sent = tables.table(["", "", "", "ms", "MB sent", "wire", "x lax", "x f32"], lines)
  steps = []
  for codec, passes in itertools.product(_STEPS, sizes.passes):
    model = predicted(seconds, sizes, hosts, codec, passes)
    ahead = seconds[name_of(step(sizes, codec, passes, True))]
    after = seconds.get(name_of(step(sizes, codec, passes, False)), ahead)
    alone = [seconds[name_of(call)] for call in parts(sizes, hosts, codec, passes)]
    numbers = [ahead, after, *model.values(), *alone]
    steps.append([codec, str(passes), *(f"{1e3 * x:.0f}" for x in numbers)])
  header = "sent,passes,ahead,not ahead,model,model not ahead,paper's rule"
  header += ",gather,scatter,forward,both products"
  given = {"sent": sent, "steps": tables.table(header.split(","), steps)}
  return [tables.page(__file__, "activations_run", **sizes._asdict() | given)]


def report(mesh: Mesh, options: dict[str, Any]) -> dict[str, Any]:
  calls = {name_of(call): call for call in options["programs"]}
  made = {name: PROGRAMS[kind](mesh, *own) for name, (kind, *own) in calls.items()}
  return {"steps": process.measure(mesh, made, options)}
