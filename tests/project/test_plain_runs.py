"""A plain run leaves slow tests out, compiles in the least time, and is bounded."""

import os
import subprocess
import sys

import jax
import pytest

from tests.plugins import selected
from tests.support.pages import ROOT

OLDEST = jax.__version_info__ < (0, 11)  # whose programs the budget counts

CONFTEST = """
import os, jax
from tests.plugins import costs, selected

jax.config.update("jax_platforms", "cpu")
costs.PROGRAMS = int(os.environ["PROGRAMS"])

def pytest_addoption(parser):
  selected.add_options(parser)

def pytest_configure(config):
  config.addinivalue_line("markers", "slow: left out")
  selected.set_flags(config)
  config.pluginmanager.register(costs.Costs())
  config.pluginmanager.register(selected.Selected(config))
"""

TESTS = """
import os, jax, pytest

def test_flags(request):
  fast = "--xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"]
  assert fast != request.config.getoption("--optimize")

@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_slow(number):
  pass

@pytest.mark.slow(now=True)
def test_changed():
  jax.jit(lambda x: x - 1).lower(jax.ShapeDtypeStruct((9,), "float32")).compile()

@pytest.mark.parametrize("size", range(1, 5))
def test_compiles(size):
  jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((size,), "float32")).compile()
"""


def test_a_run_with_the_plugins(tmp_path):
  files = {f"test_{number}.py": "def test_passes(): pass" for number in range(8)}
  files |= {"conftest.py": CONFTEST, "test_it.py": TESTS}
  for name, text in {**files, "pytest.ini": "[pytest]\ntestpaths = .\n"}.items():
    (tmp_path / name).write_text(text)

  def run(*options, programs=2):
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    env["PROGRAMS"] = str(programs)
    how = dict(cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    result = subprocess.run(command, **how)
    return result.returncode, result.stdout

  code, out = run("-k", "not compiles", "--optimize")
  assert code == 0 and "10 passed, 24 deselected" in out, out
  code, out = run("--slow", "1/4")
  assert "FAILED: the tests compile 4 programs, and may 2" in out, out
  assert code == 1 and "failed" not in out.splitlines()[-1]
  assert 14 < out.count(" PASSED") < 14 + 20  # a share of the slow ones
  code, out = run("-k", "passes", "--files", "1/2")
  assert not code and 0 < out.count(" PASSED") < 8, out  # a share of the files
  code, out = run("--slow", "all", "--only-slow")
  assert not code and "21 passed" in out, out
  # Only a whole run says that a budget is too high.
  spared = "may 5: run make budgets ARGS='--programs 4'"
  for options in ((), ("-k", "compiles"), (".",)):
    code, out = run("-m", "not bits", *options, programs=5)
    assert code == (spared in out) == (not options and OLDEST), out


def test_a_share_of_tests_is_a_number_below_their_count():
  assert selected.share("all") == (0, 1)
  assert selected.share("3/8") == (3, 8)
  for text in ("", "1", "4/4", "-1/4", "a/b", "1/4/2", "every"):
    with pytest.raises(selected.argparse.ArgumentTypeError, match="must be all or K/N"):
      selected.share(text)
