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
  mesh, options = modes.mesh(4), gradcomp.TrainOptions(report=True)
  given = dict(axis_name="data", mesh=mesh, donate=False, options=options)
  step = gradcomp.make_train_step(lambda w, x: (w * x[0]).sum(), tx, **given)
  half, x, w = dtype == np.float16, laws.gaussian((4, 300)), np.zeros(300, dtype)
  with jax.set_mesh(mesh):
    state = tx.init(w)
    for power in (12,) if half else (-100, -45, 0, 45, 100):
      given = (x * np.float32(2.0**power)).astype(dtype)
      *_, metrics = step(w, state, given)
      found = np.float64([metrics["gradient_norm"], metrics["update_norm"]])
      exact = np.ldexp(np.float64(given), -power)
      expected = [np.linalg.norm(exact) / 2, np.linalg.norm(exact.mean(axis=0)) / 2]
      # Some 300 additions in binary32, by XLA's order; halves are rounded once more.
      close = 1e-3 if half else 1e-5
      np.testing.assert_allclose(found, np.ldexp(expected, power), rtol=close)
