"""Trains over slow links with local steps, and with an exchange in every step.

  python -m benchmarks.links.local [--rate 100mbit] [--round-trip 50] [--hosts 4]
    [--methods 'f32 psum' ...] [--output FOLDER] [--quick]

Hosts are network namespaces on links of a known rate and round trip, as links/hosts.py
makes them. Each runs one process (links/local_worker.py), which trains the transformer
of the examples by AdamW on its own part of the batches.

A method's tokens a second are those of all hosts, by the time of the slowest. They do
not meet in that time, so a host that is late costs time, as it does in a training. The
share of communication is measured apart: hosts meet before a step without an exchange
and before the one with it, and the difference, of the slowest host and the median of
the rounds, is divided by the time of a round. Of methods that exchange in every step,
the step without is that of the local steps.

What biases the times: all hosts share this machine's cores, so a step takes longer than
on a host of its own, and the exchange weighs less against it. A batch of few tokens
makes up for that: accelerators take a step of the same parameters sooner still. gloo
waits for each message of its psum, so on links that take time it is not the fastest way
to add float32: two_shot is, and it is what the others are compared with.

With --output, there is a file for each number of hosts. Methods that were measured
there with the same settings are kept.
"""

import argparse
import json
import statistics
import sys
from typing import Any

from benchmarks.common import cli
from benchmarks.common.tables import table
from benchmarks.links import launch
from benchmarks.links import results as links_results

BASELINE = "f32 two_shot"
# Whether a method takes steps alone.
METHODS = {
  "f32 psum": False,
  BASELINE: False,
  "QSGD-4 two_shot": False,
  "DiLoCo two_shot": True,
  "SparseLoCo all_gather": True,
  "SparseLoCo two_shot": True,
}


def measure(method: str, args: argparse.Namespace) -> dict[str, Any]:
  """Measures a method on links of its own."""
  alone = METHODS[method]
  count = args.every * args.rounds if alone else args.steps
  job = {
    "method": method,
    "width": args.width,
    "layers": args.layers,
    "length": args.length,
    "batch": args.batch,
    "every": args.every,
    "first": args.every if alone else 1,
    "steps": count,
    "exchanged_every": args.every if alone else count + 1,  # nothing to be met for
  }
  with launch.network(args.hosts, args.rate, args.round_trip / 1e3) as hosts:
    probes = launch.probes(hosts, args.probe)
    reports = launch.run_workers(hosts, "local_worker", job, args.limit)
  slowest = max(report["seconds"] for report in reports)
  result = {
    "parameters": reports[0]["parameters"],
    "tokens_a_second": args.hosts * args.batch * args.length * count / slowest,
    "step_seconds": slowest / count,
    "bytes_a_round": reports[0]["wire_report"] * (1 if alone else args.every),
    "counted_a_round": max(x["sent"] for x in reports) * args.every / count,
    "mbit_a_second": min(8e-6 * probe["bytes_a_second"] for probe in probes),
    "round_trip_ms": 1e3 * probes[0]["round_trip"],
    "load_and_cores": links_results.load_note(),
  }
  if alone:
    both = [
      [max(x[kind][i] for x in reports) for i in range(args.rounds)]
      for kind in ("alone", "together")
    ]
    result |= {"alone_seconds": both[0], "together_seconds": both[1]}
  return result


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
  """Writes the table, and what it was measured with."""
  settings, found = results["settings"], results["methods"]
  share = shares(found, settings["every"])
  base = found.get(BASELINE)
  lines = []
  for method, x in found.items():
    faster = fewer = ""
    if base:
      faster = f"{x['tokens_a_second'] / base['tokens_a_second']:.1f}"
      fewer = f"{base['bytes_a_round'] / x['bytes_a_round']:,.0f}"
    lines.append(
      [
        method,
        f"{x['tokens_a_second']:,.0f}",
        faster,
        f"{1e3 * x['step_seconds']:,.0f}",
        f"{share[method]:.1%}" if method in share else "",
        f"{x['bytes_a_round'] / 1e6:,.3f}",
        f"{x['counted_a_round'] / 1e6:,.3f}",
        fewer,
      ]
    )
  header = "method,tokens/s,x f32,ms a step,in communication,MB a round,counted,fewer"
  one = next(iter(found.values()))
  least = min(x["mbit_a_second"] for x in found.values())
  most = max(x["round_trip_ms"] for x in found.values())
  load = max(x["load_and_cores"][0] for x in found.values())
  return "\n\n".join(
    [
      "# Local steps over slow links",
      "`python -m benchmarks.links.local` writes this file. "
      f"{settings['hosts']} hosts, {settings['rate']} and {settings['round_trip']:g} "
      f"ms there and back; raw TCP finds {least:.0f} Mbit/s or more and {most:.1f} ms "
      f"or less. A transformer "
      f"of {one['parameters'] / 1e6:.1f} million parameters, AdamW, "
      f"{settings['batch'] * settings['length']} tokens a host and step; rounds of "
      f"{settings['every']} steps, {settings['rounds']} of them, or "
      f"{settings['steps']} steps of what exchanges in each.",
      table(header.split(","), lines),
      "*x f32* and *fewer* compare tokens a second and bytes with "
      f"{BASELINE}. *In communication*: the share of the time. *MB a round*: what a "
      f"host sends in {settings['every']} steps, from the HLO; *counted* by its "
      "interface, with headers. The load of the machine's "
      f"{one['load_and_cores'][1]:.0f} cores was at most {load:.1f}.",
    ]
  )


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  args = cli.options(
    __doc__,
    "2 hosts, a small network, two methods",
    "folder of local_links_4.json and .md",
    methods=cli.Option([*METHODS], [BASELINE, "SparseLoCo two_shot"], choices=METHODS),
    rate=cli.Option("100mbit", help="of each link, in tc's words"),
    round_trip=cli.Option(50.0, 10.0, "milliseconds"),
    hosts=cli.Option(4, 2),
    every=cli.Option(30, 4, "steps in a round"),
    rounds=cli.Option(3, 1, "that are measured"),
    steps=cli.Option(2, help="of those that exchange in each"),
    width=cli.Option(640, 32, "of the transformer"),
    layers=cli.Option(4, 1),
    length=cli.Option(16, help="tokens in a sequence"),
    batch=cli.Option(1, help="sequences a host and step"),
    probe=cli.Option(25_000_000, 1_000_000, "bytes of raw TCP"),
    limit=cli.Option(500.0, help="seconds until workers have failed"),
  )
  launch.begin(True, quick=args.quick)
  names = "hosts rate round_trip every rounds steps width layers length batch".split()
  results: dict[str, Any] = {
    "machine": launch.machine(),
    "settings": {name: getattr(args, name) for name in names},
    "methods": {},
  }
  file = f"local_links_{args.hosts}"
  if args.output and (path := args.output / f"{file}.json").exists():
    earlier = json.loads(path.read_text())
    if earlier["settings"] == results["settings"]:
      results["methods"] = earlier["methods"]
  for method in args.methods:
    results["methods"][method] = measure(method, args)
    print(method, results["methods"][method])
    cli.write(args.output, file, results, markdown(results))
  print(markdown(results))


if __name__ == "__main__":
  main()
