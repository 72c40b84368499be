"""Holds the process of one training of the evidence queue. Linux only."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

_LIBC = ctypes.CDLL(None)
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl


class Heartbeat(NamedTuple):
  """Holds what a training last said of itself.

  Attributes:
    step: that is done.
    steps: of the whole training.
    cpu: seconds of CPU time so far, with those of earlier processes.
    estimate: seconds of CPU time of the whole training; None before steps are timed.
  """

  step: int = 0
  steps: int = 0
  cpu: float = 0.0
  estimate: float | None = None


def heartbeat(state: Path) -> Heartbeat:
  """Reads what a training said last in the folder of its state."""
  try:
    return Heartbeat(**json.loads((state / "heartbeat.json").read_text()))
  except (FileNotFoundError, json.JSONDecodeError):
    return Heartbeat()


class Child:
  """A training on one core, at the lowest priority, in a session of its own.

  Where the queue is killed, the system kills the process, also while it is stopped.

  Args:
    command: that trains.
    state: the folder of its state.
    log: the file of what it prints.
    core: that it runs on; XLA then computes with one thread.
  """

  def __init__(self, command: Sequence[str], state: Path, log: Path, core: int):
    state.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    self.core = core
    self._state = state
    self._log = log

    def settle() -> None:
      _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL)
      os.nice(19)
      # Linux divides the time among sessions first, so that nice counts inside of one.
      with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write("19")
      os.sched_setaffinity(0, {core})

    with log.open("wb") as file:
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=settle,
      )
    self._cpu = psutil.Process(self._process.pid).cpu_times
    self._used = 0.0
    self._since = time.monotonic()

  def ended(self) -> int | None:
    """Returns the exit status; None while the process runs."""
    return self._process.poll()

  def heartbeat(self) -> Heartbeat:
    return heartbeat(self._state)

  def cpu(self) -> float:
    """Returns seconds of CPU time, with those of earlier processes it knows of."""
    return max(self._own(), self.heartbeat().cpu)

  def idle(self) -> float:
    """Returns the seconds since a call of this in which the CPU time had grown."""
    now, used = time.monotonic(), self._own()
    if used > self._used:
      self._used, self._since = used, now
    return now - self._since

  def stop(self) -> None:
    """Stops the process until ``go_on``."""
    self._signal(signal.SIGSTOP)

  def go_on(self) -> None:
    self._signal(signal.SIGCONT)
    self._since = time.monotonic()

  def end(self) -> None:
    """Asks the process to end, also one that is stopped."""
    self._signal(signal.SIGTERM)
    self._signal(signal.SIGCONT)

  def kill(self) -> None:
    self._signal(signal.SIGKILL)
    self._process.wait()

  def last_line(self) -> str:
    """Returns the last line that the process printed, as of an error."""
    return self._log.read_text(errors="replace").rstrip().rpartition("\n")[-1]

  def _own(self) -> float:
    """Returns the seconds of this process, in user and system, and of its children."""
    return sum(self._cpu()[:4])

  def _signal(self, number: signal.Signals) -> None:
    if self._process.poll() is None:
      os.killpg(self._process.pid, number)
