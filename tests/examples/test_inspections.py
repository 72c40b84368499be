"""Figures of inspections have what they show."""

import jax
import jax.numpy as jnp
import pytest

import gradcomp
from examples.lib import inspections


@pytest.fixture(scope="module")
def found():
  tx = gradcomp.qsgd(bits=4, min_leaf_size=0)
  grads = {"b": jnp.full(100, 0.75), "w": jnp.array([0.0, 3.0] * 200)}
  look = jax.jit(lambda grads: gradcomp.telemetry.inspect(tx, grads, tx.init(grads)))
  return jax.device_get(look(grads))


def test_errors(found):
  left, right = inspections.errors(found).axes
  for ax, field in ((left, "relative_error"), (right, "cosine")):
    shown = [bar.get_width() for bar in ax.patches]
    assert shown == [float(getattr(x, field)) for x in found.leaves.values()]
  assert [x.get_text() for x in left.get_yticklabels()] == ["['b']", "['w']"]


def test_curves(found):
  axes = inspections.curves([found, found], steps=[0, 50]).axes
  lines = {line.get_label(): line for ax in axes for line in ax.lines}
  assert "residual norm" not in lines  # nothing is kept
  assert lines["zeros"].get_xdata().tolist() == [0, 50]
  assert lines["zeros"].get_ydata().tolist() == [float(found.total.zeros)] * 2
