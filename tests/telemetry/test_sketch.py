"""Sketches add up as arrays do, and tell their lengths without bias."""

import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.core.measures import PARTS, sketch
from tests.support.assertions import assert_same_bits


@pytest.mark.parametrize("shape", [(0,), (7, 3), (PARTS,)])
def test_a_small_array_is_its_own_sketch(shape):
  x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  assert_same_bits(sketch(jnp.asarray(x)), x.reshape(-1))


def test_each_element_goes_to_one_part_with_a_sign():
  """Of 3000 elements alone: one, or minus one, in the part of its position."""
  signs = np.array(
    [sketch(jnp.zeros(3000).at[i].set(1.0))[i % PARTS] for i in range(0, 3000, 41)]
  )
  assert set(signs.tolist()) == {-1.0, 1.0}
  whole = sketch(jnp.ones(3000))
  parity = [len(range(i, 3000, PARTS)) % 2 for i in range(PARTS)]
  assert (np.abs(np.asarray(whole)) % 2 == parity).all()


def test_sketches_add_up():
  """Powers of two and small integers are exact."""
  rng = np.random.default_rng(1)
  x, y = rng.integers(-8, 8, (2, 5000)).astype(np.float32)
  assert_same_bits(sketch(x) + 4 * sketch(y), sketch(x + 4 * y))


@pytest.mark.parametrize(
  "make",
  [
    lambda rng: rng.standard_normal((500, 1024)),
    lambda rng: np.ones((500, 1024)),
    lambda rng: np.where(np.arange(1024) % 64 == 0, 1.0, 0.0) * np.ones((500, 1)),
    lambda rng: np.outer(rng.standard_normal(500), rng.standard_normal(1024)),
  ],
  ids=["normal", "constant", "few columns", "rank one"],
)
def test_the_length_is_right_within_its_deviation(make):
  """4.4 % of the square; four times as much in one of 16,000."""
  x = make(np.random.default_rng(2)).astype(np.float32)
  square = np.sum(np.square(np.asarray(sketch(jnp.asarray(x)), np.float64)))
  true = np.sum(np.square(x, dtype=np.float64))
  assert abs(square / true - 1) < 4 * np.sqrt(2 / PARTS)
