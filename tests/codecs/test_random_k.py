"""RandomK chooses all elements alike; its rows are the page's, as of every codec."""

import numpy as np

from tests.specs import random_k


def test_all_elements_are_chosen_alike():
  """Counts of 512 keys: each element of a stride of 32 expects 16 a block."""
  counts = np.zeros(1024)
  for key in range(512):
    counts[random_k.positions((0, key), 1, 1024, 1 / 32)[0]] += 1
  # Binomial, sigma 3.9; 5.5 sigma are passed by 1024 elements with probability 4e-5.
  assert np.abs(counts - 16).max() < 5.5 * 3.94
