"""Times a whole gradient exchange: from the gradient to its mean.

A cell is a rate, a number of hosts and a gradient. In each cell every host times in
turn the plain f32 mean and every codec with every exchange, in one process of JAX. One
two_shot is also timed part by part. Then every host runs one PyTorch process
(torch_worker.py), which times DistributedDataParallel over gloo with f32, its fp16 hook
and its PowerSGD hook on the same links, if there is a PyTorch: see --torch. PyTorch has
the threads that torchrun would give it, or more: cores by hosts.

What is measured joins the file of results, so that a run can be cut into pieces: a step
replaces the one of its name in its cell. All codecs run at 1gbit with one leaf, and by
default a choice of them elsewhere. ResNet-50's leaves come with 2 hosts at 1gbit only,
unless they are chosen: most of that time goes to compiling, once a host.

The table also has bytes from the kernel's counters, the CPU time, the error, and
whether all hosts got the same bits. Read two lines first: the probe, and how far plain
f32 is from its wire bound. Where it is far, something other than the link takes the
time, and compression looks better than it is.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.common import cli, shapes
from benchmarks.links import hosts as links_hosts
from benchmarks.links import launch, methods, process, results, steps, tables

FILE = "link_speed"
QUICK = "2 hosts, 1 MiB, 4 codecs, 1 repeat"
OPTIONS = {
  "rates": cli.Option(
    ["100mbit", "1gbit", "5gbit", "10gbit", "loopback"],
    ["1gbit"],
    "of each direction, in tc's words",
    kind=str,
  ),
  "hosts": cli.Option([2, 4], [2]),
  "leaves": cli.Option(["1", "resnet50"], ["1"], "equal leaves, or resnet50"),
  "mib": cli.Option(64, 1, "size of the equal leaves together, in f32"),
  "repeats": cli.Option(5, 1, "2 at most below 500 Mbit/s"),
  "codecs": cli.Option(
    [*methods.STEPS],
    ["qsgd-4", "terngrad", "aps-8", "redsync-1%"],
    "all exchanges of these",
    choices=methods.STEPS,
  ),
  "limit": cli.Option(900.0, help="seconds after which workers have failed"),
  "torch": cli.Option(sys.executable, help="a Python with PyTorch; empty for none"),
}
_DDP = ("ddp f32", "ddp fp16", "ddp powersgd-1", "ddp powersgd-2", "ddp powersgd-4")


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
  """Yields what is measured together: gradients, hosts and rates."""
  for leaves in args.leaves:
    for hosts in args.hosts:
      for rate in args.rates:
        if leaves == "1" or len(args.leaves) == 1 or (rate, hosts) == ("1gbit", 2):
          yield _cell(leaves, hosts, rate, args)


def _cell(
  leaves: str, hosts: int, rate: str, args: argparse.Namespace
) -> dict[str, Any]:
  speed = links_hosts.bits_per_second(rate)
  size = sum(map(np.prod, shapes_of(leaves, args.mib))) * 4 / 2**20
  return {
    "hosts": hosts,
    "rate": rate,
    "bits_per_second": speed,
    "mib": round(size, 1) if leaves == "resnet50" else args.mib,
    "leaves": leaves if leaves == "resnet50" else int(leaves),
    "repeats": min(args.repeats, 2) if speed and speed < 5e8 else args.repeats,
    "steps": {},
    "parts": {},
    "failed": {},
  }


def shapes_of(leaves: int | str, mib: float) -> list[tuple[int, ...]]:
  """Returns the shapes of a gradient's leaves: equal matrices, or ResNet-50's.

  Example:
    >>> shapes_of(2, mib=1)
    [(256, 512), (256, 512)]
  """
  if leaves == "resnet50":
    return shapes.resnet50_shapes()
  size = int(mib * 2**20) // 4 // int(leaves)
  rows = 2 ** (int(np.log2(size)) // 2)  # of a matrix, which low rank needs
  return [(rows, size // rows)] * int(leaves)


def measure(
  hosts: list[links_hosts.Host], cell: dict[str, Any], args: argparse.Namespace
) -> None:
  """Measures our steps in a cell, and PyTorch's."""
  given = shapes_of(cell["leaves"], args.mib)
  brief = (cell["rate"], cell["leaves"]) != ("1gbit", 1)
  names = methods.chosen(list(args.codecs), brief, len(given) == 1)
  job = {"shapes": given, "repeats": cell["repeats"]}
  shared = hosts[0].interface == "lo"
  reports = launch.run_workers(hosts, "speed", job | {"steps": names}, args.limit)
  for kind in ("steps", "parts"):
    cell[kind] = results.combine(reports, kind, shared=shared)
  if args.torch and _has_torch(args.torch):
    threads = max(1, (os.cpu_count() or 1) // len(hosts))
    own = {"GLOO_SOCKET_IFNAME": hosts[0].interface, "OMP_NUM_THREADS": str(threads)}
    for names in (_DDP[1:2], *([name] for name in _DDP[2:])):  # which may hang
      try:
        reports = launch.run_workers(
          hosts,
          "torch_worker",
          job | {"steps": [_DDP[0], *names]},
          args.limit,
          python=args.torch,
          environment=launch.MALLOC | own,
        )
        cell["steps"] |= results.combine(reports, "steps", shared=shared)
      except RuntimeError as error:  # ours are measured, and worth keeping
        print(f"PyTorch's workers have failed: {error}")
        cell["failed"] |= dict.fromkeys(names, "ended with an error")
  load = cell.pop("load_and_cores")
  for entry in (*cell["steps"].values(), *cell["parts"].values()):
    entry["load_and_cores"] = load
  tables.show(cell)
  differ = [name for name, x in cell["steps"].items() if not x["same_bits"]]
  if differ:
    sys.exit(f"The hosts of a step did not get the same bits: {', '.join(differ)}.")


def _has_torch(python: str) -> bool:
  line = [python, "-c", "import torch"]
  return not subprocess.run(line, capture_output=True).returncode


def joined(found: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
  """Returns results with those of a cell."""
  return found | {"runs": results.merge(found["runs"], cell)}


def markdown(found: dict[str, Any]) -> str:
  return tables.markdown(found["runs"])


def report(mesh: jax.sharding.Mesh, options: dict[str, Any]) -> dict[str, Any]:
  """Times exchanges on one host.

  The gradient is donated, and its mean comes back in its place, as in a train step.
  """
  rng = np.random.default_rng(options["rank"])
  given = [tuple(shape) for shape in options["shapes"]]
  grads = [process.spread(mesh, rng.standard_normal(x, np.float32)) for x in given]
  whole = dict(steps.steps(mesh, grads, options["steps"]))
  parts = {}
  if "qsgd-4 two_shot" in whole and len(set(given)) == 1:
    parts = dict(steps.parts(mesh, grads, methods.IN_PARTS))
  found = process.measure(mesh, whole | parts, options)
  return {
    "steps": {name: found[name] for name in whole},
    "parts": {name: found[name] for name in parts},
  }
