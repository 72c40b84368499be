"""Residuals in few bits keep their sum, to their own rounding, with other workers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.checkpoint.regroup_workers import floats_of, stored_of
from gradcomp._src.core.residual_storage import is_stored
from gradcomp.codecs import QSGD
from tests.support.cases import reshard as cases

PARAMS = {"b": jnp.zeros(48), "w": jnp.zeros((8, 64))}
each_way = pytest.mark.parametrize("dtype", ["bfloat16", "int8"])


def floats(residual, workers):
  """The residuals of all workers, ``float32[N, ...]`` for each leaf."""
  flat = jax.tree.leaves(residual, is_leaf=is_stored)
  wide = [
    floats_of(x, workers) if is_stored(x) else np.asarray(x, np.float32) for x in flat
  ]
  return [x.reshape(workers, -1) for x in wide]


def exchange(dtype, name):
  feedback = gradcomp.ErrorFeedback(residual_dtype=dtype)
  return gradcomp.compress(
    QSGD(bits=4), axis_name="data", exchange=name, feedback=feedback
  )


def drawn(residual, workers):
  """Normal residuals of all workers, as they are stored."""
  rng = np.random.default_rng(0)

  def draw(x):
    if is_stored(x):
      return stored_of(rng.standard_normal(x.codes.shape).astype(np.float32), workers)
    return rng.standard_normal(x.shape).astype(x.dtype)

  return jax.tree.map(draw, residual, is_leaf=is_stored)


def rounding(dtype, x):
  """The largest error of rounding to nearest.

  For bfloat16 it is 2**-8 of a number, and for int8 half of a scale, which is at most
  2/127 of the block's largest.
  """
  size = np.abs(x)
  return size * 2.0**-8 if dtype == "bfloat16" else np.full_like(x, size.max() / 127)


@each_way
def test_residuals_of_few_bits_keep_their_sum(dtype):
  tx = exchange(dtype, "all_gather")
  state = cases.shapes(tx, 4, PARAMS)
  residual = drawn(state.residual, 4)
  state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
  state = state._replace(residual=residual)
  fewer = cases.reshard(state, tx, 4, 3, PARAMS)
  more = cases.reshard(state, tx, 4, 8, PARAMS)
  residuals = residual, fewer.residual, more.residual
  before, less, grown = map(floats, residuals, (4, 3, 8))
  for old, new, wide in zip(before, less, grown, strict=True):
    np.testing.assert_array_equal(wide[:4], old)  # zeros are all that is added
    assert not wide[4:].any()
    # The first worker has the sum of two.
    lost = np.abs(new.sum(axis=0) - old.sum(axis=0))
    assert np.all(lost <= rounding(dtype, new)[0] + 1e-6)
  back = cases.reshard(more, tx, 8, 4, PARAMS)
  for old, new in zip(before, floats(back.residual, 4), strict=True):
    np.testing.assert_array_equal(new, old)


@each_way
def test_they_take_what_owners_kept(dtype):
  """Where nobody owns rows any more, it is added before anything is rounded."""
  tx, params = exchange(dtype, "auto"), {"w": jnp.zeros((64, 4096))}
  state = cases.filled(tx, 4, params)
  (rows,) = state.server_residual["data",]
  owned = np.random.default_rng(3).standard_normal((64, 4096), np.float32)
  state = state._replace(
    residual=drawn(state.residual, 4),
    server_residual={("data",): (owned.reshape(rows.shape),)},
  )
  moved = cases.reshard(state, tx, 4, 2, params)
  assert moved.server_residual is None
  (before,), (after,) = floats(state.residual, 4), floats(moved.residual, 2)
  exact = before[:2] + before[2:] + 2 * owned.reshape(-1)
  assert np.all(np.abs(after - exact) <= rounding(dtype, exact))
