"""PowerSGD sends the mean of all workers' matrices as the paper's factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.transforms.low_rank import PowerSGD, orthonormal
from gradcomp.codecs import Dense, Leaf
from tests.plugins.slow_cases import slow
from tests.specs import power_sgd as spec
from tests.support.assertions import assert_same_bits
from tests.support.low_rank import KEY, bound, error, first, gaussian, of_rank, together

# Stated in the docstring: the largest product of two rows, and 1 less that of a row.
BOUND = 2.0**-20


def steps(codec, memory, gradients):
  """The means of leaves of one worker, step by step, without feedback; the memory."""
  means = []
  for gradient in gradients:
    (mean,), (memory,) = together(codec, [gradient[None]], [memory])
    means.append(mean)
  return means, memory


@pytest.mark.parametrize(
  "shape, workers",
  [((40, 30), 3), ((3, 3, 8, 24), 1), *slow(((9, 200), 4), ((40, 30), 4))],
)
def test_five_steps_are_the_papers(shape, workers):
  """Algorithms 1 and 2, from the same first factor, with residuals and momentum."""
  codec, memory = bound(PowerSGD(rank=3, min_rate=1), shape)
  m, n = codec.matrix
  x = gaussian(m, n, seed=9)
  paper = spec.ErrorFeedbackSGD(x, np.float64(memory).T, workers, 0.1, 0.9)
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


@pytest.mark.parametrize(
  "shape, matrix",
  [
    ((64, 64), (64, 64)),
    ((3, 3, 64, 128), (576, 128)),
    ((128, 64, 3, 3), (128, 576)),
    ((12, 64, 64), (768, 64)),
    ((16, 17), (16, 17)),  # of 272 elements 264 would pay
    ((16, 16), None),  # of 256 elements 256 would not
    *((shape, None) for shape in ((1000,), (1000, 1), (), (0, 64))),
  ],
)
def test_a_matrix_is_the_squarest_cut_or_dense(shape, matrix):
  codec = PowerSGD(rank=4).bind(Leaf(shape))
  if matrix is None:
    assert codec == Dense()
  else:
    assert codec == PowerSGD(rank=4, matrix=matrix)
    m, n = matrix
    assert codec.sides == ((4, m), (4, n))


compiled = jax.jit(orthonormal)


def orthonormal(rows):
  basis = np.asarray(compiled(jnp.asarray(rows, jnp.float32)), np.float64)
  return basis, np.any(basis != 0, axis=1)


def assert_orthonormal(basis, kept):
  products = basis @ basis.T
  np.testing.assert_allclose(products, np.diag(kept), rtol=0, atol=BOUND)
  assert not basis[~kept].any()


def of_condition(rows, columns, singular):
  """A matrix with random singular vectors."""
  rng = np.random.default_rng(0)
  left, _ = np.linalg.qr(rng.standard_normal((rows, rows)))
  right, _ = np.linalg.qr(rng.standard_normal((columns, rows)))
  return (left * singular) @ right.T


@pytest.mark.parametrize("rows, columns", [(4, 64), (32, 1000), *slow((4, 4096))])
def test_rows_are_orthonormal_whatever_their_condition(rows, columns):
  """Singular values that fall evenly, that fall at once, and of which one falls."""
  for condition in (1, 1e3, 1e5, 1e7, 1e12):
    spectra = np.ones((3, rows))
    spectra[0] = np.geomspace(1, 1 / condition, rows)
    spectra[1, 1:] = spectra[2, -1:] = 1 / condition
    for singular in spectra:
      check_condition(of_condition(rows, columns, singular), condition)


def check_condition(a, condition):
  basis, kept = orthonormal(a)
  assert_orthonormal(basis, kept)
  if condition <= 1e3:  # all are farther from each other than rounding
    assert kept.all()
  # What rows lack of themselves is what makes them dependent, and rounding.
  unit = np.float64(np.float32(a))
  unit /= np.linalg.norm(unit, axis=1, keepdims=True)
  lacks = np.linalg.norm(unit - unit @ basis.T @ basis, axis=1)
  assert lacks.max() <= 2.0**-16 + BOUND


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_as_many_rows_are_kept_as_the_rank(rank):
  """Exact products of small integers: every other row is zero."""
  rng = np.random.default_rng(2)
  a = rng.integers(-8, 9, (6, rank)) @ rng.integers(-8, 9, (rank, 500))
  basis, kept = orthonormal(a)
  assert kept.tolist() == [True] * rank + [False] * (6 - rank)
  assert_orthonormal(basis, kept)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_never_taken_for_dependent(bad):
  a = np.random.default_rng(5).standard_normal((3, 50))
  a[1, 7] = bad
  basis, kept = orthonormal(a)
  assert kept[1] and np.isnan(basis[1]).all()
