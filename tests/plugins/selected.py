"""Chooses which tests run, and how they compile: a pytest plugin.

Tests compile for longer than they compute. So XLA compiles in the least time, unless
``--optimize`` is given, and tests marked ``slow`` are left out unless ``--slow`` is,
but for those with ``slow(now=True)``. ``--files`` runs a share of the files.
"""

import argparse
import functools
import os
import pathlib
import platform
import zlib

import jax
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
  for name, default, said in (
    ("--slow", (0, 0), "run slow tests as well: all, or the K-th of N shares of them"),
    ("--files", (0, 1), "run the tests of all files, or of the K-th of N shares"),
  ):
    options = {"type": share, "default": default, "metavar": "all|K/N"}
    parser.addoption(name, help=said, **options)
  add = functools.partial(parser.addoption, action="store_true")
  add("--only-slow", help="leave out tests that are not slow")
  add("--optimize", help="compile as users do, which tests of `bits` are for")


def share(text: str) -> tuple[int, int]:
  """The number of a share and how many there are: ``"3/8"`` is (3, 8)."""
  first, slash, count = ("0/1" if text == "all" else text).partition("/")
  if not (slash and first.isdigit() and count.isdigit() and int(first) < int(count)):
    raise argparse.ArgumentTypeError(f"must be all or K/N with K below N, got {text!r}")
  return int(first), int(count)


# XLA's HLO is the same with them. LLVM neither contracts nor reorders floats then.
IN_LEAST_TIME = [
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
  "--xla_cpu_parallel_codegen_split_count=1",
]
if jax.__version_info__ < (0, 11):
  # The older of two code generators, which needs two thirds of the newer one's time. A
  # version that does not know a flag ends the process, and JAX 0.12 does not.
  IN_LEAST_TIME.append("--xla_cpu_use_fusion_emitters=false")
elif platform.machine() == "x86_64":
  # The newer one contracts floats in spite of these flags. AVX has no instruction that
  # multiplies and adds.
  IN_LEAST_TIME.append("--xla_cpu_max_isa=AVX")


def pytest_configure(config: pytest.Config) -> None:
  """Sets how XLA compiles, here and in processes of tests, before a device is there."""
  if not config.getoption("--optimize"):
    flags = [*os.environ.get("XLA_FLAGS", "").split(), *IN_LEAST_TIME]
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys(flags))
  config.pluginmanager.register(Selected(config))


class Selected:
  """Leaves slow tests out, and files: on every machine the same, by their names."""

  def __init__(self, config: pytest.Config) -> None:
    self._slow, self._files = config.getoption("--slow"), config.getoption("--files")
    self._plain = not config.getoption("--only-slow")

  def pytest_report_header(self) -> str:
    named = lambda k, n: f"share {k} of {n}" if n else "none"
    return f"slow tests: {named(*self._slow)}; files: {named(*self._files)}"

  def pytest_ignore_collect(
    self, collection_path: pathlib.Path, config: pytest.Config
  ) -> bool | None:
    """Leaves files out that name no mark of `bits`, where those tests run alone."""
    code = config.option.markexpr == "bits" and collection_path.suffix == ".py"
    return True if code and "mark.bits" not in collection_path.read_text() else None

  def pytest_collection_modifyitems(
    self, config: pytest.Config, items: list[pytest.Item]
  ) -> None:
    config.hook.pytest_deselected(items=[x for x in items if not self._runs(x)])
    items[:] = [item for item in items if self._runs(item)]

  def _runs(self, item: pytest.Item) -> bool:
    slow, chosen = item.get_closest_marker("slow"), self._plain
    if slow and not (chosen and slow.kwargs.get("now")):
      chosen = _within(item.nodeid, *self._slow)
    return chosen and _within(item.nodeid.partition("::")[0], *self._files)


def _within(name: str, number: int, shares: int) -> bool:
  return shares > 0 and zlib.crc32(name.encode()) % shares == number
