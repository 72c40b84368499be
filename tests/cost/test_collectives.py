"""Seconds of collectives are those of their messages, one after the other."""

import collections
import dataclasses
import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcomp import cost
from gradcomp.cost import Cluster, CodecSpeed, Link
from tests.errors import table
from tests.support.cases.cost import LINK, SPEED, message
from tests.support.cases.cost import explain as explain

CLUSTER = Cluster(workers=4, link=LINK)
N = 6e4  # bytes
NAMES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "ppermute", "tree")
FUNCTIONS = [functools.partial(cost.collective_seconds, name) for name in NAMES]


@pytest.mark.parametrize("p", [1, 2, 3, 8, 16])
def test_they_take_as_long_as_their_messages_one_by_one(p):
  """Around a ring, or in steps that double what each worker has."""
  after = lambda chunks: sum(LINK.latency + x / LINK.bytes_per_second for x in chunks)
  ways = {"ring": [1] * (p - 1), "recursive": [2**i for i in range(p.bit_length() - 1)]}
  for algorithm in ways if p != 3 else ("ring",):
    whole, shares = (after([n * x for x in ways[algorithm]]) for n in (N, N / p))
    each = (whole, shares, shares, 2 * shares)
    for function, expected in zip(FUNCTIONS[:4], each, strict=True):
      found = function(N, p, LINK, algorithm=algorithm)
      assert found == pytest.approx(expected)


def test_additions_messages_trees_and_factors():
  """A factor is of one collective and one number of workers."""
  link = dataclasses.replace(LINK, factor={("all_gather", 4): 3.0})
  for found, expected in [
    (cost.collective_seconds("all_reduce", 0, 4, LINK, add=8.0), 6e-3 + 6),
    (cost.collective_seconds("reduce_scatter", 0, 4, LINK, add=8.0), 3e-3 + 6),
    (cost.collective_seconds("ppermute", 1e6, 4, LINK, messages=3), 3 * 1.001),
    (cost.collective_seconds("ppermute", 1e6, 1, LINK), 0),
    (cost.collective_seconds("tree", 1e6, 8, LINK), 3 * 1.001),
    (cost.collective_seconds("tree", 1e6, 6, LINK), math.log2(6) * 1.001),
    (cost.collective_seconds("all_gather", 1e6, 4, link), 3e-3 + 9),
    (cost.collective_seconds("all_gather", 1e6, 5, link), 4e-3 + 4),
    (cost.collective_seconds("all_to_all", 1e6, 4, link), 3e-3 + 0.75),
  ]:
    assert found == pytest.approx(expected)


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


def loads(sides, pairs):
  """The payloads on each port of a torus: each goes the shorter way, side by side."""
  found = collections.Counter()
  for start, end in pairs:
    at = list(start)
    for axis, side in enumerate(sides):
      ahead = (end[axis] - at[axis]) % side
      # Of two ways that are as long, each takes a half.
      shorter = min(ahead, side - ahead)
      ways = [x for x in ((1, ahead), (-1, side - ahead)) if x[1] == shorter]
      for step, hops in ways:
        for hop in range(hops):
          here = (*at[:axis], (at[axis] + step * hop) % side, *at[axis + 1 :])
          found[here, axis, step] += 1 / len(ways)
      at[axis] = end[axis]
  return found


@pytest.mark.parametrize("sides", [(2,), (5,), (8,), (4, 4), (2, 8), (3, 5), (4, 2, 3)])
def test_a_torus_takes_as_long_as_its_fullest_port(sides):
  link, nodes = Link.torus(sides, port=10.0, latency=0.0), [*np.ndindex(*sides)]
  size = len(nodes)
  apart = loads(sides, [(a, b) for a in nodes for b in nodes])
  found = cost.collective_seconds("all_to_all", N, size, link)
  assert found == pytest.approx(max(apart.values()) * N / size / 10.0)
  # A broadcast of each has a hop a receiver, and all ports share them.
  found = cost.collective_seconds("all_gather", N, size, link)
  assert found == pytest.approx(size * (size - 1) * N / (2 * len(sides) * size) / 10.0)
  if size > 2:  # else both ports have the same neighbor
    ring = [(x, ((x[0] + 1) % sides[0], *x[1:])) for x in nodes]
    whole = max(loads(sides, ring).values()) if sides[0] > 2 else 1
    found = cost.collective_seconds("ppermute", N, size, link)
    assert found == pytest.approx(whole * N / 10.0)


def test_files_bring_everything_back(tmp_path):
  path = tmp_path / "file.json"
  link = Link(latency=1 / 3, bytes_per_second=7e9, factor={("ppermute", 2): 2.1})
  for value in (link, SPEED):
    value.save(path)
    read = type(value).load(path)
    assert read == value and hash(value) == hash(read)
  for other in (Link, CodecSpeed):
    path.write_text('{"other": 1}')
    with pytest.raises(ValueError, match="`path` must be a file of"):
      other.load(path)


WRONG = [(0.6, message()), (0.5, message())]
# Numbers alone are refused by tests/errors/test_numbers.py.
BAD = """
Link(latency=0.0, bytes_per_second=1.0, factor={("all_gather", 2): v}) for v in 0, nan,
  "1", None, True -> `factor ... must be a finite number above 0, got {v}
cost.collective_seconds("all_reduce", 1, 6, LINK, algorithm="recursive") ->
  `workers` must be a power of two ... , got 6
cost.collective_seconds("all_reduce", 1, 6, LINK, algorithm="tree") ->
  `algorithm` must be one of ... , got 'tree'
cost.collective_seconds("all-reduce", 1, 6, LINK) ->
  `collective` must be one of ('all_gather', ... , got 'all-reduce'
Link.torus(v, port=1.0, latency=0.0) for v in (), (1, 1) ->
  `sides` must have at least two workers
Link(latency=0, bytes_per_second=1, factor={"all_gather": 1.0}) ->
  `factor` must have pairs of ... , got 'all_gather'
Cluster(workers=4, link=LINK, inside=LINK) -> `group_size` must be given
Cluster(workers=4, link=LINK, inside=LINK, group_size=3) ->
  `group_size` must divide the 4 workers, got 3
cost.exchange_seconds(explain(2), CLUSTER, SPEED) ->
  `cluster` must have the 2 workers of the explanation, got 4
cost.step_seconds(1.0, 1.0, WRONG, overlap=True) ->
  `messages` must have rising shares from 0 to 1, got [0.6, 0.5]
"""
test_bad_arguments_are_refused_with_the_rule = table.refused(BAD, globals())
