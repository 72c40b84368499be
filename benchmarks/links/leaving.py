"""Kills a host in the midst of a training with local steps, and lets it come again.

  python -m benchmarks.links.leaving [--rate 100mbit] [--round-trip 50] [--hosts 3]
    [--every 30] [--steps 3000] [--leave ROUNDS ...] [--output FOLDER]
    [--quick]

Hosts are network namespaces on links of a known rate and round trip, as links/hosts.py
makes them. On each, examples/elastic.py trains a small net by SparseLoCo: rounds of
steps alone, and then an exchange by BlockTop. A first training is left in peace. In
each of the others, host 1 and its worker are killed by SIGKILL in the middle of a
round. The others train on, and after some rounds host 1 is started again.

A pause after each step stands for the time that a larger net would take. What hosts
save, and the files by which they know of each other, lie in one folder of this machine,
so the links carry what JAX and the exchanges send, and no checkpoints. The kernel
closes the connections of a process that is killed. Hosts that vanish without that are
noticed by their silence, after --patience.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import cli
from benchmarks.common.tables import table
from benchmarks.links import hosts as links_hosts
from benchmarks.links import launch
from benchmarks.links import results as links_results
from benchmarks.links.elastic import MOMENTS, started
from examples import elastic
from examples.lib.elastic import training as elastic_training

LEAVES = 1  # the first host is JAX's coordinator, without which all others end
BATCHES = 10  # that nobody trained on, for the loss in the end
EVENTS = {"left": "it left", "returned": "it came again"}


def measure(args: argparse.Namespace, rounds: int) -> dict[str, Any]:
  """Trains once, and returns the seconds, the loss and what happened.

  A host leaves after some rounds, or none at 0.
  """
  events = {}
  with started(args) as hosts:
    begin = hosts.trained(0, args.every)
    if rounds:
      hosts.trained(0, args.every * rounds)
      time.sleep(args.pause * args.every / 2)
      hosts.kill(LEAVES)
      events["left"] = hosts.follow(1, time.time())
      step = elastic.plan_of(hosts.folder, 1).step
      hosts.trained(1, step + args.every * args.away)
      hosts.start(LEAVES)
      events["returned"] = hosts.follow(2, time.time())
    end = hosts.trained(0, args.steps)
    hosts.ended()
    ends = [_params(hosts.folder, x) for x in range(args.hosts)]
    first = hosts.network[0]
    counter = links_hosts.COUNTER.format(first.interface)
    sent = int(subprocess.check_output([*first.prefix, "cat", counter]))
    checked = re.findall("the parameters are equal on all . workers", hosts.said())
  same = all(x[name].tobytes() == ends[0][name].tobytes() for x in ends for name in x)
  fresh = [elastic_training.read_batch(args.steps + i) for i in range(BATCHES)]
  losses = [float(elastic_training.loss_fn(ends[0], batch)) for batch in fresh]
  return {
    "seconds": end - begin,
    "loss": statistics.fmean(losses),
    "same_bits": same,
    "checked": checked,
    "bytes_sent": sent,
    "load_and_cores": links_results.load_note(),
    **events,
  }


def _params(folder: Path, host: int) -> dict[str, np.ndarray]:
  """Returns the parameters that a host has saved last."""
  generation, step = max(elastic.all_parts(folder))
  names = sorted(elastic_training.first_params())  # the order of leaves
  with np.load(elastic.parts_path(folder, generation, step, host)) as part:
    return {name: part[f"arr_{i}"] for i, name in enumerate(names)}


def markdown(results: dict[str, Any]) -> str:
  """Writes the tables, and what they were measured with."""
  settings, runs, probes = (results[x] for x in ("settings", "runs", "probes"))
  rounds = settings["steps"] // settings["every"]
  names = ["in peace", *(f"killed after {x} rounds" for x in settings["leave"])]
  ends, times, said = [], [], []
  for name, run in zip(names, runs, strict=False):
    equal = "yes" if run["same_bits"] and run["checked"] else "NO"
    numbers = f"{run['seconds']:.1f}", f"{run['loss']:.6f}", equal
    ends.append([name, *numbers, f"{run['bytes_sent'] / 1e3:,.0f}"])
    for event, words in EVENTS.items():
      if not (found := run.get(event)):
        continue
      times.append([name, words, *(f"{found[moment]:.1f}" for moment in MOMENTS)])
      said.append(f"* {name}, {words}: went on after {found['said']}")
  rate = min(8e-6 * x["bytes_a_second"] for x in probes)
  return "\n\n".join(
    [
      "# A host that leaves local steps on slow links, and comes again",
      "`python -m benchmarks.links.leaving` writes this file. "
      f"{settings['hosts']} hosts, {settings['rate']} and {settings['round_trip']:g} "
      f"ms there and back; raw TCP finds {rate:.0f} Mbit/s or more and "
      f"{1e3 * probes[0]['round_trip']:.1f} ms. SparseLoCo with BlockTop, "
      f"{settings['steps']} steps in {rounds} rounds of {settings['every']}, "
      f"{1e3 * settings['pause']:g} ms of pause after each step. In peace a round "
      f"takes {runs[0]['seconds'] / (rounds - 1):.2f} s. Host {LEAVES} is killed "
      f"in the middle of a round, and started again when the others have trained "
      f"{settings['away']} rounds more. A host without a sign of life for "
      f"{settings['patience']:g} s is taken for dead.",
      table(["run", "s", "loss in the end", "same bits", "kB sent"], ends),
      "*s*: from the end of the first round to that of the last. *Loss*: the mean over "
      f"{BATCHES} batches that nobody trained on. *Same bits*: of the parameters that "
      "all hosts saved in the end, and of their fingerprints. *kB sent* by the first "
      "host, counted by its interface, in all. Seconds from the kill, or from the "
      "start of the host that comes again, until:",
      table(["run", "", "others saved", "a plan", "all met", "a round done"], times),
      "What the hosts said:\n\n" + "\n".join(said),
      f"The load of the machine's {os.cpu_count()} cores was at most "
      f"{max(x['load_and_cores'][0] for x in runs):.1f}.\n",
    ]
  )


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  args = cli.options(
    __doc__,
    "2 hosts, short rounds, and one that leaves",
    "folder of local_leaving.json and .md",
    rate=cli.Option("100mbit", help="of each link, in tc's words"),
    round_trip=cli.Option(50.0, 10.0, "milliseconds"),
    hosts=cli.Option(3, 2),
    every=cli.Option(30, 5, "steps in a round"),
    steps=cli.Option(3000, 60, "in all"),
    pause=cli.Option(0.02, help="seconds after a step"),
    patience=cli.Option(5.0, 2.0, "seconds of silence"),
    leave=cli.Option([20, 40, 60], [3], "rounds before a host leaves"),
    away=cli.Option(20, 2, "rounds without the host"),
    limit=cli.Option(300.0, help="seconds to wait for anything"),
  )
  launch.begin(True, quick=args.quick)
  names = "rate round_trip hosts every steps pause patience leave away".split()
  with launch.network(args.hosts, args.rate, args.round_trip / 1e3) as hosts:
    probes = launch.probes(hosts, 1_000_000 if args.quick else 25_000_000)
  results: dict[str, Any] = {
    "machine": launch.machine(),
    "settings": {name: getattr(args, name) for name in names},
    "probes": probes,
    "runs": [],
  }
  for rounds in (0, *args.leave):
    results["runs"].append(measure(args, rounds))
    print(results["runs"][-1])
    cli.write(args.output, "local_leaving", results, markdown(results))
  print(markdown(results))


if __name__ == "__main__":
  main()
