"""The examples' data: embedded digits, and sets that are not there."""

import importlib.util

import numpy as np
import pytest
from sklearn.datasets import load_digits

from examples.lib.data import FOLDER, brown
from examples.lib.data import images as data
from tests.support.pages import ROOT


def test_mnist5k_is_what_the_docstring_says(tmp_path):
  """Its images have their labels: ones have the least ink, and zeros the most."""
  train, test, classes = data.load("mnist5k", tmp_path)
  assert classes == 10
  assert train.images.shape == (4000, 28, 28, 1) and test.images.shape[0] == 1000
  for split, count in ((train, 400), (test, 100)):
    assert (split.images.dtype, split.labels.dtype) == (np.uint8, np.int32)
    assert np.bincount(split.labels).tolist() == [count] * 10
    assert (split.images.min(), split.images.max()) == (0, 255)
  # All images differ, so none is in both parts.
  both = np.concatenate([train.images, test.images]).reshape(5000, -1)
  assert len(np.unique(both, axis=0)) == 5000
  ink = [train.images[train.labels == c].mean() for c in range(10)]
  assert np.argmin(ink) == 1 and np.argmax(ink) == 0
  mean = train.images.mean(axis=(0, 3))  # of images that look upright
  assert mean[10:18, 10:18].mean() > 4 * mean[:4].mean()
  assert mean.sum(axis=1).argmax() in range(10, 18)


def test_digits_are_what_the_docstring_says(tmp_path):
  """The split is fixed."""
  train, test, classes = data.load("digits", tmp_path / "one")
  assert classes == 10
  assert (train.images.shape, test.images.shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
  again = data.load("digits", tmp_path / "two")
  for split, other in zip((train, test), again[:2], strict=True):
    assert (split.images.dtype, split.labels.dtype) == (np.uint8, np.int32)
    assert (split.images.min(), split.images.max()) == (0, 255)
    shares = np.bincount(split.labels) / np.bincount(load_digits().target)
    assert np.ptp(shares) < 0.01  # 35 to 37 of 174 to 183 images
    assert np.array_equal(split.images, other.images)
    assert np.array_equal(split.labels, other.labels)
  found = np.concatenate([train.images, test.images]).reshape(1797, -1)
  source = np.rint(load_digits().data * 255 / 16)
  # All source images differ, so equal sets of rows mean that none is in both splits.
  assert np.array_equal(np.unique(found, axis=0), np.unique(source, axis=0))


def test_batches():
  split = data.Split(np.arange(1437), np.zeros(1437, np.int32))

  def draw(count, **options):
    batches = data.batches(split, 100, **options)
    return [next(batches).images for _ in range(count)]

  epochs = draw(28, seed=5)  # two, of 14 whole batches each
  first, second = np.concatenate(epochs[:14]), np.concatenate(epochs[14:])
  assert len(np.unique(first)) == len(np.unique(second)) == 1400
  assert not np.array_equal(first, second)
  assert np.array_equal(epochs, draw(28, seed=5))
  assert not np.array_equal(epochs[0], draw(1, seed=6)[0])
  parts = [draw(28, seed=5, part=i, parts=4) for i in range(4)]
  assert np.array_equal(epochs, np.concatenate(parts, axis=1))
  with pytest.raises(ValueError, match="at most 1437"):
    next(data.batches(split, 1438, seed=0))


def test_data_that_nobody_prepared_is_not_waited_for(tmp_path, monkeypatch):
  """Nothing is downloaded where it could not be read, and git ignores its folder."""
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ModuleNotFoundError, match="'mnist', got none. `make data`"):
    data.load("mnist", tmp_path)
  with pytest.raises(FileNotFoundError, match="got none. `make data` prepares it"):
    brown.words(tmp_path)
  assert not list(tmp_path.iterdir())
  assert FOLDER == ROOT / "datasets"
  assert "/datasets" in (ROOT / ".gitignore").read_text().splitlines()
