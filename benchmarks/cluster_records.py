"""Keeps the runs of cluster_study.py as lines of JSON, and never the same run twice.

Each launch appends to a file of its own in the folder, and all files count. So launches
with other numbers of workers, on other machines or at the same time join. A line that a
killed launch left unfinished does not count.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def identity(run: Mapping[str, Any]) -> str:
  """Returns what identifies a run: all of its settings, in one order.

  Example:
    >>> identity({"b": 1, "a": None}) == identity({"a": None, "b": 1})
    True
  """
  return json.dumps(run, sort_keys=True)


def read(folder: Path) -> list[Record]:
  """Reads all runs of a folder, the last of those with the same settings.

  Failed runs count too: what diverges once does so again.
  """
  found: dict[str, Record] = {}
  for path in sorted(folder.glob("*.jsonl")):
    for record in _lines(path):
      found[identity(record["run"])] = record
  return list(found.values())


def _lines(path: Path) -> Iterator[Record]:
  for line in path.read_text().splitlines():
    try:
      yield json.loads(line)
    except json.JSONDecodeError:
      continue  # a launch was killed while it wrote


class Records:
  """The runs of a folder, to which one launch appends."""

  def __init__(self, folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y%m%d-%H%M%S")
    self._folder = folder
    self._path = folder / f"runs-{now}-{socket.gethostname()}-{os.getpid()}.jsonl"
    self._known = {identity(record["run"]) for record in read(folder)}

  def has(self, run: Mapping[str, Any]) -> bool:
    """Returns whether a run is there; another launch may have appended it just now."""
    return identity(run) in self._known or self._refreshed(run)

  def _refreshed(self, run: Mapping[str, Any]) -> bool:
    self._known = {identity(record["run"]) for record in read(self._folder)}
    return identity(run) in self._known

  def append(self, record: Record) -> None:
    """Writes a run, so that it is there even if the launch is killed right after."""
    self._known.add(identity(record["run"]))
    with self._path.open("a") as file:
      file.write(json.dumps(record) + "\n")
      file.flush()
      os.fsync(file.fileno())
