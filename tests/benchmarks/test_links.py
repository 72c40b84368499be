"""The benchmarks of links: what they choose to measure, and what they make of it."""

import functools
import json
import re

import jax
import numpy as np
import pytest

from benchmarks.links import activations, front_picture, launch, layers, results
from benchmarks.links.activations import Sizes, name_of, parts, programs, step
from tests.support import pages
from tests.support.assertions import assert_same_bits

HOSTS = 2
CELL = {"hosts": HOSTS, "mib": 64, "leaves": 1, "repeats": 2}
MACHINE = {"jax": "1", "cpu": "a", "cores": 2}


def took(milliseconds):
  seconds = {"median_seconds": milliseconds / 1e3, "baseline_seconds": 0.1}
  return seconds | {"bytes_sent": 8e6}


def run(steps, rate="1gbit", **others):
  speed = {"1gbit": 1e9, "100mbit": 1e8}[rate]
  kinds = {"probe": [1.2e8, 1.1e8], "parts": {}, "failed": {}} | others
  return CELL | {"rate": rate, "bits_per_second": speed, "steps": steps} | kinds


def test_the_slowest_host_takes_the_time():
  alike = {"cpu_seconds": [0.5, 0.5], "error": 0.0}
  alike |= {"sent": [8, 8], "wire_report": 8}
  took = lambda crc32, *seconds: alike | {"seconds": [*seconds], "crc32": crc32}
  first = {"plain": took(1, 4.0, 6.0), "x": took(1, 1.0, 5.0)}
  second = {"plain": took(1, 5.0, 5.0), "x": took(2, 3.0, 2.0)}
  reports = [{"steps": first}, {"steps": second}]
  found = results.combine(reports, "steps", interface="eth0")
  assert [x["seconds"] for x in found.values()] == [[5.0, 6.0], [3.0, 5.0]]
  assert [x["same_bits"] for x in found.values()] == [True, False]
  assert results.speed_up(found["x"]) == 5.5 / 4.0
  shared = results.combine(reports, "steps", interface="lo")
  assert [x["x"]["bytes_sent"] for x in (found, shared)] == [8, 4]


def test_cells_stay_apart_and_steps_join():
  again = run({"b": took(4)}, probe=[], failed={"c": "hung after 60 s"})
  once = run({"a": took(1), "b": took(2)}), run({"a": took(3)}, rate="100mbit")
  found = functools.reduce(results.merge, (*once, again), {"runs": []})
  runs = found["runs"]
  assert [len(run["steps"]) for run in runs] == [2, 1]
  first = results.find(runs, hosts=2, rate="1gbit", leaves=1)
  assert first["steps"] == {"a": took(1), "b": took(4)}
  assert first["probe"] == [1.2e8, 1.1e8] and first["failed"]
  runs = results.merge(found, run({"c": took(5)}))["runs"]
  assert not runs[0]["failed"]
  with pytest.raises(KeyError):
    results.find(runs, hosts=4, rate="1gbit", leaves=1)


def test_results_of_another_machine_are_not_joined(tmp_path, monkeypatch):
  path = tmp_path / "link_speed.json"
  monkeypatch.setattr(launch, "machine", lambda: MACHINE)
  assert results.read(path) == {"machine": MACHINE, "runs": []}
  path.write_text(json.dumps({"machine": MACHINE | {"kernel": "old"}, "runs": [1]}))
  assert results.read(path)["runs"] == [1]
  monkeypatch.setattr(launch, "machine", lambda: MACHINE | {"cores": 4})
  with pytest.raises(ValueError, match="`cores` is 2, and here it is 4"):
    results.read(path)


def test_the_words_of_the_picture_are_the_times_of_the_records():
  times = [f"{time:.0f}" for time in front_picture.milliseconds().values()]
  for page in ("README.md", "docs/results/speed.md"):
    (words,) = re.findall(r"!\[(.*)\]\(.*speed\.png\)", (pages.ROOT / page).read_text())
    assert re.findall(r"(?:f32|bf16|bits) (\d+)", words) == times


SIZES = Sizes(8, 64, 32, (64,), (1, 4))


def test_every_program_runs_once_and_the_tables_need_no_other():
  names = [name_of(call) for call in programs(SIZES, HOSTS)]
  needed = {
    name_of(call)
    for codec in ("f32", "linear")
    for passes in SIZES.passes
    for call in (*parts(SIZES, HOSTS, codec, passes), step(SIZES, codec, passes, True))
  }
  needed |= {name_of(step(SIZES, "f32", 4, False))}
  assert len(set(names)) == len(names) and needed <= set(names)
  assert name_of(step(SIZES, "f32", 1, False)) not in names
  gather, scatter, product, products = parts(SIZES, HOSTS, "linear", 4)
  assert [gather, scatter] == [[x, "linear", 2, 64, 0] for x in ("gather", "scatter")]
  assert product[1:] == products[1:] == [HOSTS * 2, 64, 32]


def test_a_transfer_hides_under_the_products_of_its_direction():
  """Products of 2 s forward and 3 s backward, four passes: 20 s of them."""
  for there, back, ahead, after, paper in (
    (1, 1, 20 + 1 + 1, 20 + 8, 20 + 1 + 1),  # both are hidden but for the first
    (5, 1, 20 + 5 + 3 * 3 + 1, 20 + 24, 20 + 3 + 1),
    (5, 7, 20 + 5 + 3 * 3 + 7 + 3 * 4, 20 + 48, 20 + 3 + 4),
  ):
    takes = {"gather": there, "scatter": back, "product": 2, "products": 5}
    seconds = {name_of(x): takes.get(x[0], 9.0) for x in programs(SIZES, HOSTS)}
    found = activations.predicted(seconds, SIZES, HOSTS, "f32", 4)
    assert found == {"ahead": ahead, "after": after, "paper": paper}


@pytest.mark.bits
def test_steps_of_layers_have_the_means_of_one_another():
  """The plain ones to the bit, and 4 bits to their rounding."""
  mesh = jax.make_mesh((HOSTS,), ("data",), devices=jax.devices()[:HOSTS])
  rng = np.random.default_rng(0)
  stack = rng.standard_normal((3, 64, 64), np.float32) / 8
  x = rng.standard_normal((HOSTS * 4, 64), np.float32)
  put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
  arrays = put(stack), put(x, "data")
  programs = {x: layers.program(mesh, x, arrays) for x in layers.STEPS}
  means = {x: np.asarray(y.program(*arrays)[0][0]) for x, y in programs.items()}
  own = means.pop(layers.ALONE).reshape(HOSTS, *stack.shape)
  plain = means.pop(layers.PLAIN)
  assert_same_bits(plain, (own[0] + own[1]) / 2)
  assert_same_bits(means.pop("plain mean, inside"), plain)
  # Of 7 levels: one where numbers are rounded at random, and half of one for means.
  bound = np.abs(own).max() * (1 + 1 / 2) / 7
  assert len(means) == 3
  assert all(np.abs(mean - plain).max() <= bound for mean in means.values())
  traced = layers.side_by_side(programs[layers.PLAIN])
  assert min(traced["collectives"], traced["work"]) > 0
