"""The examples' data: embedded digits, and sets that are not there."""

import importlib.util
import io

import chex
import numpy as np
import PIL.Image
import pytest
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

from examples.lib import FOLDER, texts
from examples.lib import images as data
from tests.support import installs
from tests.support.pages import ROOT

SHAPES = {"mnist5k": ((4000, 28, 28, 1), 1000), "digits": ((1437, 8, 8, 1), 360)}


@pytest.mark.parametrize("name", SHAPES)
def test_embedded_images_are_what_the_docstring_says(name, tmp_path):
  train, test, classes = whole = data.load(name, tmp_path / "one")
  shape, tests = SHAPES[name]
  assert (train.images.shape, len(test.images), classes) == (shape, tests, 10)
  chex.assert_trees_all_equal(data.load(name, tmp_path / "two"), whole)
  for split in (train, test):
    assert (split.images.dtype, split.labels.dtype) == (np.uint8, np.int32)
    assert (split.images.min(), split.images.max()) == (0, 255)
  shares = np.bincount(test.labels) / np.bincount(train.labels)
  assert np.ptp(shares) < 0.02  # 35 to 37 of 174 to 183 images
  both = np.concatenate([train.images, test.images]).reshape(shape[0] + tests, -1)
  assert len(np.unique(both, axis=0)) == len(both)
  if name == "digits":
    source = np.rint(load_digits().data * 255 / 16)
    assert np.array_equal(np.unique(both, axis=0), np.unique(source, axis=0))
    return
  # Images have their labels: ones have the least ink, and zeros the most.
  ink = [train.images[train.labels == c].mean() for c in range(10)]
  assert (np.argmin(ink), np.argmax(ink)) == (1, 0)
  # And they look upright.
  assert train.images.mean(axis=(0, 2, 3)).argmax() in range(10, 18)


class Cifar10(tfds.image_classification.Cifar10, skip_registration=True):
  """Noise in 10 classes, as tensorflow-datasets has CIFAR-10."""

  def _split_generators(self, dl_manager):
    return {x: self._generate_examples(i) for i, x in enumerate(("train", "test"))}

  def _generate_examples(self, part):
    for i, image in enumerate(made_up(part)):
      png = io.BytesIO()
      PIL.Image.fromarray(image).save(png, "png")
      yield i, {"id": f"{part}_{i}", "image": png.getvalue(), "label": i % 10}


def made_up(part):
  generator = np.random.default_rng(part)
  return generator.integers(256, size=(40 - 20 * part, 32, 32, 3), dtype=np.uint8)


def test_a_set_of_tensorflow_datasets_is_read_and_trained_on(tmp_path):
  folder = tmp_path / "sets"
  Cifar10(data_dir=str(folder), file_format="array_record").download_and_prepare()
  train, test, classes = data.load("cifar10", folder)
  assert classes == 10
  for part, split in enumerate((train, test)):
    chosen = (split.images[:, None] == made_up(part)).all((2, 3, 4)).argmax(axis=1)
    assert sorted(chosen) == [*range(40 - 20 * part)]
    assert np.array_equal(split.labels, chosen % 10)
  options = f"--dataset cifar10 --data-dir {folder} --output {tmp_path} --batch-size 8"
  options += " --codec qsgd-4 --steps 2 --seeds 1 --model mlp"
  installs.run("-m", "examples.image_classification", *options.split(), cwd=ROOT)


def test_batches():
  split = data.Split(np.arange(1437), np.zeros(1437, np.int32))

  def draw(count, **options):
    batches = data.batches(split, 100, **options)
    return [next(batches).images for _ in range(count)]

  epochs = draw(28, seed=5)  # two, of 14 whole batches each
  first, second = np.reshape(epochs, (2, 1400))
  assert len(np.unique(first)) == len(np.unique(second)) == 1400
  assert not np.array_equal(first, second)
  assert not np.array_equal(epochs[0], draw(1, seed=6)[0])
  parts = [draw(28, seed=5, part=i, parts=4) for i in range(4)]
  assert np.array_equal(epochs, np.concatenate(parts, axis=1))
  with pytest.raises(ValueError, match="at most 1437"):
    next(data.batches(split, 1438, seed=0))


def test_data_that_nobody_prepared_is_not_waited_for(tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ModuleNotFoundError, match="'mnist', got none. `make data`"):
    data.load("mnist", tmp_path)
  with pytest.raises(FileNotFoundError, match="got none. `make data` prepares it"):
    texts.load("brown-words", data_dir=tmp_path)
  assert not list(tmp_path.iterdir())
  assert FOLDER == ROOT / "datasets"
  assert "/datasets" in (ROOT / ".gitignore").read_text().splitlines()
