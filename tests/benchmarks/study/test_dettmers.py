"""Trainings of Dettmers' nets go on with the same bits, and count what they send."""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.study import dettmers
from benchmarks.study.model_parallel.ways import ARMS, WORKERS
from examples.lib import images as data
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
  dict(way="data", codec="dynamic-tree"),
  *slow(dict(network="dense-logistic", schedule="cosine")),
  *slow(dict(network="three-dense-updates", codec="linear")),
]


@pytest.fixture(autouse=True)
def nets_of_few_units(monkeypatch):
  monkeypatch.setattr(dettmers, "HIDDEN", HIDDEN)


def drawn(channels=1):
  integers, shape = np.random.default_rng(0).integers, (SIDE, SIDE, channels)
  images = lambda count: integers(0, 256, (count, *shape), np.uint8)
  labels = lambda count: integers(0, CLASSES, count, np.int32)
  train, test = (data.Split(images(x), labels(x)) for x in (80, 30))
  return data.ImageSet(train, test, CLASSES)


@pytest.mark.parametrize("changed", LEARNT)
def test_a_stopped_training_ends_with_the_same_bits(changed, tmp_path, monkeypatch):
  setting = CUT._replace(**changed)
  # Tests are in two parts, the second of which is smaller.
  monkeypatch.setattr(dettmers, "_TESTED", 20)
  trainer = dettmers.trainer(drawn(), setting)
  whole = trainer.train(3)
  assert [x["step"] for x in whole["points"]] == [2, 4]
  # Float32 that is cut says how types would round.
  assert ("layer_errors" in whole["points"][0]) == (setting.codec == "f32")
  assert trainer.train(4)["fingerprint"] != whole["fingerprint"]
  # And then the last step alone, from the state behind the third.
  stepped = mock.Mock(side_effect=[None] * 3 + [InterruptedError, None])
  kept = lambda: Saved(tmp_path / "saved", steps=setting.steps)
  with pytest.raises(InterruptedError), kept() as saved:
    trainer.train(3, stepped, saved)
  with kept() as saved:
    assert trainer.train(3, stepped, saved) == whole
  assert stepped.call_count == 4 + 1


@pytest.mark.parametrize("codec", ["f32", "dynamic-tree"])
def test_bytes_are_those_of_all_payloads(codec):

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


def test_other_settings_and_colored_images_are_refused():
  for message, changed in {
    "`workers` must be 4, got 8": dict(workers=8),
    "`way` must be one of .* got 'emulated'": dict(way="emulated"),
    "`network` must .* 'data', got 'local'": dict(way="data", network="local"),
    "`codec` must be one of .* got 'qsgd-4'": dict(codec="qsgd-4"),
    "`batch` must be a multiple of 16, got 30": dict(batch=30),
  }.items():
    with pytest.raises(ValueError, match=message):
      dettmers.trainer(drawn(), CUT._replace(**changed))
  with pytest.raises(ValueError, match=r"`images` must be square and gray.* 8, 8, 3"):
    dettmers.trainer(drawn(channels=3), CUT)
