"""Compiles cases, and keeps the record of what compilers made: a line of JSON each."""

import importlib
import json
import pathlib
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from benchmarks.common import cli
from benchmarks.compilers.targets import Extent

FOLDER = cli.RESULTS / "compilers"


def read(path: pathlib.Path) -> dict[tuple[str, str], dict[str, Any]]:
  lines = path.read_text().splitlines() if path.exists() else []
  return {(row["target"], row["case"]): row for row in map(json.loads, lines)}


def write(path: pathlib.Path, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  cli.replace(path, "".join(f"{json.dumps(row)}\n" for row in rows.values()))


def cases(table: str, target: str, extent: Extent) -> dict[str, Any]:
  return importlib.import_module(f"benchmarks.compilers.{table}").cases(target, extent)


def compile_row(table: str, target: str, case: str, dump: str) -> dict[str, Any]:
  """Compiles a case, or says why that failed."""
  module = importlib.import_module(f"benchmarks.compilers.{table}")
  try:
    row, compiled = module.row(target, module.cases(target, "all")[case])
  except Exception as error:  # of a compiler, or of JAX: the table says it
    return {"error": f"{type(error).__name__}: {str(error)[:600]}"}
  if dump:
    name = re.sub(r"\W+", "_", f"{target} {case}")
    pathlib.Path(dump, f"{name}.hlo").write_text(compiled.as_text())
  return row


class Worker:
  """Compiles in another process, and starts a new one where a compiler ended it."""

  _pool: ProcessPoolExecutor | None = None

  def __call__(self, *task: str) -> dict[str, Any]:
    # JAX is there, and has threads: a fork would copy their locks.
    self._pool = self._pool or ProcessPoolExecutor(1, get_context("spawn"))
    try:
      return self._pool.submit(compile_row, *task).result()
    except BrokenProcessPool:
      self._pool = None
      return {"error": "the compiler ended its process"}


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
