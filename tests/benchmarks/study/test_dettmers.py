"""Trainings of Dettmers' nets go on with the same bits, and count what they send."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.study import dettmers
from benchmarks.training.model_parallel.data_types import ARMS
from benchmarks.training.model_parallel.ways import WORKERS, data
from examples.lib.checkpoints import Saved
from gradcomp.codecs import Dense
from tests.benchmarks.study.records import SETTING
from tests.plugins.slow_cases import slow

CLASSES, SIDE, HIDDEN, BATCH = 10, 8, 16, 32
CUT = SETTING._replace(
  **dict(way="model", network="dense-relu", workers=WORKERS, batch=BATCH),
  **dict(steps=4, points=2, optimizer="rmsprop", learning_rate=0.003),
  **dict(momentum=None, schedule="constant"),
)
LEARNT = [
  CUT._replace(way="data", codec="dynamic-tree"),
  *slow(
    (CUT._replace(network="dense-logistic", schedule="cosine"),),
    (CUT._replace(network="three-dense-updates", codec="linear"),),
  ),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
  """Nets of few units."""
  monkeypatch.setattr(dettmers, "HIDDEN", HIDDEN)


def drawn(channels=1):
  rng = np.random.default_rng(0)
  split = lambda count: data.Split(
    rng.integers(0, 256, (count, SIDE, SIDE, channels), np.uint8),
    rng.integers(0, CLASSES, count, np.int32),
  )
  return data.ImageSet(split(80), split(30), CLASSES)


class Stopped(Exception):
  pass


@pytest.mark.parametrize("setting", LEARNT)
def test_a_training_that_was_stopped_ends_with_the_same_bits(
  setting, tmp_path, monkeypatch
):
  # Tests are in two parts, the second of which is smaller.
  monkeypatch.setattr(dettmers, "_TESTED", 20)
  trainer = dettmers.trainer(drawn(), setting)
  whole = trainer.train(3)
  assert [x["step"] for x in whole["points"]] == [2, 4]
  # Float32 that is cut says how types would round.
  assert ("layer_errors" in whole["points"][0]) == (setting.codec == "f32")
  assert trainer.train(4)["fingerprint"] != whole["fingerprint"]
  steps = []

  def stepped():
    steps.append(None)
    if len(steps) == 4:
      raise Stopped

  kept = lambda: Saved(tmp_path / "saved", steps=setting.steps)
  with pytest.raises(Stopped), kept() as saved:
    trainer.train(3, stepped, saved)
  with kept() as saved:
    again = trainer.train(3, stepped, saved)
  assert again == whole
  assert len(steps) == 4 + 1  # the last step alone, from the state behind the third


@pytest.mark.parametrize("codec", ["f32", "dynamic-tree"])
def test_bytes_are_those_of_all_payloads(codec):
  """Each of N workers sends its payloads to N - 1 others."""

  def payload(codec, *shape):
    encoded = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(shape, jnp.float32))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(encoded))

  sizes = (SIDE * SIDE, HIDDEN, HIDDEN, 12)
  arrays = [*itertools.pairwise(sizes), *((n,) for n in sizes[1:])]
  cut = [HIDDEN] * 4 + [12]  # of two hidden layers and their errors, and of the logits
  model = [(BATCH, n // WORKERS) for n in cut]
  for way, shapes, least in (("data", arrays, Dense()), ("model", model, None)):
    found = dettmers.trainer(drawn(), CUT._replace(way=way, codec=codec)).bytes()
    plain, sent = (
      # Weights and biases are in float32 where that is less.
      (WORKERS - 1) * sum(min(payload(y, *s) for y in (x, least or x)) for s in shapes)
      for x in (Dense(), ARMS[codec.replace("-", "_")])
    )
    assert found == {"bytes_a_step": sent, "ratio": sent / plain, "exchanges": []}


WRONG = [
  (dict(workers=8), "`workers` must be 4, got 8"),
  (dict(way="emulated"), "`way` must be one of .* got 'emulated'"),
  (dict(way="data", network="local"), "`network` must .* way 'data', got 'local'"),
  (dict(codec="qsgd-4"), "`codec` must be one of .* got 'qsgd-4'"),
  (dict(batch=30), "`batch` must be a multiple of 16, got 30"),
]


def test_other_settings_and_colored_images_are_refused():
  for changed, message in WRONG:
    with pytest.raises(ValueError, match=message):
      dettmers.trainer(drawn(), CUT._replace(**changed))
  with pytest.raises(ValueError, match=r"`images` must be square and gray.* 8, 8, 3"):
    dettmers.trainer(drawn(channels=3), CUT)
