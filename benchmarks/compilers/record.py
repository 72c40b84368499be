"""The record of what compilers made of the cases: a line of JSON for each."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks.common import cli

FOLDER = cli.RESULTS / "compilers"


def read(path: pathlib.Path) -> dict[tuple[str, str], dict[str, Any]]:
  lines = path.read_text().splitlines() if path.exists() else []
  return {(row["target"], row["case"]): row for row in map(json.loads, lines)}


def write(path: pathlib.Path, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
  """Writes rows in place of a file's, so that nobody reads a half."""
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_suffix(".new")
  new.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))
  new.replace(path)


_FACTS: dict[str, Callable[[dict[str, Any]], int]] = {
  "temporaries": lambda row: row["temporaries"],
  "cycles": lambda row: sum((row["cycles"] or {}).values()),
  "launches": lambda row: sum(row["launches"].values()),
  # Of the table of overlaps.
  "exposed bytes": lambda row: round(row.get("exposed_share", 0) * row.get("bytes", 0)),
}


def dearer(row: dict[str, Any], old: dict[str, Any] | None) -> list[str]:
  """Says in which facts a row is worse than the one that the same compiler made."""
  if "error" in row:
    return [f"it does not compile: {row['error']}"]
  if old is None or "error" in old or row["versions"] != old["versions"]:
    return []
  return [
    f"{name} rose from {fact(old):,} to {fact(row):,}"
    for name, fact in _FACTS.items()
    # A compiler makes the same program each time, but for the order of a few fusions.
    if fact(row) > 1.02 * fact(old)
  ]
