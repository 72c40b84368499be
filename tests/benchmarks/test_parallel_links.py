"""The benchmark of activations on links: what it measures, and what it predicts."""

import doctest

import pytest

from benchmarks.common import tables
from benchmarks.links import activations
from benchmarks.links.activations import Sizes, name_of, parts, programs, step

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
