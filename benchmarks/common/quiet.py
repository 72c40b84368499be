"""Keeps the machine quiet while a benchmark takes times.

Benchmarks that take times lock one file of the machine, one after another. The queue of
study/queue/run.py stops its trainings while the lock is held.
GRADCOMP_QUIET_LOCK names another file; where it is empty, nothing is locked.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import locks

VARIABLE = "GRADCOMP_QUIET_LOCK"
STOPPING = 1.5  # seconds; the queue looks every second, and then stops its trainings


def holder() -> str | None:
  """Returns who keeps the machine quiet; None if nobody does."""
  path = _path()
  return locks.holder(path) if path else None


def keep(*, unless: bool = False) -> int | None:
  """Waits until the machine is quiet, and keeps it so until this process ends.

  The processes that this one starts, and further calls in it, do not wait. Closing
  the descriptor lets go; it is None where nothing is locked, as in a quick run.
  """
  path = _path()
  if unless or path is None:
    return None
  file = locks.take(path)
  if file is None:
    print(f"waits for a quiet machine: {holder() or 'another benchmark'}", flush=True)
    file = locks.take(path, wait=True)
  os.environ[VARIABLE] = ""
  time.sleep(STOPPING)
  return file


@contextlib.contextmanager
def machine(*, unless: bool = False) -> Iterator[None]:
  """Keeps the machine quiet for the statements of a ``with``: see ``keep``."""
  before = os.environ.get(VARIABLE)
  file = keep(unless=unless)
  try:
    yield
  finally:
    if file is not None:
      os.close(file)
      os.environ.pop(VARIABLE)
      if before is not None:
        os.environ[VARIABLE] = before


def _path() -> Path | None:
  name = os.environ.get(VARIABLE, f"{tempfile.gettempdir()}/gradcomp-quiet.lock")
  return Path(name) if name else None
