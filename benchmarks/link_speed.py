"""Times a whole gradient exchange between hosts on links of a known rate.

  python benchmarks/link_speed.py    the default cells; results/link_speed.{json,md,png}
  python benchmarks/link_speed.py --rates 1gbit --hosts 4 --leaves 1 --codecs qsgd-4
  python benchmarks/link_speed.py --quick [--loopback]

Hosts are network namespaces on rate-limited links (links.py), which need Linux, root,
ip and tc. At the rate "loopback", they are plain processes on a link that nothing
limits. A cell is a rate, a number of hosts and a gradient. In each cell every host runs
one JAX process (link_worker.py), which times in turn the plain f32 mean and every codec
with every exchange. Then every host runs one PyTorch process (torch_worker.py), which
times DistributedDataParallel over gloo with f32, its fp16 hook and its PowerSGD hook on
the same links, if there is a PyTorch: see --torch. A time covers the way from the
gradient to its mean: encode, exchange, decode. One two_shot is also timed part by part,
and so are the exponents that APS agrees on. The time of a step is the slowest host's.

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
a core each. The links have no delay, which favours exchanges of many small messages.
They are all alike, and hierarchical is for links that differ. The MALLOC_ settings are
the same for all, and keep the pages that XLA would otherwise fault in anew each step.
PyTorch has the threads that torchrun would give it, or more: cores by hosts.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import link_codecs
import link_options
import link_picture
import link_results
import link_start
import link_tables
import links
import numpy as np
import quiet
import running
from link_options import Cell

_HERE = pathlib.Path(__file__).parent
_DDP = ("ddp f32", "ddp fp16", "ddp powersgd-1", "ddp powersgd-2", "ddp powersgd-4")
_HANGS = "ddp powersgd-1 in buckets"


def measure(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
  """Measures a cell: what the links carry, our steps, and PyTorch's."""
  speed = None if cell.rate == "loopback" else links.bits_per_second(cell.rate)
  repeats = options.repeats or (2 if speed and speed < 5e8 else 5)
  shapes = link_options.shapes_of(cell.leaves, options.mib)
  size = sum(map(np.prod, shapes)) * 4 / 2**20
  names = link_codecs.chosen(options.codecs, cell.brief, len(shapes) == 1)
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
  with link_start.network(cell.hosts, cell.rate) as hosts:
    if options.probe:
      run["probe"] = link_start.probed(hosts, speed)
      if speed and 8 * min(run["probe"]) < link_start.REACHED * speed:
        return run
    job = {"shapes": shapes, "steps": names, "repeats": repeats}
    if not options.only_ddp:
      _add(run, hosts, sys.executable, "link_worker.py", job, options.limit)
    if options.torch:
      for steps in [_DDP, *[(_DDP[0], _HANGS)] * cell.hangs]:
        theirs = job | {"steps": steps, "hang_seconds": options.hang_seconds}
        try:
          _add(run, hosts, options.torch, "torch_worker.py", theirs, options.limit)
        except RuntimeError as error:  # ours are measured, and worth keeping
          print(f"PyTorch's workers have failed: {error}")
          missing = [name for name in steps if name not in run["steps"]]
          run["failed"] |= dict.fromkeys(missing, "ended with an error")
  return run


def _add(
  run: dict[str, Any],
  hosts: list[links.Host],
  python: str,
  script: str,
  job: dict[str, Any],
  limit: float,
) -> None:
  """Runs workers, and puts what they measured into the run."""
  threads = max(1, (os.cpu_count() or 1) // len(hosts))
  environment = link_start.ENVIRONMENT
  if script == "torch_worker.py":
    interface = {"GLOO_SOCKET_IFNAME": hosts[0].interface}
    environment = link_start.MALLOC | interface | {"OMP_NUM_THREADS": str(threads)}
  load, start = link_results.load_note(), time.monotonic()
  reports = link_start.run_workers(
    hosts, script, job, limit, python=python, environment=environment
  )
  for kind in ("steps", "parts"):
    if kind in reports[0]:
      found = link_results.combine(reports, kind, shared=hosts[0].interface == "lo")
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
  options = link_options.parse(__doc__)
  if options.output is None and not options.quick:
    options.output = _HERE / "results"
  if options.draw:
    path = options.output / "link_speed.json"
    return _write(json.loads(path.read_text()), options.output)
  shaped = any(cell.rate != "loopback" for cell in link_options.cells(options))
  if shaped and (missing := links.missing()):
    running.skip(f"limited links need {missing}; --loopback does without")
  link_start.leave_by_signals()
  quiet.keep(unless=options.quick)
  if options.torch and not _has_torch(options.torch):
    print(
      f"no PyTorch in {options.torch}: DDP is left out (--torch, or the extra torch)"
    )
    options.torch = ""
  here = link_start.machine()
  print(json.dumps(here))
  results: dict[str, Any] = {"machine": here, "runs": []}
  if options.output:
    options.output.mkdir(parents=True, exist_ok=True)
    if not options.fresh:
      results = link_results.read(options.output / "link_speed.json", here)
  differ = []
  for cell in link_options.cells(options):
    start = time.monotonic()
    run = measure(cell, options)
    link_tables.show(run)
    print(f"{' '.join(map(str, cell[:3]))}: {time.monotonic() - start:.0f} s")
    differ += [name for name, step in run["steps"].items() if not step["same_bits"]]
    results["runs"] = link_results.merge(results["runs"], run)
    if options.output:
      _write(results, options.output)
  if differ:
    sys.exit(f"The hosts of a step did not get the same bits: {', '.join(differ)}.")


def _write(results: dict[str, Any], folder: pathlib.Path) -> None:
  runs = results["runs"]
  (folder / "link_speed.json").write_text(json.dumps(results, indent=1))
  (folder / "link_speed.md").write_text(link_tables.markdown(runs))
  full = [run for run in runs if run["rate"] == "1gbit" and run["steps"]]
  link_picture.bars(full or runs, folder / "link_speed.png")
  link_picture.rates(runs, folder / "link_rates.png")


if __name__ == "__main__":
  main()
