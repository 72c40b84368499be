"""Times steps of layers in a loop, with the exchange behind it and inside.

A step is a forward and a backward pass of equal layers, and the mean of the gradients:
from the batch to the means. One call of each step is traced. So the record has the
seconds in which a host's collectives were under way, and in how many of them its
threads computed.
"""

import argparse
import functools
import glob
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradcomp
from benchmarks.common import cli, tables
from benchmarks.links import launch, process, results
from benchmarks.links.hosts import Host
from gradcomp import parallel
from gradcomp.codecs import QSGD, Codec, Dense

FILE = "layers_links"
QUICK = "2 hosts, small layers, 1 repeat"
OPTIONS = {
  "rates": cli.Option(["1gbit", "100mbit"], ["1gbit"], "in tc's words"),
  "hosts": cli.Option(4, 2),
  "repeats": cli.Option(7, 1),
  "layers": cli.Option(8, 3),
  "width": cli.Option(1024, 64),
  "batch": cli.Option(128, 8, "rows of each host"),
}
_SIZES = ("layers", "width", "batch", "repeats")
PLAIN = "plain mean, behind"
ALONE = "no exchange"
FOUR_BITS = QSGD(bits=4)
_INSTRUCTION = re.compile(r"%(\S+) = .*? ([\w-]+)\(")
_SENDS = {"all-reduce", "all-to-all", "all-gather", "collective-permute"}
_AROUND = {"while", "call", "conditional"}  # their events hold those of others

Mean = Callable[[jax.Array, jax.Array], jax.Array]
Span = tuple[float, float]  # nanoseconds


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
  """Applies a dense layer, and adds its input."""
  return x + jnp.tanh(x @ w), None


def plain(layers: jax.Array, x: jax.Array) -> jax.Array:
  """Returns the host's own gradients of layers in ``lax.scan``."""
  again = jax.checkpoint(layer, prevent_cse=False)  # as parallel.scan has it
  loss = lambda layers: jnp.mean(jnp.square(jax.lax.scan(again, x, layers)[0]))
  return jax.grad(loss)(gradcomp.defer_reduction(layers, axis_name="data"))


def inside(codec: Codec, exchange: str, layers: jax.Array, x: jax.Array) -> jax.Array:
  """Returns means whose layers were exchanged inside the loop."""
  way: dict[str, Any] = {"axis_name": "data", "codec": codec, "exchange": exchange}
  way["key"] = jax.random.key(0, impl="threefry2x32") if codec.needs_key else None
  applied = lambda layers: parallel.scan(layer, x, layers, **way)[0]
  return jax.grad(lambda layers: jnp.mean(jnp.square(applied(layers))))(layers)


def behind(layers: jax.Array, x: jax.Array, each: bool) -> jax.Array:
  """Returns means that were exchanged behind the loop, in one message or in many."""
  way: dict[str, Any] = {"axis_name": "data", "exchange": "two_shot", "feedback": None}
  tx = gradcomp.compress(FOUR_BITS, message_bytes=1 if each else None, **way)
  grads: Any = list(plain(layers, x)) if each else plain(layers, x)
  means: Any = tx.update(grads, tx.init(grads))[0]
  return jnp.stack(means) if each else means


STEPS: dict[str, Mean] = {
  PLAIN: lambda layers, x: jax.lax.pmean(plain(layers, x), "data"),
  "plain mean, inside": functools.partial(inside, Dense(), "psum"),
  "4 bits, behind, one message": functools.partial(behind, each=False),
  "4 bits, behind, a message a layer": functools.partial(behind, each=True),
  "4 bits, inside": functools.partial(inside, FOUR_BITS, "two_shot"),
  ALONE: plain,
}


def program(
  mesh: jax.sharding.Mesh, name: str, arrays: tuple[jax.Array, ...]
) -> process.Timed:
  specs: dict[str, Any] = {"in_specs": (jax.P(), jax.P("data"))}
  specs["out_specs"] = jax.P("data") if name == ALONE else jax.P()
  mapped = jax.shard_map(lambda *own: [STEPS[name](*own)], mesh=mesh, **specs)
  compiled = jax.jit(lambda *arrays: (mapped(*arrays),)).lower(*arrays).compile()
  return process.Timed(compiled, lambda: arrays, averages=name != ALONE)


def side_by_side(timed: process.Timed) -> dict[str, float]:
  """Traces a run of a program: seconds of collectives, of work, and of both at once."""
  kinds = dict(_INSTRUCTION.findall(timed.program.as_text()))
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      jax.block_until_ready(timed.program(*timed.arguments()))
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    planes = jax.profiler.ProfileData.from_file(path).planes
    events = [x for plane in planes for line in plane.lines for x in line.events]
  sends, works = [], []
  for x in events:
    if (kind := kinds.get(x.name)) and kind not in _AROUND:
      (sends if kind in _SENDS else works).append((x.start_ns, x.end_ns))
  return overlap(sends, works)


def overlap(sends: list[Span], works: list[Span]) -> dict[str, float]:
  """Returns the seconds of spans of either kind, and of both at once.

  >>> overlap([(0, 2e9), (5e9, 6e9)], [(1e9, 4e9)])
  {'collectives': 3.0, 'work': 3.0, 'both': 1.0}
  """
  edges = np.unique([*sends, *works])
  past = lambda times: np.searchsorted(np.sort(times), edges[:-1], "right")

  def under_way(spans: list[Span]) -> np.ndarray:
    starts, ends = np.reshape(spans, (-1, 2)).T
    return past(starts) > past(ends)

  kinds = {"collectives": under_way(sends), "work": under_way(works)}
  kinds["both"] = kinds["collectives"] & kinds["work"]
  return {name: float(np.diff(edges)[on].sum() / 1e9) for name, on in kinds.items()}


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
  for rate in args.rates:
    sizes = {name: getattr(args, name) for name in _SIZES}
    yield {"rate": rate, "hosts": args.hosts, "steps": {}} | sizes


def measure(hosts: list[Host], cell: dict[str, Any], args: argparse.Namespace) -> None:
  job = {name: cell[name] for name in _SIZES}
  reports = launch.run_workers(hosts, "layers", job, args.limit)
  cell["steps"] = results.combine(reports, "steps", hosts[0].interface)
  cell["traces"] = reports[0]["traces"]


def markdown(found: dict[str, Any]) -> str:
  head = tables.page(__file__, "layers", jax=found["machine"]["jax"])
  what = "{layers} dense layers of {width}, {batch} rows a host. "
  return results.page(found, head, "steps", _tables, what)


def _tables(run: dict[str, Any]) -> list[str]:
  alone = run["steps"][ALONE]["median_seconds"]
  lines = []
  for name, step in run["steps"].items():
    own = step["median_seconds"]
    if name == ALONE:
      lines.append([name, f"{1e3 * own:.0f}", *[""] * 6])
      continue
    trace = run["traces"][name]
    lines.append([name, f"{1e3 * own:.0f}", f"{1e3 * (own - alone):.0f}"])
    lines[-1] += [f"{step['bytes_sent'] / 1e6:.2f}", f"{trace['messages']:.0f}"]
    lines[-1] += [f"{1e3 * trace[kind]:.0f}" for kind in ("collectives", "both")]
    lines[-1] += [f"{trace['exposed_share']:.0%}"]
  header = "step,ms,exchange,MB sent,collectives,under way,and computing,exposed"
  return [tables.table(header.split(","), lines)]


def report(mesh: jax.sharding.Mesh, options: dict[str, Any]) -> dict[str, Any]:
  """Times the steps on one host, and traces what runs side by side."""
  count, width, rows = options["layers"], options["width"], options["batch"]
  rng = np.random.default_rng(options["rank"])
  x = process.spread(mesh, rng.standard_normal((rows, width), np.float32))
  same = np.random.default_rng(0).standard_normal((count, width, width), np.float32)
  everywhere = jax.NamedSharding(mesh, jax.P())
  stack = jax.make_array_from_process_local_data(everywhere, same / width**0.5)
  programs = {name: program(mesh, name, (stack, x)) for name in STEPS}
  steps = process.measure(mesh, programs, options)
  meet = process.meeting(mesh)
  traces = {}
  for name, timed in programs.items():
    report = gradcomp.overlap_report(timed.program)
    meet()
    traces[name] = side_by_side(timed)
    traces[name]["exposed_share"] = report.exposed_share
    traces[name]["messages"] = sum(x.collective.times for x in report.collectives)
  return {"steps": steps, "traces": traces}
