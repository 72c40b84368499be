"""Writes and reads the diary of a training's processes, in a folder that all share."""

import json
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import Any

Entry = dict[str, Any]

# What happens between a change of the nodes and the next step, in this order.
STAGES = {
  "failed": "the first worker fails in an exchange",
  "step": "the last step of the old group",
  "started": "the last worker of a new group has started",
  "connected": "JAX has connected them",
  "restored": "all have their state",
  "next": "step {step}, by {workers} workers",
}


def note(folder: pathlib.Path, what: str, **more: Any) -> None:
  """Writes down what this process does now, in a file of its own."""
  path = folder / f"diary-{socket.gethostname()}-{os.getpid()}.jsonl"
  with open(path, "a") as file:
    print(json.dumps({"time": time.time(), "what": what, **more}), file=file)


def read(folder: pathlib.Path) -> list[Entry]:
  """Returns the entries of all processes in the order of time, by their own clocks."""
  lines = (x for path in folder.glob("diary-*") for x in path.read_text().splitlines())
  return sorted(map(json.loads, lines), key=lambda entry: entry["time"])


def began(folder: pathlib.Path, workers: int) -> float | None:
  """Returns when so many workers took their first step; None if they have not."""
  steps = (entry for entry in read(folder) if entry["what"] == "step")
  return next((entry["time"] for entry in steps if entry["workers"] == workers), None)


def changes(entries: list[Entry]) -> Iterator[tuple[Entry, dict[str, Entry]]]:
  """Yields each change of the nodes, and what came of it until the next step.

  A change is an entry with ``node`` in it. The next step is one by another number of
  workers. Of each kind of entries it is the last one, but of failures the first.
  """
  for i, change in enumerate(entries):
    if "node" not in change["what"]:
      continue
    before = [entry for entry in entries[:i] if entry["what"] == "step"][-1]
    found = {}
    for entry in entries[i + 1 :]:
      if entry["what"] == "step" and entry["workers"] != before["workers"]:
        found["next"] = entry
        break
      if entry["what"] != "failed" or "failed" not in found:
        found[entry["what"]] = entry
    yield before | change, found


def told(entries: list[Entry]) -> Iterator[str]:
  """Yields lines on each change: its stages, and the seconds until then."""
  for change, found in changes(entries):
    yield f"{change['what']} after step {change['step']}"
    for stage, words in STAGES.items():
      if entry := found.get(stage):
        yield f"{entry['time'] - change['time']:7.1f} s  {words.format(**entry)}"
