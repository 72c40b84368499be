"""The model of EDEN has the errors that the papers state."""

import math

import numpy as np
import pytest
from scipy import linalg, stats

from tests.specs import eden as published

# Max, Quantizing for Minimum Distortion, 1960, table I, with 2 to 16 levels.
MAX_1960 = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
# The outermost level, printed in the authors' constants of EDEN.
OUTERMOST = {
  1: 0.7978845608,
  2: 1.5104176087,
  3: 2.1519456699,
  4: 2.7325888048,
  5: 3.2607262956,
  6: 3.7440690237,
  7: 4.1895219330,
  8: 4.6018710595,
}
SIZE = 2**16


def gaussian(workers=1):
  return np.random.default_rng(0).standard_normal((workers, SIZE))


def error(decoded, x):
  return np.sum((decoded - x) ** 2) / np.sum(x**2)


def loss(bits):
  """The squared error of the levels for a normal number, by integration."""
  levels = published.lloyd_max(bits)
  edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
  # The levels are means, so the loss is 1 less their mean square.
  return 1 - levels**2 @ np.diff(stats.norm.cdf(edges))


def test_the_transform_is_that_of_hadamard_matrix():
  x = np.random.default_rng(1).standard_normal((3, 64))
  expected = x @ linalg.hadamard(64) / 8
  # Six sums of float64 whose terms are below 4.
  np.testing.assert_allclose(published.hadamard(x), expected, rtol=0, atol=1e-14)
  with pytest.raises(ValueError, match="power of two"):
    published.hadamard(x[:, :48])


@pytest.mark.parametrize("bits", MAX_1960)
def test_levels_lose_what_max_printed(bits):
  # The last printed digits are too low: 0.03454 and 0.009497 are below the minimum,
  # which is 0.034548 and 0.009501 by a general minimizer, too.
  assert math.isclose(loss(bits), MAX_1960[bits], rel_tol=5e-4)


@pytest.mark.parametrize("bits", OUTERMOST)
def test_levels_are_those_of_eden(bits):
  levels = published.lloyd_max(bits)
  np.testing.assert_allclose(levels, -levels[::-1], rtol=0, atol=1e-9)
  # The outermost level converges last: ends differ by a thousandth at 8 bits.
  assert math.isclose(levels[-1], OUTERMOST[bits], rel_tol=2e-3)


@pytest.mark.parametrize("bits", range(1, 9))
def test_eden_has_its_error(bits):
  """D of a rotated vector by least squares, and D / (1 - D) by the unbiased scale.

  One bit is DRIVE: 1 - 2 / pi, and pi / 2 - 1.
  """
  x, d = gaussian(), loss(bits)
  if bits == 1:
    assert math.isclose(d, 1 - 2 / math.pi)
    assert math.isclose(d / (1 - d), math.pi / 2 - 1)
  # Relative deviations are below 3 / sqrt(SIZE) an element's; four of them are 5 %.
  for scale, expected in (("least squares", d), ("unbiased", d / (1 - d))):
    found = error(published.eden(x, bits, scale, seed=1), x)
    assert math.isclose(found, expected, rel_tol=0.05), scale


def test_unbiased_eden_has_no_bias():
  """A mean of N messages of one vector has an N-th of the error; a bias stays."""
  x = np.tile(gaussian(), (64, 1))
  d = loss(1)
  means = {s: published.eden(x, 1, s, seed=2).mean(0) for s in published.SCALES}
  found = {scale: error(mean, x[0]) for scale, mean in means.items()}
  # As above: 5 % of each.
  assert math.isclose(found["unbiased"], d / (1 - d) / 64, rel_tol=0.05)
  # The scale is 1 - D times the unbiased one: the bias D^2 is left.
  expected = d**2 + (1 - d) ** 2 * d / (1 - d) / 64
  assert math.isclose(found["least squares"], expected, rel_tol=0.05)
