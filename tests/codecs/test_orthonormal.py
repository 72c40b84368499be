"""Rows become orthonormal whatever their condition, and dependent ones become zero."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.codecs import power_sgd

# Stated in the docstring: the largest product of two rows, and 1 less that of a row.
BOUND = 2.0**-20


@functools.cache
def compiled():
  return jax.jit(power_sgd.orthonormal)


def orthonormal(rows):
  basis, kept = compiled()(jnp.asarray(rows, jnp.float32))
  return np.asarray(basis, np.float64), np.asarray(kept)


def assert_orthonormal(basis, kept):
  products = basis @ basis.T
  np.testing.assert_allclose(products, np.diag(kept), rtol=0, atol=BOUND)
  assert not basis[~kept].any()


def of_condition(rows, columns, singular, seed=0):
  """A matrix with random singular vectors."""
  rng = np.random.default_rng(seed)
  left, _ = np.linalg.qr(rng.standard_normal((rows, rows)))
  right, _ = np.linalg.qr(rng.standard_normal((columns, rows)))
  return (left * singular) @ right.T


@pytest.mark.parametrize("rows, columns", [(4, 64), (4, 4096), (32, 1000)])
@pytest.mark.parametrize("condition", [1, 1e3, 1e5, 1e7, 1e12])
def test_orthonormal_whatever_the_condition(rows, columns, condition):
  """Singular values that fall evenly, that fall at once, and of which one falls."""
  spectra = np.ones((3, rows))
  spectra[0] = np.geomspace(1, 1 / condition, rows)
  spectra[1, 1:] = spectra[2, -1:] = 1 / condition
  for singular in spectra:
    a = of_condition(rows, columns, singular)
    basis, kept = orthonormal(a)
    assert_orthonormal(basis, kept)
    if condition <= 1e3:  # all are farther from each other than rounding
      assert kept.all()
    # What rows lack of themselves is what makes them dependent, and rounding.
    unit = np.float64(np.float32(a))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    lacks = np.linalg.norm(unit - unit @ basis.T @ basis, axis=1)
    assert lacks.max() <= 2.0**-16 + BOUND


def test_it_is_the_process_of_gram_and_schmidt():
  """Each row has a positive share of its own basis row, and none of later ones."""
  a = np.random.default_rng(1).standard_normal((5, 300))
  basis, _ = orthonormal(a)
  shares = a @ basis.T
  assert (np.diag(shares) > 0).all()
  # Products of 300 elements of size 1 with a rounding of 2^-24 each.
  np.testing.assert_allclose(np.triu(shares, 1), 0, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_as_many_rows_are_kept_as_the_rank(rank):
  """Exact products of small integers: every other row is zero, and said to be."""
  rng = np.random.default_rng(2)
  a = rng.integers(-8, 9, (6, rank)) @ rng.integers(-8, 9, (rank, 500))
  basis, kept = orthonormal(a)
  assert kept.tolist() == [True] * rank + [False] * (6 - rank)
  assert_orthonormal(basis, kept)


def test_multiples_and_zeros_become_zero():
  row = np.random.default_rng(3).standard_normal(77)
  basis, kept = orthonormal([0 * row, row, -3 * row, row[::-1], 1e-20 * row])
  assert kept.tolist() == [False, True, False, True, False]
  assert_orthonormal(basis, kept)


def test_scales_of_rows_do_not_matter():
  """Powers of two change no bit, from numbers whose squares vanish to overflow."""
  a = np.random.default_rng(4).standard_normal((4, 99)).astype(np.float32)
  scaled = a * np.float32(2.0) ** np.float32([[-100], [100], [-3], [60]])
  np.testing.assert_array_equal(orthonormal(scaled)[0], orthonormal(a)[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_never_taken_for_dependent(bad):
  a = np.random.default_rng(5).standard_normal((3, 50))
  a[1, 7] = bad
  basis, kept = orthonormal(a)
  assert kept[1] and np.isnan(basis[1]).all()
