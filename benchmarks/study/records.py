"""Keeps the runs of a study as lines of JSON, and never the same run twice.

Each launch appends to its file in the folder, and all files count. So launches with
other numbers of workers, on other machines or at the same time join. A line that a
killed launch left unfinished does not count.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.study.settings import Setting


class Record(NamedTuple):
  """A run: what it was, and what came out."""

  setting: Setting
  results: dict[str, Any]

  @property
  def lacking(self) -> str | None:
    """Why the run has no results: it failed, or was left; None if it has them."""
    return self.results.get("failed", self.results.get("left"))


def read(*folders: Path) -> list[Record]:
  """Reads all runs of some folders, the last of those with the same settings.

  Settings that are newer than a record have their defaults there. Records with
  settings that are newer than this file do not count. One without results does not
  count beside one that has them.
  """
  found: dict[Setting, Record] = {}
  for path in (x for folder in folders for x in sorted(folder.glob("*.jsonl"))):
    for line in path.read_text().splitlines():
      try:
        results = json.loads(line)
      except json.JSONDecodeError:
        continue  # a launch was killed while it wrote
      run = results.pop("run")
      if not run.keys() <= set(Setting._fields):
        continue
      record = Record(Setting(**run), results)
      known = found.get(record.setting)
      if known is None or known.lacking or not record.lacking:
        found[record.setting] = record
  return list(found.values())


def done(folder: Path) -> set[Setting]:
  """Returns the settings that have run, of any launch. One that failed runs again."""
  return {x.setting for x in read(folder) if "failed" not in x.results}


def append(path: Path, setting: Setting, results: dict[str, Any]) -> None:
  """Writes a run as a line, in one piece; several processes may at the same time."""
  line = json.dumps({"run": setting._asdict(), **results}) + "\n"
  file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
  try:
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":  # a machine crashed meanwhile
      line = "\n" + line
    written = os.write(file, line.encode())
    if written < len(line):
      raise OSError(f"no room in {path}: {written} of {len(line)} bytes were written")
    os.fsync(file)
  finally:
    os.close(file)
