"""Trains over slow links with local steps, and with an exchange in every step.

Links have a round trip, too. Each host trains the transformer of the examples by AdamW
on its own part of the batches.

A method's tokens a second are those of all hosts, by the time of the slowest. They do
not meet in that time, so a host that is late costs time, as it does in a training. The
share of communication is measured apart: hosts meet before a step without an exchange
and before the one with it, and the difference, of the slowest host and the median of
the rounds, is divided by the time of a round. Of methods that exchange in every step,
the step without is that of the local steps.

All hosts share this machine's cores, so a step takes longer than on a host of its own,
and the exchange weighs less against it. A batch of few tokens makes up for that:
accelerators take a step of the same parameters sooner still. gloo
waits for each message of its psum, so on links that take time it is not the fastest way
to add float32: two_shot is, and it is what the others are compared with.

With --output, there is a file for each number of hosts. Methods that were measured
there with the same settings are kept.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

import gradcomp
from benchmarks.common import cli, tables
from benchmarks.links import launch, process
from benchmarks.links.hosts import Host, timed
from examples.lib import texts
from examples.lib.training import AXIS, Task, compile_step, init_state
from gradcomp.codecs import BlockTop, Dense

FILE = "local_links_{hosts}"
QUICK = "2 hosts, a small network, two methods"
BASELINE = "f32 two_shot"
_FORGETTING = gradcomp.ErrorFeedback(residual_decay=0.95)
_TWO: Any = {"exchange": "two_shot"}
_SPARSE: Any = {"codec": BlockTop(), "feedback": _FORGETTING}
# What exchanges in every step, before AdamW.
EACH = {
  "f32 psum": gradcomp.dense(axis_name=AXIS),
  BASELINE: gradcomp.dense(axis_name=AXIS, **_TWO),
  "QSGD-4 two_shot": gradcomp.qsgd(bits=4, axis_name=AXIS, **_TWO),
}
# Of methods that take steps alone the outer optimizer, and options of the exchange.
ALONE = {
  "DiLoCo two_shot": (optax.sgd(0.7, 0.9, nesterov=True), {"codec": Dense()} | _TWO),
  "SparseLoCo all_gather": (optax.sgd(1.0), _SPARSE | {"merge": "senders"}),
  "SparseLoCo two_shot": (optax.sgd(4.0), _SPARSE | _TWO),
}
METHODS = (*EACH, *ALONE)
OPTIONS = {
  "methods": cli.Option([*METHODS], [BASELINE, "SparseLoCo two_shot"], choices=METHODS),
  "rates": cli.Option(["100mbit"], help="of each link, in tc's words"),
  "round_trip": cli.Option(50.0, 10.0, "milliseconds"),
  "hosts": cli.Option(4, 2),
  "every": cli.Option(30, 4, "steps in a round"),
  "rounds": cli.Option(3, 1, "that are measured"),
  "steps": cli.Option(2, help="of those that exchange in each"),
  "width": cli.Option(640, 32, "of the transformer"),
  "layers": cli.Option(4, 1),
  "length": cli.Option(16, help="tokens in a sequence"),
  "batch": cli.Option(1, help="sequences a host and step"),
}
_SETTINGS = "hosts round_trip every rounds steps width layers length batch".split()


def stepper(
  mesh: jax.sharding.Mesh, options: dict[str, Any]
) -> tuple[Callable[[], float], dict[str, int]]:
  """Compiles a method's step: returns what takes one and times it, and its sizes."""
  length, found = options["length"], texts.load()
  width, layers = options["width"], options["layers"]
  model = texts.Transformer(texts.CHARACTERS, width=width, layers=layers)
  task = Task(model, texts.in_order(found.test[: 2 * length], length), mesh)
  own = {"seed": 0, "part": options["rank"], "parts": mesh.size}
  batches = texts.batches(found.train, options["batch"] * mesh.size, length, **own)
  adam = optax.adamw(1e-3)
  if options["method"] in EACH:
    tx = optax.chain(EACH[options["method"]], adam)
  else:
    outer, way = ALONE[options["method"]]
    way = {"axis_name": AXIS, "every": options["every"]} | way
    tx = gradcomp.local.local_steps(adam, outer, **way)
  program, wire = compile_step(task, tx, next(batches))
  params = task.init_params(0)
  held = [params, init_state(task, tx, params)]

  def step() -> float:
    batch = jax.block_until_ready(task.place(next(batches)))
    start = time.perf_counter()
    held[:] = jax.block_until_ready(program(*held, batch))[:2]
    return time.perf_counter() - start

  size = sum(x.size for x in jax.tree.leaves(params))
  return step, {"parameters": size, "wire_report": wire.bytes_sent}


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
  settings = {name: getattr(args, name) for name in _SETTINGS}
  for rate in args.rates:
    for method in args.methods:
      about = {"method": method, "rate": rate, "hosts": args.hosts}
      yield about | {"settings": settings | {"rate": rate}}


def measure(hosts: list[Host], cell: dict[str, Any], args: argparse.Namespace) -> None:
  # A round of one step has none without an exchange to compare with.
  alone = cell["method"] in ALONE and args.every > 1
  count = args.every * args.rounds if alone else args.steps
  names = ("method", "width", "layers", "length", "batch", "every")
  job = {name: (vars(args) | cell)[name] for name in names} | {
    "first": args.every if alone else 1,
    "steps": count,
    "exchanged_every": args.every if alone else count + 1,  # nothing to be met for
  }
  reports = launch.run_workers(hosts, "local", job, args.limit)
  slowest = max(report["seconds"] for report in reports)
  cell |= {
    "parameters": reports[0]["parameters"],
    "tokens_a_second": args.hosts * args.batch * args.length * count / slowest,
    "step_seconds": slowest / count,
    "bytes_a_round": reports[0]["wire_report"] * (1 if alone else args.every),
    "counted_a_round": max(x["sent"] for x in reports) * args.every / count,
    "mbit_a_second": 8e-6 * min(cell["probe"]),
    "round_trip_ms": 1e3 * cell["round_trip"],
  }
  for kind in ("alone", "together") if alone else ():
    rounds = zip(*(report[kind] for report in reports), strict=True)
    cell[f"{kind}_seconds"] = [*map(max, rounds)]


def joined(found: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
  known = found["methods"] if found.get("settings") == cell["settings"] else {}
  if "step_seconds" in cell:
    known = known | {cell["method"]: {k: cell[k] for k in cell if k != "settings"}}
  return {"machine": found["machine"], "settings": cell["settings"], "methods": known}


def shares(found: dict[str, dict[str, Any]], every: int) -> dict[str, float]:
  """Returns the share of the time in communication, where it is known."""
  median = statistics.median
  alone = [median(x["alone_seconds"]) for x in found.values() if "alone_seconds" in x]
  result = {}
  for method, x in found.items():
    if "together_seconds" in x:
      sent = median(x["together_seconds"]) - median(x["alone_seconds"])
      result[method] = max(0.0, sent) / (every * x["step_seconds"])
    elif alone:
      result[method] = max(0.0, 1 - median(alone) / x["step_seconds"])
  return result


def markdown(results: dict[str, Any]) -> str:
  settings, found = results["settings"], results["methods"]
  if not found:
    return "This machine does not reach the rate.\n"
  share = shares(found, settings["every"])
  base = found.get(BASELINE)
  lines = [
    [
      method,
      f"{x['tokens_a_second']:,.0f}",
      f"{x['tokens_a_second'] / base['tokens_a_second']:.1f}" if base else "",
      f"{1e3 * x['step_seconds']:,.0f}",
      f"{share[method]:.1%}" if method in share else "",
      *(f"{x[f'{of}_a_round'] / 1e6:,.3f}" for of in ("bytes", "counted")),
      f"{base['bytes_a_round'] / x['bytes_a_round']:,.0f}" if base else "",
    ]
    for method, x in found.items()
  ]
  header = "method,tokens/s,x f32,ms a step,in communication,MB a round,counted,fewer"
  one = next(iter(found.values()))
  return tables.page(
    __file__,
    "local",
    table=tables.table(header.split(","), lines),
    baseline=BASELINE,
    least=min(x["mbit_a_second"] for x in found.values()),
    most=max(x["round_trip_ms"] for x in found.values()),
    load=max(x["load_and_cores"][0] for x in found.values()),
    cores=one["load_and_cores"][1],
    millions=one["parameters"] / 1e6,
    tokens=settings["batch"] * settings["length"],
    **settings,
  )


def report(mesh: jax.sharding.Mesh, options: dict[str, Any]) -> dict[str, Any]:
  """Times training steps on one host; hosts meet before those that are timed alone."""
  meet, every = process.meeting(mesh), options["exchanged_every"]
  step, sizes = stepper(mesh, options)
  take = lambda count: [step() for _ in range(count)]
  take(options["first"])
  _, took = timed(options["interface"], meet, take, options["steps"])
  # What communication takes, and not what hosts wait for one that is late: the last
  # step of a round begins on all hosts at once, and so does the one before.
  rounds: dict[str, list[float]] = {"alone": [], "together": []}
  for _ in range(options["steps"] // every):
    take(every - 2)
    for seconds in rounds.values():
      meet()
      seconds.append(step())
  return sizes | took | rounds
