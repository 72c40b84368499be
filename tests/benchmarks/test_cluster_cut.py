"""Trainings of Dettmers' nets go on with the same bits, and count what they send."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.study import dettmers, tasks
from benchmarks.training.model_parallel import convolutions
from benchmarks.training.model_parallel.data_types import ARMS
from benchmarks.training.model_parallel.ways import (
  WORKERS,
  columns,
  cut_layers,
  data,
)
from examples.lib.checkpoints import Saved
from gradcomp.codecs import Dense, EightBit
from tests.benchmarks.study_records import SETTING

CLASSES, SIDE, HIDDEN, BATCH = 10, 8, 16, 32
CUT = SETTING._replace(
  way="model",
  network="dense-relu",
  workers=WORKERS,
  batch=BATCH,
  steps=4,
  points=2,
  optimizer="rmsprop",
  learning_rate=0.003,
  momentum=None,
  schedule="constant",
)
LEARNT = {
  "data": CUT._replace(way="data", codec="dynamic-tree"),
  "model": CUT._replace(network="dense-logistic", schedule="cosine"),
  "updates": CUT._replace(network="three-dense-updates", codec="linear"),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
  """Nets of few units."""
  monkeypatch.setattr(dettmers, "HIDDEN", HIDDEN)


def drawn(side=SIDE, channels=1):
  rng = np.random.default_rng(0)

  def split(count):
    pixels = rng.integers(0, 256, (count, side, side, channels), np.uint8)
    return data.Split(pixels, rng.integers(0, CLASSES, count, np.int32))

  return data.ImageSet(split(80), split(30), CLASSES)


class Stopped(Exception):
  pass


@pytest.mark.parametrize(
  "setting",
  [
    pytest.param(setting, marks=[pytest.mark.slow] * (name == "model"), id=name)
    for name, setting in LEARNT.items()
  ],
)
def test_a_training_that_was_stopped_ends_with_the_same_bits(
  setting, tmp_path, monkeypatch
):
  # Tests are in two parts, the second of which is smaller.
  monkeypatch.setattr(dettmers, "_TESTED", 20)
  trainer = dettmers.trainer(drawn(), setting)
  whole = trainer.train(3)
  assert [x["step"] for x in whole["points"]] == [2, 4]
  assert "diverged" not in whole
  other = trainer.train(4)
  assert other["fingerprint"] != whole["fingerprint"]
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


def test_a_training_ends_where_the_loss_is_no_number():
  trainer = dettmers.trainer(drawn(), CUT._replace(learning_rate=1e38))
  points = trainer.train(0)["points"]
  assert [x["step"] for x in points] == [2]
  assert not math.isfinite(points[0]["test_loss"])


def payload(codec, *shape):
  """Bytes of the payload of an array."""
  encoded = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(shape, jnp.float32))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(encoded))


def gradients(codec, *shapes):
  """Counts those of weights and biases, in float32 where that is less."""
  arrays = [shape for m, n in shapes for shape in ((m, n), (n,))]
  return sum(min(payload(x, *shape) for x in (codec, Dense())) for shape in arrays)


def of_data(codec):
  sizes = SIDE * SIDE, HIDDEN, HIDDEN, 12
  return gradients(codec, *itertools.pairwise(sizes))


def of_model(codec):
  """Of two hidden layers and the logits, and of the errors of the former."""
  hidden = payload(codec, BATCH, HIDDEN // WORKERS)
  return 4 * hidden + payload(codec, BATCH, 12 // WORKERS)


def of_three_dense(codec):
  """Of four sub-batches and of two convolutions."""
  filters, units, count = 16, 128, BATCH // 4
  features = payload(codec, count // WORKERS, 2 * 2 * 2 * filters)
  hidden = payload(codec, count, units // WORKERS)
  passes = 2 * features + 4 * hidden + payload(codec, count, 12 // WORKERS)
  return 4 * passes + gradients(codec, (9, filters), (9 * filters, 2 * filters))


SENT = {
  "data": (CUT._replace(way="data"), of_data),
  "model": (CUT, of_model),
  "three-dense": (CUT._replace(network="three-dense"), of_three_dense),
  "updates": (CUT._replace(network="three-dense-updates"), of_three_dense),
}


@pytest.mark.parametrize("codec", ["f32", "dynamic-tree"])
@pytest.mark.parametrize(("setting", "expected"), [*SENT.values()], ids=[*SENT])
def test_bytes_are_those_of_all_payloads(setting, expected, codec):
  """Each of N workers sends its payloads to N - 1 others."""
  found = dettmers.trainer(drawn(), setting._replace(codec=codec)).bytes()
  sent, plain = (
    (WORKERS - 1) * expected(x) for x in (ARMS[codec.replace("-", "_")], Dense())
  )
  assert found == {"bytes_a_step": sent, "ratio": sent / plain, "exchanges": []}


def test_rounding_is_that_of_the_whole_net():
  """By NumPy: of the inputs, and of the hidden layers that they give."""
  layers = cut_layers.init(jax.random.key(1), (SIDE * SIDE, HIDDEN, HIDDEN, 12))
  found = dettmers.errors_of_layers(drawn(), CUT, jax.jit(columns)(layers), seed=2)
  counts = {kind: {len(x) for x in types.values()} for kind, types in found.items()}
  assert counts == {"activations": {4}, "gradients": {3}, "errors": {3}}
  key, codec = jax.random.key(2), EightBit(dtype="linear")
  x = drawn().train.images[:BATCH].reshape(BATCH, -1) / np.float32(255)
  activations, rates = [cut_layers.dropped(x, 0.2, key)], (0.3, 0.3)
  for i, (layer, rate) in enumerate(zip(layers[:2], rates, strict=True)):
    y = jax.nn.relu(activations[-1] @ layer["w"] + layer["b"])
    activations.append(cut_layers.dropped(y, rate, jax.random.fold_in(key, i)))
  for got, x in zip(found["activations"]["linear"], activations, strict=False):
    near = np.asarray(codec.decode(codec.encode(x), like=x))
    x = np.asarray(x)
    far = np.abs(near - x)[x != 0] / np.abs(x[x != 0])
    np.testing.assert_allclose(got, 100 * far.mean(), rtol=1e-4)


def test_float32_that_is_cut_says_how_types_would_round():
  once = CUT._replace(steps=1, points=1)
  found = dettmers.trainer(drawn(), once).train(0)
  [reached] = found["points"]
  assert reached["layer_errors"].keys() == {"activations", "gradients", "errors"}
  coded = dettmers.trainer(drawn(), once._replace(codec="mantissa")).train(0)
  assert "layer_errors" not in coded["points"][0]


def test_images_are_those_that_the_setting_names():
  load = lambda name: tasks.images(**tasks.named(name))
  (_, whole), (name, found) = load("digits"), load("digits/4")
  assert name == "digits/4" and found.train.images.shape == (1437, 4, 4, 1)
  np.testing.assert_array_equal(found.test.labels, whole.test.labels)
  mean = whole.test.images[7, 2:4, 4:6].mean()
  assert abs(float(found.test.images[7, 1, 2, 0]) - mean) <= 0.5


def test_types_that_the_paper_scales_by_a_power_of_ten_have_one():
  """Activations beyond 1 are coded by it; 15 of mantissa is 1.5."""
  x = jnp.array([90.0, 2.0, 0.0])
  for way, largest in {"data": 10.0, "model": 100.0}.items():
    codec = dettmers.CODECS[way]["static-tree-paper"]
    found = codec.decode(codec.encode(x), like=x)
    assert found[0] == pytest.approx(min(90.0, 0.971875 * largest), rel=0.04)
    assert found[1] == pytest.approx(2.0, rel=0.15)


WRONG = {
  "workers": (CUT._replace(workers=8), "`workers` must be 4, got 8"),
  "way": (CUT._replace(way="emulated"), "`way` must be one of .* got 'emulated'"),
  "network": (
    CUT._replace(way="data", network="local"),
    "`network` must be one of .* in the way 'data', got 'local'",
  ),
  "codec": (CUT._replace(codec="qsgd-4"), "`codec` must be one of .* got 'qsgd-4'"),
  "batch": (CUT._replace(batch=30), "`batch` must be a multiple of 16, got 30"),
}


@pytest.mark.parametrize(("setting", "message"), [*WRONG.values()], ids=[*WRONG])
def test_other_settings_are_refused(setting, message):
  with pytest.raises(ValueError, match=message):
    dettmers.trainer(drawn(), setting)


def test_colored_images_are_refused():
  with pytest.raises(ValueError, match=r"`images` must be square and gray.* 8, 8, 3"):
    dettmers.trainer(drawn(channels=3), CUT)


def test_updates_differ_in_nothing_else():
  one, four = (dettmers.NETS[f"three-dense{x}"](SIDE) for x in ("", "-updates"))
  assert (one.updates, four.updates, one.passes) == (1, 4, four.passes)
  assert isinstance(four, convolutions.Net)
