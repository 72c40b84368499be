"""Chooses which tests run, in which order, and how they compile: a pytest plugin.

Tests marked ``slow`` are left out of a plain run. Tests marked ``bits`` run programs
whose floats an optimizing compiler may contract or reorder: LLVM optimizes these, and
no others, unless ``--optimize`` is given.
"""

import argparse
import os
import zlib
from collections.abc import Iterator

import budgets
import jax
import pytest


def add_options(parser: pytest.Parser) -> None:
  parser.addoption(
    "--slow",
    type=share,
    default=(0, 0),
    metavar="all|K/N",
    help="run slow tests as well: all, or the K-th of N shares of them",
  )
  parser.addoption(
    "--optimize",
    action="store_true",
    help="let LLVM optimize all programs, not only those of tests marked `bits`",
  )


def share(text: str) -> tuple[int, int]:
  """The number of a share and how many there are: ``"3/8"`` is (3, 8)."""
  first, slash, count = ("0/1" if text == "all" else text).partition("/")
  if not (slash and first.isdigit() and count.isdigit() and int(first) < int(count)):
    raise argparse.ArgumentTypeError(f"must be all or K/N with K below N, got {text!r}")
  return int(first), int(count)


class Selected:
  """Leaves out slow tests, orders files, and turns LLVM's optimizations on and off."""

  def __init__(self, config: pytest.Config) -> None:
    self._share, self._shares = config.getoption("--slow")
    self._all_optimized = config.getoption("--optimize")
    self._optimized: bool | None = None

  def pytest_report_header(self) -> str:
    slow = f"share {self._share} of {self._shares}" if self._shares else "none"
    return f"slow tests: {slow}"

  def pytest_collection_modifyitems(
    self, config: pytest.Config, items: list[pytest.Item]
  ) -> None:
    """The dearest files first, so that workers end together; in each, `bits` last."""
    left_out = [item for item in items if not self._runs(item)]
    items[:] = sorted((item for item in items if self._runs(item)), key=_order)
    config.hook.pytest_deselected(items=left_out)

  def _runs(self, item: pytest.Item) -> bool:
    if item.get_closest_marker("slow") is None:
      return True
    # By a hash of the name: the same tests are in the same share on every machine.
    number = zlib.crc32(item.nodeid.encode())
    return self._shares > 0 and number % self._shares == self._share

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
    optimized = self._all_optimized or item.get_closest_marker("bits") is not None
    if optimized != self._optimized:
      # What was compiled the other way must not serve this test.
      jax.clear_caches()
      jax.config.update("jax_disable_most_optimizations", not optimized)
      # For the processes that a test starts.
      os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(not optimized))
      self._optimized = optimized
    return (yield)


def _order(item: pytest.Item) -> tuple[float, str, bool]:
  path = item.nodeid.partition("::")[0]
  return -budgets.of(path).seconds, path, item.get_closest_marker("bits") is not None
