"""Counts what each test file compiles, and bounds the sum: a pytest plugin.

The summary of a run lists, for each file, the programs that JAX compiled or found in
its cache, and the seconds. A run fails whose tests, but for slow ones, compile more
than the budget says; and a whole run that compiles a tenth less, so that the budget
falls. How processes divide the files moves the count: 8,397 and 8,899 were seen.
"""

import collections
import os
import pathlib
import tomllib
from collections.abc import Iterator

import jax
import pytest

_BUDGETS = pathlib.Path(__file__).parents[1] / "project" / "budgets.toml"
PROGRAMS = tomllib.loads(_BUDGETS.read_text())["programs"]["make test"]

_COMPILE = "/jax/core/compile/backend_compile_duration"
_SECONDS = {
  _COMPILE: "XLA s",
  "/jax/core/compile/jaxpr_trace_duration": "trace s",
  "/jax/core/compile/jaxpr_to_mlir_module_duration": "trace s",
}

SLOW = "slow tests"  # their row, in place of those of their files

# The columns of the table, in this order in the reports that workers send.
_COLUMNS = ("programs", "cached", "XLA s", "trace s", "CPU s", "wall s")


def pytest_configure(config: pytest.Config) -> None:
  config.pluginmanager.register(Costs())


class Costs:
  """Adds up what JAX reports of a process, and prints what all processes reported."""

  def __init__(self) -> None:
    self._now = collections.Counter()
    # The sums of ``_COLUMNS`` for each file.
    self.of_files = collections.defaultdict(collections.Counter)
    jax.monitoring.register_event_duration_secs_listener(self._on_duration)
    jax.monitoring.register_event_listener(self._on_event)

  def _on_duration(self, event: str, seconds: float, **kwargs) -> None:
    self._now["programs"] += event == _COMPILE
    self._now[_SECONDS.get(event, "")] += seconds

  def _on_event(self, event: str, **kwargs) -> None:
    self._now["cached"] += event == "/jax/compilation_cache/cache_hits"

  def _read(self) -> collections.Counter:
    *cpu, wall = os.times()
    return self._now + collections.Counter({"CPU s": sum(cpu), "wall s": wall})

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
    path = item.nodeid.partition("::")[0]
    row = SLOW if item.get_closest_marker("slow") else path
    item.user_properties.append(("costs", (row, [spent[name] for name in _COLUMNS])))
    return result

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    if report.when == "teardown":
      row, costs = dict(report.user_properties)["costs"]
      self.of_files[row].update(dict(zip(_COLUMNS, costs, strict=True)), tests=1)

  def pytest_sessionfinish(self, session: pytest.Session) -> None:
    if self._wrong(session.config) and session.exitstatus == pytest.ExitCode.OK:
      session.exitstatus = pytest.ExitCode.TESTS_FAILED

  def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("what was compiled")
    terminalreporter.write("\n".join([*self._table(), ""]))
    if wrong := self._wrong(terminalreporter.config):
      terminalreporter.write_line(f"FAILED: {wrong}", red=True)

  def _wrong(self, config: pytest.Config) -> str:
    """Says how this run breaks the budget; "" if it does not."""
    found = sum(x["programs"] for row, x in self.of_files.items() if row != SLOW)
    said = f"the tests compile {found} programs, and may {PROGRAMS}"
    if _is_whole(config) and PROGRAMS > found * 1.1:
      return f"{said}: run make budgets ARGS='--programs {found}'"
    return said if found > PROGRAMS else ""

  def _table(self) -> list[str]:
    """The costs of files, the dearest first, and the sum of all."""
    total = sum(self.of_files.values(), collections.Counter())
    rows = sorted(self.of_files.items(), key=lambda row: -row[1]["CPU s"])
    shown = [row for row in rows if row[1]["CPU s"] >= 1] + [("all files", total)]
    names = ("tests", *_COLUMNS)
    row = lambda path, costs: "".join(f"{costs[n]:10.0f}" for n in names) + f"  {path}"
    return ["".join(f"{name:>10}" for name in names), *(row(*x) for x in shown)]


def _is_whole(config: pytest.Config) -> bool:
  """Returns True for the first run of `make test`, on the oldest JAX."""
  option = config.option
  whole = option.markexpr == "not bits" and option.files == (0, 1)
  whole = whole and config.args_source == pytest.Config.ArgsSource.TESTPATHS
  chosen = option.keyword or option.ignore or option.deselect or option.only_slow
  in_one_of_many = hasattr(config, "workerinput")
  oldest = jax.__version_info__ < (0, 11)
  return whole and oldest and not (chosen or in_one_of_many)
