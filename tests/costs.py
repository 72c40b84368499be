"""A pytest plugin that counts what each test file compiles, and holds it to a budget.

Compiling is what most tests spend their time on. JAX reports every program that it
compiles; the summary of a run lists, for each file, the programs, how many of them the
compilation cache held, and the seconds. A file that compiles more programs than its
budget fails the run: see ``budgets.py``.
"""

import collections
import os
import time
from collections.abc import Iterator

import budgets
import jax
import pytest

_COMPILE = "/jax/core/compile/backend_compile_duration"
_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_HIT = "/jax/compilation_cache/cache_hits"

# The columns of the table, in this order in the reports that workers send.
_COLUMNS = ("programs", "cached", "XLA s", "trace s", "CPU s", "wall s")


class Costs:
  """Adds up what JAX reports of this process, and prints what all processes reported.

  Attributes:
    of_files: for each file the sums of ``_COLUMNS``.
  """

  def __init__(self) -> None:
    self._now = collections.Counter()
    self.of_files: dict[str, collections.Counter] = {}
    jax.monitoring.register_event_duration_secs_listener(self._on_duration)
    jax.monitoring.register_event_listener(self._on_event)

  def _on_duration(self, event: str, seconds: float, **kwargs) -> None:
    if event == _COMPILE:
      self._now["programs"] += 1
      self._now["XLA s"] += seconds
    elif event in (_TRACE, _LOWER):
      self._now["trace s"] += seconds

  def _on_event(self, event: str, **kwargs) -> None:
    self._now["cached"] += event == _HIT

  def _read(self) -> collections.Counter:
    times = os.times()
    cpu = times.user + times.system + times.children_user + times.children_system
    return self._now + collections.Counter(
      {"CPU s": cpu, "wall s": time.perf_counter()}
    )

  @pytest.hookimpl(wrapper=True, tryfirst=True)
  def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
    self._before = self._read()
    return (yield)

  @pytest.hookimpl(wrapper=True, tryfirst=True)
  def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
    result = yield
    spent = self._read()
    spent.subtract(self._before)
    # A worker of pytest-xdist sends the properties with its report.
    item.user_properties.append(("costs", [spent[name] for name in _COLUMNS]))
    return result

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    if report.when != "teardown":
      return
    path = report.nodeid.partition("::")[0]
    costs = dict(report.user_properties).get("costs", [])
    total = self.of_files.setdefault(path, collections.Counter())
    total.update(dict(zip(_COLUMNS, costs, strict=False)), tests=1)

  def over_budget(self) -> list[str]:
    """A sentence for each file that compiled more programs than it may."""
    return [
      f"{path} compiled {costs['programs']} programs, and its budget is {budget}: "
      "see tests/budgets.py"
      for path, costs in sorted(self.of_files.items())
      if costs["programs"] > (budget := budgets.programs(path))
    ]

  def table(self) -> list[str]:
    """The costs of all files, the dearest first, and their sum."""
    rows = sorted(self.of_files.items(), key=lambda row: -row[1]["CPU s"])
    total = sum((costs for _, costs in rows), collections.Counter())
    names = ("tests", *_COLUMNS)
    lines = ["".join(f"{name:>10}" for name in names)]
    for path, costs in [*rows, ("all files", total)]:
      lines.append("".join(f"{costs[n]:10.0f}" for n in names) + f"  {path}")
    return lines
