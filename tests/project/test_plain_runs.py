"""Plain runs leave slow tests out, are bounded, and have what catches each break."""

import ast
import functools

import jax
import pytest

from tests.breaks import run as breaks
from tests.plugins import selected
from tests.support.pages import ROOT

pytest_plugins = "pytester"
OLDEST = jax.__version_info__ < (0, 11)  # whose programs the budget counts

CONFTEST = """
import os, jax

jax.config.update("jax_platforms", "cpu")
pytest_plugins = "tests.plugins.costs", "tests.plugins.selected"

def pytest_configure(config):
  config.addinivalue_line("markers", "slow: left out")
  from tests.plugins import costs
  costs.PROGRAMS = int(os.environ["PROGRAMS"])
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


def test_a_run_with_the_plugins(pytester, monkeypatch):
  pytester.makeconftest(CONFTEST)
  pytester.makeini("[pytest]\ntestpaths = .\n")
  others = {f"test_{number}": "def test_passes(): pass" for number in range(8)}
  pytester.makepyfile(test_it=TESTS, **others)
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("XLA_FLAGS", "")

  def run(*options, programs=2):
    monkeypatch.setenv("PROGRAMS", str(programs))
    result = pytester.runpytest_subprocess("-v", *options, timeout=300)
    return result.ret, result.stdout.str()

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


@functools.cache
def plain_tests(file):
  """The names of functions that are not slow in all of their cases."""
  of = lambda x: map(ast.unparse, getattr(x, "decorator_list", ()))
  body = ast.parse((ROOT / file).read_text()).body
  decorators = {name: [*of(x)] for x in body for name in breaks.names(x)}
  return {name for name, x in decorators.items() if "pytest.mark.slow" not in x}


def test_every_edit_applies_and_every_catcher_exists():
  wrong = []
  for case in breaks.read():
    file, _, test = case.catcher.partition("::")
    try:
      case.applied(ROOT)
      if test not in plain_tests(file):
        wrong.append(f"{case.law}: {case.catcher} does not exist, or is slow.")
    except (OSError, SyntaxError, ValueError) as error:
      wrong.append(f"{case.law}: {error}")
  assert not wrong, "\n".join(wrong)
