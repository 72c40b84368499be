"""Counts what each test file compiles, and holds it to a budget: a pytest plugin.

Compiling is what most tests spend their time on. JAX reports every program that it
compiles; the summary of a run lists, for each file, the programs, how many of them the
compilation cache held, and the seconds. A file that takes more programs or seconds than
its budget fails the run: see ``budgets.py``.
"""

import collections
import os
import time
from collections.abc import Iterator

import jax
import pytest

from tests.plugins import budgets

_COMPILE = "/jax/core/compile/backend_compile_duration"
_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_HIT = "/jax/compilation_cache/cache_hits"

# The columns of the table, in this order in the reports that workers send.
_COLUMNS = ("programs", "cached", "XLA s", "trace s", "CPU s", "wall s")


class Costs:
  """Adds up what JAX reports of this process, and prints what all processes reported.

  Attributes:
    of_files: the sums of ``_COLUMNS`` for each file.
  """

  def __init__(self, config: pytest.Config) -> None:
    # Budgets are for programs that LLVM does not optimize.
    self._held = not config.getoption("--optimize")
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
    # Slow tests are no part of a plain run, for which the budgets are.
    path = item.nodeid.partition("::")[0]
    row = "slow tests" if item.get_closest_marker("slow") else path
    item.user_properties.append(("costs", (row, [spent[name] for name in _COLUMNS])))
    return result

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    if report.when != "teardown":
      return
    row, costs = dict(report.user_properties)["costs"]
    total = self.of_files.setdefault(row, collections.Counter())
    total.update(dict(zip(_COLUMNS, costs, strict=True)), tests=1)

  def pytest_sessionfinish(self, session: pytest.Session) -> None:
    if self._over_budget() and session.exitstatus == pytest.ExitCode.OK:
      session.exitstatus = pytest.ExitCode.TESTS_FAILED

  def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("what was compiled")
    for line in self._table():
      terminalreporter.write_line(line)
    for line in self._over_budget():
      terminalreporter.write_line(f"FAILED: {line}", red=True)

  def _over_budget(self) -> list[str]:
    """A sentence for each file that compiled or computed more than it may."""
    found: list[str] = []
    if not self._held:
      return found
    for path, spent in sorted(self.of_files.items()):
      if path == "slow tests":
        continue
      budget = budgets.of(path)
      for name, limit in (
        ("programs", budget.programs),
        ("CPU s", budgets.ROOM * budget.seconds),
      ):
        if spent[name] > limit:
          found.append(
            f"{path} took {spent[name]:.0f} {name}, and its budget is {limit:.0f}: see "
            "tests/plugins/budgets.py"
          )
    return found

  def _table(self) -> list[str]:
    """The costs of files, the dearest first, and the sum of all."""
    rows = sorted(self.of_files.items(), key=lambda row: -row[1]["CPU s"])
    total = sum((costs for _, costs in rows), collections.Counter())
    shown = [row for row in rows if row[1]["CPU s"] >= 1]
    names = ("tests", *_COLUMNS)
    lines = ["".join(f"{name:>10}" for name in names)]
    for path, costs in [*shown, ("all files", total)]:
      lines.append("".join(f"{costs[n]:10.0f}" for n in names) + f"  {path}")
    return lines
