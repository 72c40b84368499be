"""Keeps the runs of cluster_study.py as lines of JSON, and never the same run twice.

Each launch appends to a file of its own in the folder, and all files count. So launches
with other numbers of workers, on other machines or at the same time join. A line that a
killed launch left unfinished does not count.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

from cluster_settings import Setting


class Record(NamedTuple):
  """A run: what it was, and what came out."""

  setting: Setting
  results: dict[str, Any]


def read(folder: Path) -> list[Record]:
  """Reads all runs of a folder, the last of those with the same settings.

  Settings that are newer than a record have their defaults there.
  """
  found: dict[Setting, Record] = {}
  for path in sorted(folder.glob("*.jsonl")):
    for line in path.read_text().splitlines():
      try:
        results = json.loads(line)
      except json.JSONDecodeError:
        continue  # a launch was killed while it wrote
      setting = Setting(**results.pop("run"))
      found[setting] = Record(setting, results)
  return list(found.values())


class Records:
  """The runs of a folder, to which one launch appends."""

  def __init__(self, folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y%m%d-%H%M%S")
    self._folder = folder
    self._path = folder / f"runs-{now}-{socket.gethostname()}-{os.getpid()}.jsonl"

  def has(self, setting: Setting) -> bool:
    """Returns whether a run is there; another launch may have appended it just now.

    One that failed runs again.
    """
    known = (x for x in read(self._folder) if "failed" not in x.results)
    return any(record.setting == setting for record in known)

  def append(self, setting: Setting, results: dict[str, Any]) -> None:
    """Writes a run, so that it is there even if the launch is killed right after."""
    with self._path.open("a") as file:
      file.write(json.dumps({"run": setting._asdict(), **results}) + "\n")
      file.flush()
      os.fsync(file.fileno())
