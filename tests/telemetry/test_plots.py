"""Figures of inspections have what they show, and say what they cannot."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from tests.support.assertions import says


@pytest.fixture(scope="module")
def found():
  pytest.importorskip("matplotlib")
  tx = gradcomp.qsgd(bits=4, min_leaf_size=0)
  grads = {"b": jnp.full(100, 0.75), "w": jnp.array([0.0, 3.0] * 200)}
  return gradcomp.telemetry.inspect(tx, grads, tx.init(grads))


def test_exponents(found):
  """0.75 has the exponent -1, and 3 has 1; two fifths of all are zeros."""
  above, below, _ = gradcomp.telemetry.plots.exponents(found).axes
  heights = [bar.get_height() for bar in above.patches]
  np.testing.assert_allclose(heights, [20, 0, 40], rtol=1e-6)
  assert [bar.get_center()[0] for bar in above.patches] == [-1, 0, 1]
  assert "zeros: 40.00%" in above.get_title()
  assert [x.get_text() for x in below.get_yticklabels()] == ["['b']", "['w']"]
  (image,) = below.images
  shown = np.ma.filled(image.get_array(), 0)
  np.testing.assert_allclose(shown, [[100, 0, 0], [0, 0, 50]], rtol=1e-6)


def test_errors(found):
  left, right = gradcomp.telemetry.plots.errors(found).axes
  for ax, field in ((left, "relative_error"), (right, "cosine")):
    shown = [bar.get_width() for bar in ax.patches]
    expected = [float(getattr(x, field)) for x in found.leaves.values()]
    assert shown == expected


def test_curves(found):
  axes = gradcomp.telemetry.plots.curves([found, found], steps=[0, 50]).axes
  lines = {line.get_label(): line for ax in axes for line in ax.lines}
  assert "residual norm" not in lines  # nothing is kept
  assert lines["zeros"].get_xdata().tolist() == [0, 50]
  assert lines["zeros"].get_ydata().tolist() == [float(found.total.zeros)] * 2


def test_curves_need_a_step_for_each(found):
  for inspections, steps in (([], []), ([found], [1, 2])):
    with pytest.raises(ValueError, match=says("`steps` must", f"got {len(steps)}")):
      gradcomp.telemetry.plots.curves(inspections, steps)


def test_numbers_of_several_workers_are_refused(found):
  several = jax.tree.map(lambda x: jnp.stack([x, x]), found)
  with pytest.raises(ValueError, match=says("`inspection` must hold one", "x[0]")):
    gradcomp.telemetry.plots.errors(several)


def test_without_matplotlib_the_error_says_what_to_install(found, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  with pytest.raises(ImportError, match=says("pip install 'gradcomp[plots]'")):
    gradcomp.telemetry.plots.errors(found)
