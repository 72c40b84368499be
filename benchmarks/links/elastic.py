"""Runs examples/elastic.py on hosts, ends it on one of them, and follows the others."""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.links import hosts as links_hosts
from benchmarks.links import launch
from examples import elastic

_TICK = 0.01  # seconds between two looks at the folder
MOMENTS = "saved planned met trained".split()


class Hosts:
  """Holds the supervisors of a training, one for each host.

  Args:
    hosts: where they run.
    folder: that all of them share.
    args: ``every``, ``steps``, ``pause`` and ``patience`` are those of elastic.py, and
      after ``limit`` seconds nothing is waited for any longer.
  """

  def __init__(
    self, hosts: list[links_hosts.Host], folder: Path, args: argparse.Namespace
  ):
    self.network, self.folder, self._args = hosts, folder, args
    self._running: dict[int, subprocess.Popen[bytes]] = {}

  def start(self, number: int) -> None:
    args, host = self._args, self.network[number]
    options = f"{self.folder} {number} --hosts {len(self.network)} --codec blocktop"
    options += f" --address {host.address} --patience {args.patience}"
    options += f" --local-steps {args.every} --save-every {args.every}"
    options += f" --steps {args.steps} --pause {args.pause}"
    program = [sys.executable, "-W", "ignore", "-m", elastic.__name__, *options.split()]
    with open(self._log(number), "a") as log:
      self._running[number] = subprocess.Popen(
        [*host.prefix, *program],
        env=os.environ | launch.ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for us
      )

  def kill(self, number: int) -> None:
    """Kills the supervisor and its worker at once."""
    process = self._running.pop(number, None)
    if process is None:
      return
    with contextlib.suppress(ProcessLookupError):  # it may have ended
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()

  def wait_for(self, what: str, found: Callable[[], bool]) -> float:
    """Returns the time at which it was found.

    Raises:
      RuntimeError: a supervisor has failed, or it took too long.
    """
    deadline = time.monotonic() + self._args.limit
    while not found():
      failed = any(process.poll() for process in self._running.values())
      if failed or time.monotonic() > deadline:
        logs = [self._log(x).read_text()[-3000:] for x in range(len(self.network))]
        raise RuntimeError("\n---\n".join([f"There was no {what}.", *logs]))
      time.sleep(_TICK)
    return time.time()

  def trained(self, generation: int, step: int = 0) -> float:
    """Waits until this generation or a later one has saved this step or a later one."""

    def reached() -> bool:
      parts = elastic.all_parts(self.folder)
      return any(x >= generation and y >= step for x, y in parts)

    return self.wait_for(f"step {step} of generation {generation}", reached)

  def ended(self) -> None:
    """Waits until all supervisors have ended well."""
    left = self._running.values()
    self.wait_for("end", lambda: all(process.poll() == 0 for process in left))

  def follow(self, generation: int, since: float) -> dict[str, Any]:
    """Follows how a generation takes over, in seconds since its cause.

    Returns:
      When the others had saved what they had, when there was a plan, when its hosts had
      met, when they had saved the first round; and their words of what was lost.
    """
    files = self.folder
    planned = self.wait_for("plan", (files / f"plan-{generation}.json").exists)
    before, step = elastic.plan_of(files, generation).source or (0, 0)
    saved = [x.stat().st_mtime for x in files.glob(f"parts-{before}-{step}-*.npz")]
    met = self.wait_for("meeting", (files / f"record-{generation}.json").exists)
    times = [max(saved), planned, met, self.trained(generation)]
    seconds = {x: y - since for x, y in zip(MOMENTS, times, strict=True)}
    pattern = f"(?m)^generation {generation}: hosts .* go on after (.*)$"
    return seconds | {"said": re.findall(pattern, self.said())[0]}

  def said(self) -> str:
    """Returns what the first host has printed."""
    return self._log(0).read_text()

  def _log(self, number: int) -> Path:
    return self.folder / f"log-{number}"


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[Hosts]:
  """Starts all hosts on links of their own, and leaves none running."""
  with (
    launch.network(args.hosts, args.rate, args.round_trip / 1e3) as network,
    tempfile.TemporaryDirectory() as folder,
    contextlib.ExitStack() as stack,
  ):
    hosts = Hosts(network, Path(folder), args)
    for number in range(args.hosts):
      hosts.start(number)
      stack.callback(hosts.kill, number)
    yield hosts
