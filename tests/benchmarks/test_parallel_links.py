"""The benchmarks of activations and layers on links: what they measure and predict."""

import doctest

import jax
import numpy as np
import pytest

from benchmarks.common import tables
from benchmarks.links import activations, layers, layers_worker
from benchmarks.links.activations import Sizes, name_of, parts, programs, step
from tests.support.assertions import assert_same_bits

SIZES = Sizes(8, 64, 32, (64,), (1, 4))
HOSTS = 2


def measured(**seconds):
  """Seconds of all programs: of transfers and products by their names, 9 of others."""
  return {name_of(call): seconds.get(call[0], 9.0) for call in programs(SIZES, HOSTS)}


def test_every_program_runs_once_and_the_tables_need_no_other():
  found = programs(SIZES, HOSTS)
  names = [name_of(call) for call in found]
  assert len(set(names)) == len(names)
  for codec in ("f32", "linear"):
    for passes in SIZES.passes:
      assert set(map(name_of, parts(SIZES, HOSTS, codec, passes))) <= set(names)
      assert name_of(step(SIZES, codec, passes, True)) in names
  # One pass has nothing to gather ahead.
  assert name_of(step(SIZES, "f32", 1, False)) not in names
  assert name_of(step(SIZES, "f32", 4, False)) in names


def test_a_pass_sends_its_part_of_the_samples():
  gather, scatter, product, products = parts(SIZES, HOSTS, "linear", 4)
  assert gather == ["gather", "linear", 2, 64, 0]
  assert scatter == ["scatter", "linear", 2, 64, 0]
  assert product[1:] == products[1:] == [HOSTS * 2, 64, 32]


@pytest.mark.parametrize(
  "there, back, ahead, after, paper",
  [
    # Products of 2 s forward and 3 s backward, four passes: 20 s of them.
    (1, 1, 20 + 1 + 1, 20 + 8, 20 + 1 + 1),  # both are hidden but for the first
    (5, 1, 20 + 5 + 3 * 3 + 1, 20 + 24, 20 + 3 + 1),
    (5, 7, 20 + 5 + 3 * 3 + 7 + 3 * 4, 20 + 48, 20 + 3 + 4),
  ],
)
def test_a_transfer_hides_under_the_products_of_its_direction(
  there, back, ahead, after, paper
):
  seconds = measured(gather=there, scatter=back, product=2, products=5)
  found = activations.predicted(seconds, SIZES, HOSTS, "f32", 4)
  assert found == {"ahead": ahead, "after": after, "paper": paper}


def test_the_page_has_a_line_for_each_program():
  entry = {"bytes_sent": 1e6, "bytes_wire_report": 1_000_000}
  run = {
    "rate": "1gbit",
    "hosts": HOSTS,
    "sizes": SIZES._asdict(),
    "repeats": 2,
    "load_and_cores": [0.5, 2.0],
    "load_after": 3.0,
    "probe": [1.2e8],
    "programs": {
      name: entry | {"median_seconds": 1e-3 * value}
      for name, value in measured(gather=4, scatter=8).items()
    },
  }
  run["programs"][name_of(["gather", "linear", 8, 32, 1])]["median_seconds"] = 2e-3
  unreached = run | {"rate": "100mbit", "programs": {}}
  text = activations.markdown({"runs": [run, unreached]})
  assert "| gather | [8, 64/2] | linear | 2.0 | 1.00 | 8.0 | 2.00 | 2.00 |" in text
  assert "| scatter | [8, 64/2] | linear | 8.0 | 1.00 | 8.0 | 1.00 | 1.00 |" in text
  assert "| linear | 4 | 9 | 9 |" in text
  assert "Raw TCP carries 960 Mbit/s" in text and "0.5 before the run and 3.0" in text
  assert text.endswith("This machine does not reach the rate.\n")


def test_the_examples_of_tables_run():
  found = doctest.testmod(tables)
  assert found.attempted and not found.failed


def test_spans_of_a_trace_are_joined():
  found = doctest.testmod(layers_worker)
  assert found.attempted and not found.failed


@pytest.mark.bits
def test_steps_of_layers_have_the_means_of_one_another():
  """The plain ones to the bit, and 4 bits to their rounding."""
  mesh = jax.make_mesh((HOSTS,), ("data",), devices=jax.devices()[:HOSTS])
  stack = jax.random.normal(jax.random.key(0), (3, 64, 64)) / 8
  x = jax.random.normal(jax.random.key(1), (HOSTS * 4, 64))
  arrays = (
    jax.device_put(stack, jax.NamedSharding(mesh, jax.P())),
    jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))),
  )
  programs = {x: layers_worker.program(mesh, x, arrays) for x in layers_worker.STEPS}
  means = {
    name: np.asarray(timed.program(*arrays)[0][0]) for name, timed in programs.items()
  }
  own = means.pop(layers.ALONE).reshape(HOSTS, *stack.shape)
  plain = means.pop(layers_worker.PLAIN)
  assert_same_bits(plain, (own[0] + own[1]) / 2)
  assert_same_bits(means.pop("plain mean, inside"), plain)
  # Of 7 levels: one where numbers are rounded at random, and half of one for means.
  bound = np.abs(own).max() * (1 + 1 / 2) / 7
  assert len(means) == 3
  assert all(np.abs(mean - plain).max() <= bound for mean in means.values())
  traced = layers_worker.side_by_side(programs[layers_worker.PLAIN])
  assert min(traced["collectives"], traced["work"]) > 0


def test_the_page_of_layers_has_a_line_for_each_step():
  step = {"median_seconds": 0.5, "bytes_sent": 2e6}
  trace = {"collectives": 0.3, "work": 0.1, "both": 0.02}
  run = {
    **{"rate": "1gbit", "hosts": HOSTS, "layers": 8, "width": 64, "batch": 2},
    **{"repeats": 3, "load_and_cores": [0.5, 2.0], "probe": [1.2e8, 1.1e8]},
    "steps": {"4 bits": step, layers.ALONE: step | {"median_seconds": 0.1}},
    "traces": {"4 bits": trace | {"exposed_share": 1.0, "messages": 7}},
  }
  text = layers.markdown({"machine": {"jax": "1"}, "runs": [run]})
  assert "| 4 bits | 500 | 400 | 2.00 | 7 | 300 | 20 | 100% |" in text
  assert "| no exchange | 100 |  |  |  |  |  |  |" in text
  unreached = layers.markdown({"machine": {"jax": "1"}, "runs": [run | {"steps": {}}]})
  assert unreached.endswith("This machine does not reach the rate.\n")
