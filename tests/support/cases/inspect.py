"""Gradients and cases that the tests of inspect share."""

import numpy as np
import pytest

WORKERS = 4


def gradients(seed=0, workers=WORKERS, **shapes):
  """Of each worker its own, with something in common."""
  rng = np.random.default_rng(seed)
  shapes = shapes or {"a": (20, 48), "b": (900,)}
  return {
    name: (rng.standard_normal(shape) + rng.standard_normal((workers, *shape))).astype(
      np.float32
    )
    for name, shape in shapes.items()
  }


def some(cases, rare):
  """The cases, of which these are slow."""
  marks = lambda name: pytest.mark.slow if name in rare else ()
  return [pytest.param(x, id=name, marks=marks(name)) for name, x in cases.items()]
