"""The examples' data: embedded digits, and sets that are not there."""

import importlib.util

import numpy as np
import pytest

from examples.lib.data import FOLDER, brown
from examples.lib.data import images as data
from tests.support.pages import ROOT


@pytest.fixture(scope="module")
def mnist5k(tmp_path_factory):
  return data.load("mnist5k", tmp_path_factory.mktemp("datasets"))


def test_mnist5k_is_what_the_docstring_says(mnist5k):
  train, test, classes = mnist5k
  assert classes == 10
  assert train.images.shape == (4000, 28, 28, 1) and test.images.shape[0] == 1000
  for split, count in ((train, 400), (test, 100)):
    assert (split.images.dtype, split.labels.dtype) == (np.uint8, np.int32)
    assert np.bincount(split.labels).tolist() == [count] * 10
    assert (split.images.min(), split.images.max()) == (0, 255)
  # All images differ, so none is in both parts.
  both = np.concatenate([train.images, test.images]).reshape(5000, -1)
  assert len(np.unique(both, axis=0)) == 5000


def test_mnist5k_has_the_images_with_their_labels(mnist5k):
  """Images that look upright have most ink in the middle, and ones the least."""
  train = mnist5k.train
  ink = [train.images[train.labels == c].mean() for c in range(10)]
  assert np.argmin(ink) == 1 and np.argmax(ink) == 0
  mean = train.images.mean(axis=(0, 3))
  assert mean[10:18, 10:18].mean() > 4 * mean[:4].mean()
  assert mean.sum(axis=1).argmax() in range(10, 18)


def test_data_is_kept_in_a_folder_that_git_ignores():
  assert FOLDER == ROOT / "datasets"
  assert "/datasets" in (ROOT / ".gitignore").read_text().splitlines()
  assert str(FOLDER) in data.HELP


def test_images_that_nobody_prepared_are_not_waited_for(tmp_path, monkeypatch):
  """Nothing is downloaded where it could not be read."""
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ModuleNotFoundError, match="'mnist', got none. `make data`"):
    data.load("mnist", tmp_path)
  assert not list(tmp_path.iterdir())


def test_brown_that_was_not_prepared_is_an_error_with_a_cure(tmp_path):
  with pytest.raises(FileNotFoundError, match="got none. `make data` prepares it"):
    brown.words(tmp_path)
