"""Seconds of collectives are those of their messages, one after the other."""

import dataclasses
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcomp import cost
from gradcomp.cost import Cluster, CodecSpeed, Link
from tests.support import pages
from tests.support.cases.cost import LINK, SPEED, explain, message

CLUSTER = Cluster(workers=4, link=LINK)


def simulated_ring(chunks, link, p):
  """The time of so many steps, in each of which a chunk goes to the next worker."""
  at = [0.0] * p
  for chunk in chunks:
    arrives = [
      at[i - 1] + link.latency + chunk / link.bytes_per_second for i in range(p)
    ]
    at = [max(own, came) for own, came in zip(at, arrives, strict=True)]
  return max(at)


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_rings_take_as_long_as_their_messages_one_by_one(p):
  n = 6e4
  whole, shares = [n] * (p - 1), [n / p] * (p - 1)
  for function, chunks in [
    (cost.all_gather_seconds, whole),
    (cost.all_to_all_seconds, shares),
    (cost.reduce_scatter_seconds, shares),
    (cost.all_reduce_seconds, shares + shares),
  ]:
    assert function(n, p, LINK) == pytest.approx(simulated_ring(chunks, LINK, p))


def simulated_doubling(n, link, p):
  """The time of an all-gather whose steps double what each worker has."""
  time, have = 0.0, 1
  while have < p:
    time += link.latency + have * n / link.bytes_per_second
    have *= 2
  return time


@pytest.mark.parametrize("p", [1, 2, 4, 16])
def test_recursive_ones_take_as_long_as_their_doublings(p):
  n = 6e4
  options = {"algorithm": "recursive"}
  doubled = simulated_doubling(n, LINK, p)
  assert cost.all_gather_seconds(n, p, LINK, **options) == pytest.approx(doubled)
  halved = simulated_doubling(n / p, LINK, p)
  for function in (cost.all_to_all_seconds, cost.reduce_scatter_seconds):
    assert function(n, p, LINK, **options) == pytest.approx(halved)
  both = cost.all_reduce_seconds(n, p, LINK, **options)
  assert both == pytest.approx(2 * halved)


def test_additions_switches_and_trees():
  assert cost.all_reduce_seconds(0, 4, LINK, add=8.0) == pytest.approx(6e-3 + 6)
  assert cost.reduce_scatter_seconds(0, 4, LINK, add=8.0) == pytest.approx(3e-3 + 6)
  assert cost.ppermute_seconds(1e6, 4, LINK, messages=3) == pytest.approx(3 * 1.001)
  assert cost.ppermute_seconds(1e6, 1, LINK) == 0
  assert cost.tree_seconds(1e6, 8, LINK) == pytest.approx(3 * 1.001)
  assert cost.tree_seconds(1e6, 6, LINK) == pytest.approx(math.log2(6) * 1.001)


FUNCTIONS = [
  cost.all_gather_seconds,
  cost.all_to_all_seconds,
  cost.reduce_scatter_seconds,
  cost.all_reduce_seconds,
  cost.ppermute_seconds,
  cost.tree_seconds,
]
numbers = st.floats(1e-9, 1e9)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(FUNCTIONS), st.integers(1, 300), numbers, numbers, numbers)
def test_units_and_directions(function, p, n, latency, rate):
  """Seconds are latency plus bytes over rate, and no input pulls the wrong way."""
  still = Link(latency=0.0, bytes_per_second=rate)
  twice = Link(latency=0.0, bytes_per_second=2 * rate)
  assert function(n, p, twice) == pytest.approx(function(n, p, still) / 2)
  assert function(2 * n, p, still) == pytest.approx(2 * function(n, p, still))
  link = Link(latency=latency, bytes_per_second=rate)
  here = function(n, p, link)
  assert here == 0 if p == 1 else here > 0
  assert function(n, p, still) <= here <= function(n, p + 1, link)
  assert here <= function(2 * n, p, link)


def test_a_factor_is_of_one_collective_and_size():
  link = dataclasses.replace(LINK, factor={("all_gather", 4): 3.0})
  assert cost.all_gather_seconds(1e6, 4, link) == pytest.approx(3e-3 + 9)
  assert cost.all_gather_seconds(1e6, 5, link) == pytest.approx(4e-3 + 4)
  assert cost.all_to_all_seconds(1e6, 4, link) == pytest.approx(3e-3 + 0.75)


def test_files_bring_everything_back(tmp_path):
  link = Link(latency=1 / 3, bytes_per_second=7e9, factor={("ppermute", 2): 2.1})
  for value in (link, SPEED):
    value.save(tmp_path / "file.json")
    assert type(value).load(tmp_path / "file.json") == value
    assert hash(value) == hash(type(value).load(tmp_path / "file.json"))
  for other in (Link, CodecSpeed):
    (tmp_path / "file.json").write_text('{"other": 1}')
    with pytest.raises(ValueError, match="`path` must be a file of"):
      other.load(tmp_path / "file.json")


NUMBERS = [0, -1.0, math.nan, math.inf, "1", None, True]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_bad_numbers_are_refused_with_the_rule(value):
  refused = f"must be a finite number above 0, got {value!r}"
  with pytest.raises(ValueError, match=f"`bytes_per_second` {refused}"):
    Link(latency=0.0, bytes_per_second=value)
  with pytest.raises(ValueError, match="`factor.*above 0, got"):
    Link(latency=0.0, bytes_per_second=1.0, factor={("all_gather", 2): value})
  with pytest.raises(ValueError, match=f"`factor` {refused}"):
    SPEED.times(value)
  if value == 0 and value is not False:
    return
  refused = f"must be a finite number of 0 or more, got {value!r}"
  for name, make in [
    ("latency", lambda: Link(latency=value, bytes_per_second=1.0)),
    ("encode", lambda: CodecSpeed(encode=value, decode=0.0, add=0.0)),
    ("keep", lambda: CodecSpeed(encode=0.0, decode=0.0, add=0.0, keep=value)),
    ("add", lambda: Cluster(workers=1, link=LINK, add=value)),
    ("nbytes", lambda: cost.all_gather_seconds(value, 2, LINK)),
    ("add", lambda: cost.all_reduce_seconds(1.0, 2, LINK, add=value)),
    ("forward", lambda: cost.step_seconds(value, 1.0, [], overlap=True)),
    ("compute", lambda: cost.weak_scaling(value, [], CLUSTER, SPEED)),
  ]:
    with pytest.raises(ValueError, match=f"`{name}` {refused}"):
      make()


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: cost.all_gather_seconds(1, 0, LINK), "`workers` must be an integer of 1"),
    (lambda: cost.all_gather_seconds(1, 2.0, LINK), "`workers` must be an integer"),
    (lambda: cost.tree_seconds(1, 0.5, LINK), "`workers` must be at least 1, got 0.5"),
    (
      lambda: cost.all_reduce_seconds(1, 6, LINK, algorithm="recursive"),
      "`workers` must be a power of two .*, got 6",
    ),
    (
      lambda: cost.all_reduce_seconds(1, 6, LINK, algorithm="tree"),
      "`algorithm` must be one of .*, got 'tree'",
    ),
    (
      lambda: Link(latency=0, bytes_per_second=1, factor={"all_gather": 1.0}),
      "`factor` must have pairs of .*, got 'all_gather'",
    ),
    (lambda: Cluster(workers=0, link=LINK), "`workers` must be .* or more, got 0"),
    (lambda: Cluster(workers=4, link=LINK, inside=LINK), "`group_size` must be given"),
    (
      lambda: Cluster(workers=4, link=LINK, inside=LINK, group_size=3),
      "`group_size` must divide the 4 workers, got 3",
    ),
    (
      lambda: cost.exchange_seconds(explain(2), CLUSTER, SPEED),
      "`cluster` must have the 2 workers of the explanation, got 4",
    ),
    (
      lambda: cost.step_seconds(
        1.0, 1.0, [(0.6, message()), (0.5, message())], overlap=True
      ),
      r"`messages` must have rising shares from 0 to 1, got \[0.6, 0.5\]",
    ),
  ],
)
def test_bad_arguments_are_refused_with_the_rule(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_the_modules_need_no_jax():
  """Each imports where JAX is not installed, and the package above it is empty.

  The planner, measurements and bits for each leaf are the exceptions; the name of the
  first comes with the package all the same.
  """
  folder = pages.ROOT / "gradcomp"
  room = folder / "_src"
  files = list((room / "cost").glob("*.py"))
  files.remove(room / "cost/measure.py")
  files.remove(room / "cost/allocate.py")
  names = sorted(".".join(x.relative_to(room).with_suffix("").parts) for x in files)
  code = f"""
import importlib, sys, types
for name in ("jax", "jaxlib", "optax"):
  sys.modules[name] = None  # importing it is an ImportError
package = types.ModuleType("gradcomp")
package.__path__ = [{str(folder)!r}]
sys.modules["gradcomp"] = package
for name in {names!r}:
  importlib.import_module("gradcomp._src." + name)
from gradcomp import cost
from gradcomp.cost import Link, all_gather_seconds
assert all_gather_seconds(1e6, 2, Link(latency=0, bytes_per_second=1e6)) == 1
assert "plan" in dir(cost)
"""
  subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
