"""Times steps of layers in a loop, with the exchange behind it and inside.

  python -m benchmarks.links.layers [--rates 1gbit 100mbit] [--hosts 4] [--repeats 7]
    [--output FOLDER] [--quick] [--loopback]

Hosts are network namespaces on links of a known rate, as in links/speed.py, whose page
says what biases the times. Each runs one process (links/layers_worker.py). A time is
the slowest host's from the batch to the means, and of several calls, taken in turn, the
median.

One call of each step is traced. So the record has the seconds in which a host's
collectives were under way, and in how many of them its threads computed.
"""

import argparse
import sys
from typing import Any

from benchmarks.common import cli
from benchmarks.common.tables import table
from benchmarks.links import hosts as links_hosts
from benchmarks.links import launch
from benchmarks.links import results as links_results

ALONE = "no exchange"
_SIZES = ("layers", "width", "batch", "repeats")


def measure(rate: str, args: argparse.Namespace) -> dict[str, Any]:
  """Measures all steps on links of one rate."""
  speed = links_hosts.bits_per_second(rate)
  run: dict[str, Any] = {"rate": rate, "hosts": args.hosts, "steps": {}}
  run |= {name: getattr(args, name) for name in _SIZES}
  run["load_and_cores"] = links_results.load_note()
  with launch.network(args.hosts, rate) as hosts:
    run["probe"], reached = launch.probed(hosts, speed)
    if not reached:
      return run
    job = {name: run[name] for name in _SIZES}
    reports = launch.run_workers(hosts, "layers_worker", job, args.limit)
    shared = hosts[0].interface == "lo"
  run["steps"] = links_results.combine(reports, "steps", shared=shared)
  run["traces"] = reports[0]["traces"]
  return run


def markdown(results: dict[str, Any]) -> str:
  """Writes the tables of all runs."""
  paragraphs = [
    "# Layers in a loop over limited links",
    "Medians in milliseconds, from the batch to the means. `python -m "
    "benchmarks.links.layers` writes this file, and says what is measured. *Exchange*: "
    "what is left of a step without the same without an exchange. *Under way*: the "
    "collectives of one call, traced on a host; *and computing*: for how long of that "
    "any of its threads computed. *Exposed*: the share of the bytes, by "
    "`gradcomp.overlap_report`. "
    f"JAX {results['machine']['jax']}.",
  ]
  for run in results["runs"]:
    load, cores = run["load_and_cores"]
    paragraphs += [
      f"## {run['hosts']} hosts, {run['rate']}",
      f"{run['layers']} dense layers of {run['width']}, {run['batch']} rows a host; "
      f"{run['repeats']} calls. Raw TCP carries {8e-6 * min(run['probe']):,.0f} Mbit/s "
      f"or more. The load of the machine's {cores:.0f} cores was {load:.1f} before.",
      _table(run) if run["steps"] else "This machine does not reach the rate.",
    ]
  return "\n\n".join(paragraphs) + "\n"


def _table(run: dict[str, Any]) -> str:
  alone = run["steps"][ALONE]["median_seconds"]
  lines = []
  for name, step in run["steps"].items():
    own = step["median_seconds"]
    if name == ALONE:
      lines.append([name, f"{1e3 * own:.0f}", *[""] * 6])
      continue
    trace = run["traces"][name]
    numbers = [own, own - alone, trace["collectives"], trace["both"]]
    milliseconds = [f"{1e3 * x:.0f}" for x in numbers]
    sent = f"{step['bytes_sent'] / 1e6:.2f}"
    exposed = f"{trace['exposed_share']:.0%}"
    messages = f"{trace['messages']:.0f}"
    lines.append([name, *milliseconds[:2], sent, messages, *milliseconds[2:], exposed])
  header = "step,ms,exchange,MB sent,collectives,under way,and computing,exposed"
  return table(header.split(","), lines)


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  args = cli.options(
    __doc__,
    "2 hosts, small layers, 1 repeat",
    "folder of layers_links.json and .md",
    rates=cli.Option(["1gbit", "100mbit"], ["1gbit"], "in tc's words"),
    hosts=cli.Option(4, 2),
    repeats=cli.Option(7, 1),
    layers=cli.Option(8, 3),
    width=cli.Option(1024, 64),
    batch=cli.Option(128, 8, "rows of each host"),
    limit=cli.Option(300.0, help="seconds until workers have failed"),
    loopback=cli.Option(False, help="links that nothing limits"),
  )
  if args.loopback:
    args.rates = ["loopback"]
  launch.begin(args.rates != ["loopback"], "--loopback does without", args.quick)
  results: dict[str, Any] = {"machine": launch.machine(), "runs": []}
  for rate in args.rates:
    results["runs"].append(measure(rate, args))
    cli.write(args.output, "layers_links", results, markdown(results))
  print(markdown(results))


if __name__ == "__main__":
  main()
