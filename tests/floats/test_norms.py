"""The norms that a step reports are right wherever they are float32 numbers."""

import jax
import numpy as np
import optax
import pytest

import gradcomp
from tests.support import laws, modes


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_norms_of_a_step_have_the_range_of_float32(dtype):
  """Squares of numbers near 2^100 are none of float32, nor are those near 2^-100.

  The square of 20,000 is no float16.
  """
  tx = optax.chain(gradcomp.dense(axis_name="data"), optax.sgd(0.5))
  mesh = modes.mesh(4)
  step = gradcomp.make_train_step(
    lambda w, x: (w * x[0]).sum(),
    tx,
    axis_name="data",
    mesh=mesh,
    donate=False,
    options=gradcomp.TrainOptions(report=True),
  )
  half = dtype == np.float16
  x = laws.gaussian((4, 300))
  powers = (12,) if half else (-100, -45, 0, 45, 100)
  with jax.set_mesh(mesh):
    w = np.zeros(300, dtype)
    state = tx.init(w)
    for power in powers:
      given = (x * np.float32(2.0**power)).astype(dtype)
      *_, metrics = step(w, state, given)
      found = [metrics["gradient_norm"], metrics["update_norm"]]
      exact = np.ldexp(np.float64(given), -power)
      expected = [
        np.sqrt((exact**2).sum() / 4),
        np.linalg.norm(exact.mean(axis=0)) / 2,
      ]
      # Some 300 additions in binary32, by XLA's order; halves are rounded once more.
      np.testing.assert_allclose(
        np.float64(found), np.ldexp(expected, power), rtol=1e-3 if half else 1e-5
      )
