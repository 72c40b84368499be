"""Predicted steps of layers in a loop: the page, the loop's trips, programs' bytes."""

import json

import pytest

from benchmarks.common import cli
from benchmarks.compilers import overlap, record
from benchmarks.models import predicted_steps
from benchmarks.models.predicted_steps import LAYERS, MATRICES, WORKERS, Layer
from gradcomp.cost import Cluster, Link

FOLDER = cli.RESULTS / "models"
ROWS = list(predicted_steps.rows())


def trips(layer, tokens, second):
  """Seconds of a scan whose every trip waits for its messages, ``second`` of them."""
  products = tokens * layer.products
  own = (1 - predicted_steps.FORWARD) * products + layer.codec + layer.near
  total = LAYERS * predicted_steps.FORWARD * products
  for trip in range(LAYERS + 2):
    # The first stage of the layer above and the second of the one above that.
    sent = (layer.far - second) * (0 < trip <= LAYERS) + second * (trip > 1)
    total += max(own if trip < LAYERS else 0.0, sent)
  return total


@pytest.mark.parametrize("far", [0.0, 0.3, 0.9, 1.1, 4.0])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_a_loop_takes_at_most_one_second_stage_longer(far, share):
  """Since it waits in each trip, and messages of the model do not."""
  layer = Layer(products=1 / 64, codec=0.125, near=0.0625, far=far)
  model = layer.seconds(64, inside=True)
  rounding = 1e-9  # of a sum of some 50 numbers near 1
  more = trips(layer, 64, share * far) - model
  assert -rounding <= more <= share * far + rounding


def test_behind_the_loop_nothing_hides():
  layer = Layer(products=2.0, codec=0.5, near=0.25, far=3.0)
  assert layer.seconds(4, inside=False) == LAYERS * (8 + 0.5 + 0.25 + 3)
  assert layer.seconds(4, inside=True) == LAYERS * (8 + 0.5 + 0.25) + 3


def test_the_bytes_between_gpus_are_those_of_the_compiled_program():
  compiled = record.read(record.FOLDER / "overlap.jsonl")["H100", overlap.BEHIND]
  link = Link(latency=0.0, bytes_per_second=1.0)
  cost = predicted_steps.four_bits(Cluster(workers=WORKERS, link=link))
  # Rows of eight equal shares: what fills them up differs by less than a thousandth.
  known = compiled["bytes"] * MATRICES / overlap.SCANNED
  assert cost.bytes_sent == pytest.approx(known, rel=1e-3)
  assert cost.wire_seconds == pytest.approx(cost.bytes_sent, rel=1e-3)


def test_between_slices_go_a_quarter_of_a_plain_mean_and_five_eighths_of_a_payload():
  """Slices add up first; a chip sends four shares of eight, and the mean of its own."""
  peak = 197e12  # docs.cloud.google.com/tpu/docs/v5e
  least = 2 * predicted_steps.SIZE / predicted_steps.FORWARD / peak
  payload = 4.0625 / 8  # bytes of an element: 4 bits, and 32 for the scale of 512
  want = {"bfloat16": 2 / 4, "float32": 4 / 4, "4 bits": (4 / 8 + 1 / 8) * payload}
  for name, layers in predicted_steps.slices():
    far = want[name.split(", ")[1]] * predicted_steps.SIZE / predicted_steps.NETWORK
    for layer in layers:
      assert layer.far == pytest.approx(far, rel=1e-9)  # of a few rounded sums
      assert 1 < layer.products / least < 3  # no faster than a TPU's peak


def test_the_page_is_that_of_the_records():
  """``python -m benchmarks.models.predicted_steps`` writes both files."""
  assert json.loads((FOLDER / "predicted_steps.json").read_text()) == ROWS
  assert (FOLDER / "predicted_steps.md").read_text() == predicted_steps.page(ROWS)


def test_what_the_page_says_of_the_table():
  """Of docs/results/overlap.md."""
  assert all(x["inside"] < x["behind"] for x in ROWS)
  assert len(ROWS) == 2 * 2 * 3
  for i in range(0, len(ROWS), 3):
    _, half, ours = ROWS[i : i + 3]
    assert half["exchange"].endswith("bfloat16")
    if ours["machines"].endswith("H100"):
      assert ours["behind"] < 0.54 * half["behind"]
      assert half["parts"][3] > half["parts"][0]
    else:
      assert 0.95 < ours["behind"] / half["behind"] < 0.99
      assert half["inside"] < ours["inside"]
  many = ROWS[-1]
  assert many["tokens"] == max(predicted_steps.TOKENS)
  assert many["inside"] < 1.03 * sum(many["parts"][:2])
