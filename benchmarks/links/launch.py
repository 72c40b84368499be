"""Starts a worker on each host, with the same environment for all that is compared."""

import json
import os
import pathlib
import platform
import signal
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from benchmarks.common import cli, quiet
from benchmarks.links import hosts as links_hosts

_REACHED = 0.7  # of the rate, or it is not measured
MALLOC = {
  "MALLOC_ARENA_MAX": "1",
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": "17179869184",
  "MALLOC_TOP_PAD_": "268435456",
}
ENVIRONMENT = MALLOC | {
  "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=120",
  # Only the first process would find its programs there, and come too early.
  "JAX_ENABLE_COMPILATION_CACHE": "false",
}


def run_workers(
  hosts: list[links_hosts.Host],
  script: str,
  job: Mapping[str, Any],
  limit: float,
  *,
  python: str = sys.executable,
  environment: Mapping[str, str] = ENVIRONMENT,
) -> list[Any]:
  """Runs a case or a worker of this folder on each host, and returns the reports."""
  own = script in ("hosts", "torch_worker")
  module = f"benchmarks.links.{script if own else 'process'}"
  ports = links_hosts.free_ports(len(hosts) + 1)
  ends = [(host.address, port) for host, port in zip(hosts, ports, strict=False)]
  meeting = f"{hosts[0].address}:{ports[-1]}"
  job = {**job, "case": script, "ends": ends, "coordinator": meeting}
  with tempfile.TemporaryDirectory() as folder:
    outputs = [pathlib.Path(folder, f"{rank}.json") for rank in range(len(hosts))]
    commands = []
    for rank, (host, output) in enumerate(zip(hosts, outputs, strict=True)):
      given = {"rank": rank, "interface": host.interface, "output": str(output)}
      commands.append([python, "-m", module, json.dumps(job | given)])
    links_hosts.run(hosts, commands, cli.path() | environment, limit)
    return [json.loads(output.read_text()) for output in outputs]


def probed(
  hosts: list[links_hosts.Host], speed: float | None, seconds: float = 0.5
) -> tuple[list[float], float, bool]:
  """Sends raw TCP for so long over links of that speed, in bits a second.

  Returns the bytes a second that each host receives, the seconds to another host and
  back, and whether links of their rate may be measured.
  """
  job = {"nbytes": int((speed or 8e9) / 8 * seconds)}
  reports = run_workers(hosts, "hosts", job, 120, environment={})
  found = [report["bytes_a_second"] for report in reports]
  reached = not speed or 8 * min(found) >= _REACHED * speed
  return found, reports[0]["round_trip"], reached


def machine() -> dict[str, Any]:
  """Describes the machine, on which the times depend."""
  cpu = pathlib.Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2]
  return {
    "jax": metadata.version("jax"),
    "cpu": cpu.splitlines()[0] if cpu else platform.machine(),
    "cores": os.cpu_count(),
    "kernel": platform.release(),
    "malloc": MALLOC,
  }


def begin(shaped: bool, otherwise: str = "", quick: bool = False) -> None:
  """Prepares a script that starts hosts, or ends it where links cannot be limited."""
  if shaped and (missing := links_hosts.missing()):
    cli.skip(f"limited links need {missing}{otherwise and f'; {otherwise}'}")
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, _leave)
  quiet.keep(unless=quick)


def _leave(number: int, frame: Any) -> None:
  """Ends the program once; a second signal does not cut its clean-up."""
  for other in (signal.SIGINT, signal.SIGTERM):
    signal.signal(other, signal.SIG_IGN)
  sys.exit(128 + number)
