"""Times a whole gradient exchange between hosts on links of a known rate.

  python -m benchmarks.links.speed    the default cells; results/links/link_speed.*
  python -m benchmarks.links.speed --rates 1gbit --hosts 4 --leaves 1 --codecs qsgd-4
  python -m benchmarks.links.speed --quick [--loopback]

Hosts are network namespaces on rate-limited links (links/hosts.py), which need Linux,
root, ip and tc. At the rate "loopback", they are plain processes on a link that nothing
limits. A cell is a rate, a number of hosts and a gradient. In each cell every host runs
one JAX process (links/worker.py), which times in turn the plain f32 mean and every
codec with every exchange. Then every host runs one PyTorch process
(links/torch_worker.py), which times DistributedDataParallel over gloo with f32, its
fp16 hook and its PowerSGD hook on the same links, if there is a PyTorch: see --torch. A
time covers the way from the gradient to its mean: encode, exchange, decode. One
two_shot is also timed part by part, and so are the exponents that APS agrees on. The
time of a step is the slowest host's.

What is measured joins the file of results, so that a run can be cut into pieces: a step
replaces the one of its name in its cell. All codecs run at 1gbit with one leaf, and by
default a choice of them elsewhere. ResNet-50's leaves come with 2 hosts at 1gbit only,
unless told: most of that time goes to compiling, once a host.

The table also has bytes from the kernel's counters, as multiples of the arithmetic and
of gradcomp.wire_report, the CPU time, the error, and whether all hosts got the same
bits. The probe sends raw TCP from each host to the next, all at once, and shows what
the links carry; a rate of which it reaches less than 0.7 is not measured. Read two
lines first: the probe, and how far plain f32 is from its wire bound. Where it is far,
something other than the link takes the time, and compression looks better than it is.

Three things bias the times. The hosts share this machine's cores: with 4 hosts on 2
cores, each codec runs on half a core, and speed-ups come out lower than for hosts with
a core each. The links have no delay, which favors exchanges of many small messages.
They are all alike, and hierarchical is for links that differ. The MALLOC_ settings are
the same for all, and keep the pages that XLA would otherwise fault in anew each step.
PyTorch has the threads that torchrun would give it, or more: cores by hosts.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.common import cli
from benchmarks.links import cells, launch, methods, tables
from benchmarks.links import hosts as links_hosts
from benchmarks.links import results as links_results
from benchmarks.links.cells import Cell

_DDP = ("ddp f32", "ddp fp16", "ddp powersgd-1", "ddp powersgd-2", "ddp powersgd-4")
_HANGS = "ddp powersgd-1 in buckets"


def measure(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
  """Measures a cell: what the links carry, our steps, and PyTorch's."""
  speed = links_hosts.bits_per_second(cell.rate)
  repeats = options.repeats or (2 if speed and speed < 5e8 else 5)
  shapes = cells.shapes_of(cell.leaves, options.mib)
  size = sum(map(np.prod, shapes)) * 4 / 2**20
  names = methods.chosen(options.codecs, cell.brief, len(shapes) == 1)
  run: dict[str, Any] = {
    "hosts": cell.hosts,
    "rate": cell.rate,
    "bits_per_second": speed,
    "mib": options.mib if len(set(shapes)) == 1 else round(size, 1),
    "leaves": cell.leaves,
    "repeats": repeats,
    "probe": [],
    "steps": {},
    "parts": {},
    "failed": {},
  }
  with launch.network(cell.hosts, cell.rate) as hosts:
    if options.probe:
      run["probe"], reached = launch.probed(hosts, speed)
      if not reached:
        return run
    job = {"shapes": shapes, "steps": names, "repeats": repeats}
    if not options.only_ddp:
      _add(run, hosts, sys.executable, "worker", job, options.limit)
    if options.torch:
      for steps in [_DDP, *[(_DDP[0], _HANGS)] * cell.hangs]:
        theirs = job | {"steps": steps, "hang_seconds": options.hang_seconds}
        try:
          _add(run, hosts, options.torch, "torch_worker", theirs, options.limit)
        except RuntimeError as error:  # ours are measured, and worth keeping
          print(f"PyTorch's workers have failed: {error}")
          missing = [name for name in steps if name not in run["steps"]]
          run["failed"] |= dict.fromkeys(missing, "ended with an error")
  return run


def _add(
  run: dict[str, Any],
  hosts: list[links_hosts.Host],
  python: str,
  script: str,
  job: dict[str, Any],
  limit: float,
) -> None:
  """Runs workers, and puts what they measured into the run."""
  threads = max(1, (os.cpu_count() or 1) // len(hosts))
  environment = launch.ENVIRONMENT
  if script == "torch_worker":
    interface = {"GLOO_SOCKET_IFNAME": hosts[0].interface}
    environment = launch.MALLOC | interface | {"OMP_NUM_THREADS": str(threads)}
  load, start = links_results.load_note(), time.monotonic()
  reports = launch.run_workers(
    hosts, script, job, limit, python=python, environment=environment
  )
  for kind in ("steps", "parts"):
    if kind in reports[0]:
      found = links_results.combine(reports, kind, shared=hosts[0].interface == "lo")
      for entry in found.values():
        entry["load_and_cores"] = load
      run[kind] |= found
  run["failed"] |= reports[0].get("failed", {})
  print(f"{script}: {time.monotonic() - start:.0f} s")
  if compiling := reports[0].get("compiling"):
    longest = sorted(compiling, key=lambda name: -compiling[name])[:3]
    named = ", ".join(f"{name} {compiling[name]:.0f}" for name in longest)
    print(f"  compiling took {sum(compiling.values()):.0f} s, longest: {named}")


def _has_torch(python: str) -> bool:
  return not subprocess.run(
    [python, "-c", "import torch"], capture_output=True
  ).returncode


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  options = cells.parse(__doc__)
  if options.output is None and not options.quick:
    options.output = cli.RESULTS / "links"
  if options.draw:
    known = json.loads((options.output / "link_speed.json").read_text())
    return cli.write(
      options.output, "link_speed", known, tables.markdown(known["runs"])
    )
  shaped = any(cell.rate != "loopback" for cell in cells.cells(options))
  launch.begin(shaped, "--loopback does without", options.quick)
  if options.torch and not _has_torch(options.torch):
    print(
      f"no PyTorch in {options.torch}: DDP is left out (--torch, or the group torch)"
    )
    options.torch = ""
  here = launch.machine()
  print(json.dumps(here))
  results: dict[str, Any] = {"machine": here, "runs": []}
  if options.output and not options.fresh:
    results = links_results.read(options.output / "link_speed.json", here)
  differ = []
  for cell in cells.cells(options):
    start = time.monotonic()
    run = measure(cell, options)
    tables.show(run)
    print(f"{' '.join(map(str, cell[:3]))}: {time.monotonic() - start:.0f} s")
    differ += [name for name, step in run["steps"].items() if not step["same_bits"]]
    results["runs"] = links_results.merge(results["runs"], run)
    page = tables.markdown(results["runs"])
    cli.write(options.output, "link_speed", results, page)
  if differ:
    sys.exit(f"The hosts of a step did not get the same bits: {', '.join(differ)}.")


if __name__ == "__main__":
  main()
