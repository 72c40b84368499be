"""PowerSGD sends the mean of all workers' matrices as the paper's factors."""

import dataclasses

import numpy as np
import pytest

from gradcomp.codecs import Leaf, PowerSGD
from tests.specs import power_sgd
from tests.support.assertions import assert_same_bits
from tests.support.low_rank import KEY, bound, error, first, gaussian, of_rank, together


def steps(codec, memory, gradients):
  """The means of leaves of one worker, step by step, without feedback; the memory."""
  means = []
  for gradient in gradients:
    (mean,), (memory,) = together(codec, [gradient[None]], [memory])
    means.append(mean)
  return means, memory


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("shape", [(40, 30), (9, 200), (3, 3, 8, 24)])
def test_five_steps_are_the_papers(shape, workers):
  """Algorithms 1 and 2, from the same first factor, with residuals and momentum."""
  codec, memory = bound(PowerSGD(rank=3, min_rate=1), shape)
  m, n = codec.matrix
  x = gaussian(m, n, seed=9)
  paper = power_sgd.ErrorFeedbackSGD(x, np.float64(memory).T, workers, 0.1, 0.9)
  residual, momentum = np.zeros((workers, *shape), np.float32), 0
  for step in range(5):
    gradients = gaussian(workers, *shape, seed=step)
    corrected = gradients + residual
    (mean,), (memory,) = together(codec, [corrected], [memory])
    residual = corrected - mean
    momentum = 0.9 * momentum + mean
    x -= 0.1 * (mean + momentum).reshape(m, n)
    expected = paper.step(gradients.reshape(workers, m, n))
    # Sums of 200 roundings of 2^-24, which the next steps' factors pass on.
    assert error(mean.reshape(m, n), expected) <= 1e-5
    assert error(residual.reshape(workers, m, n), paper.errors) <= 1e-5
  assert error(x, paper.x) <= 1e-5


def test_what_is_not_sent_stays_in_residuals():
  """The sum of residuals and N means is that of what was to be sent, to rounding."""
  codec, memory = bound(PowerSGD(rank=2), (33, 47))
  for bits in (32, 8):
    codec = dataclasses.replace(codec, bits=bits)
    corrected = gaussian(4, 33, 47)
    (mean,), _ = together(codec, [corrected], [memory])
    residual = corrected - mean
    total = np.float64(residual).sum(axis=0) + 4 * np.float64(mean)
    # Each residual is rounded once, by at most 2^-24 of itself.
    bound_ = 2.0**-24 * np.abs(residual).sum(axis=0)
    assert (np.abs(total - np.float64(corrected).sum(axis=0)) <= bound_).all()


def test_means_of_low_rank_are_exact():
  """Of the mean alone: each worker's own matrix has a full rank."""
  codec, memory = bound(PowerSGD(rank=3), (60, 70))
  mean = of_rank(3, 60, 70)
  noise = gaussian(2, 60, 70)
  leaves = mean + np.stack([noise[0], noise[1], -noise[0] - noise[1]])
  (found,), _ = together(codec, [leaves], [memory])
  # The workers' sums lose 2^-24 of their own matrices, which are 60 times the mean.
  assert error(found, mean) <= 2e-5


def test_the_warm_start_finds_the_best_matrix_of_its_rank():
  """Of one matrix again and again: the best one, by its singular values."""
  codec, memory = bound(PowerSGD(rank=2), (50, 80))
  x = of_rank(10, 50, 80)
  singular = np.linalg.svd(x, compute_uv=False)
  best = np.linalg.norm(singular[2:]) / np.linalg.norm(singular)
  means, _ = steps(codec, memory, [x] * 20)
  assert error(means[0], x) > 1.05 * best
  # Each step halves the angle to it or better, as the third value is half the second.
  assert error(means[-1], x) <= best * (1 + 1e-4)


def test_zero_gradients_are_no_end():
  """Their mean is zero, and the next step finds as much as any first step."""
  codec, memory = bound(PowerSGD(rank=2), (30, 40))
  zeros, x = np.zeros((30, 40), np.float32), of_rank(2, 30, 40)
  means, after = steps(codec, memory, [zeros, zeros, x])
  assert not means[0].any() and not means[1].any()
  assert error(means[2], x) <= 1e-5 and np.isfinite(after).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_seen_and_forgotten(bad):
  """One worker's element makes its leaf NaN, no other leaf, and not the next step."""
  codec, memory = bound(PowerSGD(rank=2), (30, 40))
  good = gaussian(2, 2, 30, 40)
  dirty = good.copy()
  dirty[0, 1, 7, 9] = bad
  means, memories = together(codec, [*dirty], [memory] * 2)
  expected, kept = together(codec, [*good], [memory] * 2)
  assert np.isnan(means[0]).all()
  assert_same_bits(memories[0], memory)
  assert_same_bits((means[1], memories[1]), (expected[1], kept[1]))


def diagonal(*numbers):
  """A matrix of 64 by 64 with ones there on its diagonal."""
  return np.diag(np.isin(np.arange(64), numbers).astype(np.float32))


@pytest.mark.parametrize("numbers", [(1, 3), (1, 5), (5, 7)])
def test_a_rank_that_comes_back_is_found_again(numbers):
  """Columns of Q that are equal, or miss all rows of a matrix, start anew.

  The first step's matrix makes both columns one: its only row. Of the next ones' rows
  they reach one or none.
  """
  codec, _ = bound(PowerSGD(rank=2), (64, 64))
  one, both = diagonal(3), diagonal(*numbers)
  (mean,), after = steps(codec, (diagonal(1) + diagonal(3))[[1, 3]] + one[3], [one])
  np.testing.assert_allclose(mean, one, atol=1e-6)
  means, _ = steps(codec, after, [both] * 3)
  assert error(means[-1], both) <= 1e-5


def test_memory_is_rows_of_length_one():
  """Of gradients of any scale, which change no bit of it."""
  codec, memory = bound(PowerSGD(rank=3), (30, 40))
  x = gaussian(30, 40)
  means, after = steps(codec, memory, [x, x])
  np.testing.assert_allclose(np.linalg.norm(after, axis=1), 1, rtol=1e-6)
  for scale in np.float32([2.0**-90, 2.0**90]):
    scaled, other = steps(codec, memory, [x * scale] * 2)
    assert_same_bits(other, after)
    assert_same_bits(scaled[1], means[1] * scale)


def test_the_first_memory_is_of_the_key():
  """Uniform from -1 to 1; no row is like another, nor like those of another key."""
  codec, memory = bound(PowerSGD(rank=16), (200, 301))
  rows = np.concatenate([memory, first(codec, Leaf((200, 301)), KEY + 1)])
  assert rows.shape == (32, 301) and (np.abs(rows) <= 1).all()
  # A mean of 9632 and a product of 301 such numbers have these deviations.
  assert abs(rows.mean()) < 5 * (1 / 3 / rows.size) ** 0.5
  assert abs((rows**2).mean() - 1 / 3) < 5 * (4 / 45 / rows.size) ** 0.5
  products = np.abs(rows @ rows.T)[~np.eye(32, dtype=bool)]
  assert products.max() < 5 * 301**0.5 / 3
