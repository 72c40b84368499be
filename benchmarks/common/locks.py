"""Locks files, each for one process at a time, which says in the file who it is.

The system lets go of a lock when its holder ends, however it ends. What the holder
starts does not inherit the lock.
"""

import contextlib
import fcntl
import os
import sys
import time
from pathlib import Path

_LOOK = 0.05  # seconds, in which ``holder`` is done


def take(path: Path, *, wait: bool = False) -> int | None:
  """Locks a file until this process ends; returns None if another one has the lock."""
  with contextlib.suppress(FileExistsError):
    made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.fchmod(made, 0o666)  # root's benchmarks and others' share the file
    os.close(made)
  file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
  for pause in (0.0, _LOOK):
    time.sleep(pause)  # it may have been one who only looked
    with contextlib.suppress(BlockingIOError):
      fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
      os.truncate(file, 0)
      os.pwrite(file, f"process {os.getpid()}, {' '.join(sys.argv)}".encode(), 0)
      return file
  os.close(file)
  return None


def holder(path: Path) -> str | None:
  """Returns what the holder of a lock says of itself; None if nobody holds it."""
  try:
    file = os.open(path, os.O_RDONLY)
  except FileNotFoundError:
    return None
  try:
    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    return os.pread(file, 200, 0).decode(errors="replace") or "another process"
  finally:
    os.close(file)
  return None
