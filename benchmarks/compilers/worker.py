"""Compiles cases in another process, for compilers may end theirs."""

import concurrent.futures
import importlib
import pathlib
import re
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from benchmarks.compilers.targets import Extent


def module(table: str) -> Any:
  return importlib.import_module(f"benchmarks.compilers.{table}")


def names(table: str, target: str, extent: Extent) -> list[str]:
  return list(module(table).cases(target, extent))


def run(table: str, target: str, case: str, dump: str) -> dict[str, Any]:
  """Compiles a case, or says why that failed."""
  found = module(table)
  try:
    row, text = found.row(target, found.cases(target, "all")[case])
  except Exception as error:  # of a compiler, or of JAX: the table says it
    return {"error": f"{type(error).__name__}: {str(error)[:600]}"}
  if dump:
    name = re.sub(r"\W+", "_", f"{target} {case}")
    pathlib.Path(dump, f"{name}.hlo").write_text(text)
  return row


class Worker:
  """Compiles in another process, and starts a new one where a compiler ended it."""

  def __init__(self) -> None:
    self._pool = self._new()

  def __call__(self, *task: str) -> dict[str, Any]:
    try:
      return self._pool.submit(run, *task).result()
    except BrokenProcessPool:
      self._pool = self._new()
      return {"error": "the compiler ended its process"}

  def _new(self) -> concurrent.futures.ProcessPoolExecutor:
    # JAX is there, and has threads: a fork would copy their locks.
    return concurrent.futures.ProcessPoolExecutor(1, get_context("spawn"))
