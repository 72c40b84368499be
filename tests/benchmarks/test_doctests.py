"""The examples in docstrings of benchmarks and examples run."""

import doctest
import importlib

import pytest

from tests.support.pages import ROOT

MODULES = [
  ".".join(path.relative_to(ROOT).with_suffix("").parts)
  for folder in ("benchmarks", "examples")
  for path in sorted((ROOT / folder).rglob("*.py"))
  if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name, doctest_namespace):
  found = doctest.testmod(importlib.import_module(name), extraglobs=doctest_namespace)
  assert found.attempted and not found.failed
