"""Links and codecs are measured on emulated devices; on hosts in test_many_hosts.py."""

import functools
import itertools

import jax
import numpy as np
import pytest

from gradcomp import cost
from gradcomp._src.cost.measure import line
from gradcomp.codecs import QSGD, TopK
from gradcomp.cost import CodecSpeed, Link
from tests.errors import table

SIZES = (1 << 10, 1 << 14)


def mesh(*shape):
  devices = jax.devices()[: np.prod(shape)]
  return jax.make_mesh(shape, ("host", "chip")[: len(shape)], devices=devices)


def clock(monkeypatch, seconds):
  """A clock that shows no time but between calls, where it takes these in turn."""
  calls = itertools.pairwise(itertools.accumulate(seconds, initial=0.0))
  shown = itertools.chain.from_iterable(calls)
  monkeypatch.setattr("time.perf_counter", lambda: next(shown))


def test_each_collective_and_size_has_a_factor(capsys):
  link = Link.measure(mesh(4), sizes=SIZES, repeats=1)
  names = ("all_gather", "all_to_all", "all_reduce", "ppermute")
  assert link.factor.keys() == {*((name, 4) for name in names), ("ppermute", 2)}
  assert min(link.factor.values()) == 1.0
  said = capsys.readouterr().err.splitlines()
  assert len(said) == 5 and said[0].startswith("all_gather, 4 workers: ")


def test_one_axis_of_a_mesh_is_measured_alone(capsys):
  options = dict(sizes=SIZES, repeats=1, progress=False)
  for axis, workers in (("chip", 3), (None, 6)):
    found = Link.measure(mesh(2, 3), axis_name=axis, **options)
    assert {n for _, n in found.factor} == {workers}
  assert capsys.readouterr().err == ""


def test_a_link_of_known_rate_is_found(monkeypatch):
  """Its collectives take what the cost model says, so that it must come out again."""
  factor = {("all_gather", 4): 1.5, ("all_to_all", 4): 2.0, ("all_reduce", 4): 1.25}
  factor |= {("ppermute", 4): 1.0, ("ppermute", 2): 3.0}
  true = Link(latency=1e-3, bytes_per_second=1e6, factor=factor)
  swapping = Link(latency=1e-3, bytes_per_second=1e6 / 3)
  times = []
  for name, put_in in [  # of what a worker puts in, it sends so many bytes
    ("all_gather", lambda size: -(-size // 12) * 4),
    ("all_to_all", lambda size: -(-size // 12) * 16),
    ("all_reduce", lambda size: -(-size * 2 // 12) * 4),
    ("ppermute", lambda size: size),
  ]:
    function = functools.partial(cost.collective_seconds, name)
    times += [function(put_in(size), 4, true) for size in SIZES]
  times += [cost.collective_seconds("ppermute", size, 4, swapping) for size in SIZES]
  clock(monkeypatch, times)
  found = Link.measure(mesh(4), sizes=SIZES, repeats=1, progress=False)
  assert found.latency == pytest.approx(1e-3, rel=1e-4)
  assert found.bytes_per_second == pytest.approx(1e6, rel=1e-4)
  assert found.factor == pytest.approx(factor, rel=1e-4)


def test_short_messages_count_as_much_as_long_ones():
  """1 % of the longest would hide all of the latency in a plain fit."""
  sizes = {2**16: 1, 2**20: 1, 2**23: 1, 2**26: 1.01}
  start, byte = line([(n, more * (1e-4 + 8e-9 * n)) for n, more in sizes.items()])
  assert start == pytest.approx(1e-4, rel=0.1)
  assert byte == pytest.approx(8e-9, rel=0.01)
  assert line([(1.0, 1.0), (2.0, 3.0)])[0] == 0.0  # would be below 0
  assert line([(1.0, 3.0), (2.0, 2.0)])[1] > 0.0


@pytest.mark.parametrize("codec", [QSGD(bits=4), TopK(density=0.1)])
def test_speeds_are_seconds_an_element(codec, monkeypatch):
  clock(monkeypatch, [4.0, 8.0, 16.0, 10.0, 16.0])
  speed = CodecSpeed.measure(codec, elements=4096, repeats=1)
  each = {"encode": 4, "decode": 8, "add": 4, "keep": 6}
  assert speed == CodecSpeed(**{name: x / 4096 for name, x in each.items()})


ROWS = """
Link.measure(mesh(1)) -> `mesh` must have 2 workers ... ('host',), got 1
Link.measure(mesh(2), sizes=(4, 4)) -> `sizes` must hold two ... [4]
Link.measure(mesh(2), sizes=(0, 4)) -> `sizes` must be ... , got 0
Link.measure(mesh(2), repeats=0) -> `repeats` must be ... , got 0
CodecSpeed.measure(QSGD(), 0) -> `elements` must be ... , got 0
CodecSpeed.measure(QSGD(), repeats=-1) -> `repeats` must be ... , got -1
"""
test_bad_arguments_are_refused_with_the_rule = table.refused(ROWS, globals())
