"""Times the sending of activations between hosts, and layers cut over them.

  python -m benchmarks.links.activations [--rates 1gbit 100mbit] [--hosts 4]
    [--repeats 5] [--output FOLDER] [--quick] [--loopback]

Hosts are network namespaces on links of a known rate, as in links/speed.py, whose page
says what biases the times. Each runs one process (links/activations_worker.py). A time
is the slowest host's, and of several calls the median.

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
import json
import sys
from typing import Any, NamedTuple

from benchmarks.common import cli
from benchmarks.common.tables import table
from benchmarks.links import hosts as links_hosts
from benchmarks.links import launch
from benchmarks.links import results as links_results
from benchmarks.links.activations_worker import CODECS, PLAIN
from benchmarks.models.papers import dettmers

_STEPS = ("f32", "dynamic_tree", "linear")


class Sizes(NamedTuple):
  """Says what the hosts compute.

  Attributes:
    samples: of each host.
    inputs: of the dense layer in the step.
    outputs: of the same.
    sent: for each layer in table 3, its activations.
    passes: of the step.
  """

  samples: int = 128
  inputs: int = dettmers.ACTIVATIONS
  outputs: int = 1024
  sent: tuple[int, ...] = (9216, 3072)
  passes: tuple[int, ...] = (1, 2, 4, 8)


QUICK = Sizes(8, 64, 32, (64,), (1, 2))
Name = list[Any]


def name_of(call: Name) -> str:
  """Returns the key of a program in the results."""
  return json.dumps(call)


def syncs(sizes: Sizes, hosts: int) -> list[Name]:
  """Returns the programs that send activations, of all types."""
  return [
    [kind, codec, sizes.samples, width // hosts, 1]
    for kind in ("gather", "scatter")
    for width in sizes.sent
    for codec in (PLAIN, *CODECS)
  ]


def parts(sizes: Sizes, hosts: int, codec: str, passes: int) -> list[Name]:
  """Returns the transfers and the products of one pass, each alone."""
  own = sizes.samples // passes
  layer = [hosts * own, sizes.inputs, sizes.outputs]
  return [
    ["gather", codec, own, sizes.inputs, 0],
    ["scatter", codec, own, sizes.inputs, 0],
    ["product", *layer],
    ["products", *layer],
  ]


def step(sizes: Sizes, codec: str, passes: int, prefetch: bool) -> Name:
  """Returns the program of a step."""
  given, layer = [sizes.samples, sizes.inputs, sizes.outputs], [passes, prefetch]
  return ["step", codec, *given, *layer]


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
  """Returns the model's seconds of a step from measured ones, by what hides.

  The next pass travels under the product (``"ahead"``) or does not (``"after"``), or
  ``"paper"``: the paper's own rule.
  """
  there, back, forward, both = (
    seconds[name_of(call)] for call in parts(sizes, hosts, codec, passes)
  )
  # Each of the two transfers hides under the products of its own direction.
  pairs = (there, forward), (back, max(0.0, both - forward))
  computed = passes * both

  def exposed(penalty: dettmers.Penalty) -> float:
    return sum(
      dettmers.exposed_seconds(*pair, passes, penalty=penalty, nodes=hosts)
      for pair in pairs
    )

  return {
    "ahead": computed + exposed("passes"),
    "after": computed + passes * (there + back),
    "paper": computed + exposed("nodes"),
  }


def measure(rate: str, sizes: Sizes, args: argparse.Namespace) -> dict[str, Any]:
  """Measures all programs on links of one rate."""
  speed = links_hosts.bits_per_second(rate)
  slow = speed is not None and speed < 5e8
  job = {
    "programs": programs(sizes, args.hosts),
    "repeats": min(args.repeats, 2) if slow else args.repeats,
  }
  run: dict[str, Any] = {
    "rate": rate,
    "hosts": args.hosts,
    "sizes": sizes._asdict(),
    "repeats": job["repeats"],
    "load_and_cores": links_results.load_note(),
    "programs": {},
  }
  with launch.network(args.hosts, rate) as hosts:
    run["probe"], reached = launch.probed(hosts, speed)
    if not reached:
      return run
    reports = launch.run_workers(hosts, "activations_worker", job, args.limit)
    shared = hosts[0].interface == "lo"
    run["programs"] = links_results.combine(reports, "steps", shared=shared)
  run["load_after"] = links_results.load_note()[0]
  return run


def markdown(results: dict[str, Any]) -> str:
  """Writes the tables of all runs."""
  paragraphs = [
    "# Activations over limited links",
    "Medians in milliseconds. `python -m benchmarks.links.activations` writes this "
    "file, and says what is measured.",
  ]
  for run in results["runs"]:
    load = f"{run['load_and_cores'][0]:.1f}"
    after = f"{run.get('load_after', run['load_and_cores'][0]):.1f}"
    paragraphs += [
      f"## {run['hosts']} hosts, {run['rate']}",
      f"Raw TCP carries {8e-6 * min(run['probe']):,.0f} Mbit/s or more. "
      f"{run['repeats']} calls of each program. The load of the machine's "
      f"{run['load_and_cores'][1]:.0f} cores was {load} before the run and {after} "
      "after it.",
    ]
    if run["programs"]:
      paragraphs += _run_tables(run)
    else:
      paragraphs.append("This machine does not reach the rate.")
  return "\n\n".join(paragraphs) + "\n"


def _run_tables(run: dict[str, Any]) -> list[str]:
  sizes, hosts = Sizes(**run["sizes"]), run["hosts"]
  seconds = {name: x["median_seconds"] for name, x in run["programs"].items()}
  lines = []
  for call in syncs(sizes, hosts):
    kind, codec, samples, width, axis = call
    entry = run["programs"][name_of(call)]
    plain = [seconds[name_of([kind, x, samples, width, axis])] for x in (PLAIN, "f32")]
    own = seconds[name_of(call)]
    ratios = [f"{x / own:.2f}" for x in plain]
    bound = _wire_ms(run["rate"], entry["bytes_wire_report"])
    shape = f"[{samples}, {width * hosts}/{hosts}]"
    sent = f"{entry['bytes_sent'] / 1e6:.2f}"
    lines.append([kind, shape, codec, f"{1e3 * own:.1f}", sent, bound, *ratios])
  found = [
    "Activations (gather) and errors (scatter). *Wire*: what the bytes need at the "
    "rate. The last columns say how many times as fast it is as JAX's own collective, "
    "and as ours in float32.",
    table(["", "", "", "ms", "MB sent", "wire", "x lax", "x f32"], lines),
    f"A step, {sizes.samples} samples of each host, {sizes.inputs} inputs, "
    f"{sizes.outputs} outputs. *Ahead*: the next pass is gathered before the product. "
    "*Model*: from the transfers and products of a pass, each measured alone.",
  ]
  steps = []
  for codec in _STEPS:
    for passes in sizes.passes:
      model = predicted(seconds, sizes, hosts, codec, passes)
      ahead = seconds[name_of(step(sizes, codec, passes, True))]
      after = seconds.get(name_of(step(sizes, codec, passes, False)), ahead)
      alone = [seconds[name_of(call)] for call in parts(sizes, hosts, codec, passes)]
      numbers = [ahead, after, *model.values(), *alone]
      steps.append([codec, str(passes), *(f"{1e3 * x:.0f}" for x in numbers)])
  header = "sent,passes,ahead,not ahead,model,model not ahead,paper's rule"
  header += ",gather,scatter,forward,both products"
  return [*found, table(header.split(","), steps)]


def _wire_ms(rate: str, nbytes: int) -> str:
  speed = links_hosts.bits_per_second(rate)
  return f"{8e3 * nbytes / speed:.1f}" if speed else ""


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  args = cli.options(
    __doc__,
    "2 hosts, small arrays, 1 repeat",
    "folder of parallel_links.json and .md",
    rates=cli.Option(["1gbit", "100mbit"], ["1gbit"], "in tc's words"),
    hosts=cli.Option(4, 2),
    repeats=cli.Option(5, 1, "at most 2 below 500 Mbit/s"),
    limit=cli.Option(900.0, help="seconds until workers have failed"),
    loopback=cli.Option(False, help="links that nothing limits"),
  )
  sizes = QUICK if args.quick else Sizes()
  if args.loopback:
    args.rates = ["loopback"]
  launch.begin(args.rates != ["loopback"], "--loopback does without", args.quick)
  results: dict[str, Any] = {"machine": launch.machine(), "runs": []}
  for rate in args.rates:
    results["runs"].append(measure(rate, sizes, args))
    print(markdown(results | {"runs": results["runs"][-1:]}))
  cli.write(args.output, "parallel_links", results, markdown(results))


if __name__ == "__main__":
  main()
