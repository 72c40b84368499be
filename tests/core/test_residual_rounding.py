"""Residuals are rounded to fewer bits without bias, and lose little."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.core import residual_storage
from tests.support.assertions import assert_same_bits
from tests.support.cases.residual import each_way, read, step_of, to_bfloat16, to_int8


def rounded(stored, x, lane):
  """What is read of finite numbers that were stored with these random integers."""
  return read((to_int8 if stored == "int8" else to_bfloat16)(x, lane))


@each_way
def test_the_mean_over_all_random_integers_is_the_number(stored):
  """Exactly: of 2**16 equally likely ones, a fraction rounds up."""
  x = np.random.default_rng(0).standard_normal(16).astype(np.float32)
  x = np.append(x, [0.0, -0.0, 2.0**-100, -3.99]).astype(np.float32)
  every = np.broadcast_to(np.arange(2**16, dtype=np.uint16)[:, None], (2**16, 20))
  found = rounded(stored, np.broadcast_to(x, every.shape), every)
  mean = np.asarray(found, np.float64).mean(axis=0)
  # int8 has 16 bits of fraction: it drops less than that of a step.
  bound = 0 if stored == "bfloat16" else 2.0**-17
  step = step_of(stored, x)
  assert np.all(np.abs(mean - x) <= bound * step)
  assert np.all(np.abs(found - x) < step)


@each_way
def test_what_is_stored_already_stays(stored):
  rng = np.random.default_rng(1)
  x = rng.standard_normal((3, 512)).astype(np.float32)
  lane = lambda: rng.integers(2**16, size=x.shape, dtype=np.uint16)
  once = rounded(stored, x, lane())
  assert_same_bits(rounded(stored, once, lane()), once)


@each_way
@pytest.mark.parametrize("lane", [0, 0xFFFF])
def test_extreme_numbers_stay_finite_and_near(stored, lane):
  most = np.finfo(np.float32).max
  blocks = [[most, -most], [127.0, 64.0], [127.5, -127.5], [2.0**-126, 0.0], [0, -0.0]]
  x = np.array(blocks, np.float32)
  found = rounded(stored, x, np.full(x.shape, lane, np.uint16))
  assert np.isfinite(found).all()
  # A step is at most 1/64 of the block's largest. bfloat16 ends a step below float32.
  assert np.all(np.abs(found - x) <= np.abs(x).max(axis=1, keepdims=True) / 64)


@pytest.mark.parametrize(
  ("shape", "blocks"),
  [
    ((1,), (1,)),
    ((10,), (1,)),
    ((3, 512), (3, 2)),
    ((1000,), (4,)),
    ((2, 257), (2, 1)),
    ((0,), (0,)),
    ((2, 0), (2, 0)),
    ((0, 3), (0, 1)),
  ],
)
def test_blocks_divide_the_last_axis(shape, blocks):
  first = jax.eval_shape(lambda: residual_storage.zeros(shape, "int8"))
  assert (first.codes.shape, first.scales.shape) == (shape, blocks)
  lanes = jax.jit(lambda key: residual_storage.lanes(key, shape))(
    np.zeros(2, np.uint32)
  )
  kept = to_int8(np.ones(shape, np.float32), lanes)
  assert jax.tree.map(jnp.shape, kept) == jax.tree.map(jnp.shape, first)
  ones = jax.jit(residual_storage.read_residual)(kept)
  assert_same_bits(ones, read(kept))
  assert_same_bits(ones, np.ones(shape, np.float32))
