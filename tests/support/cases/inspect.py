"""Gradients and cases that the tests of inspect share."""

import jax
import numpy as np
import pytest

from tests.support.assertions import assert_same_bits

WORKERS = 4


def gradients(seed=0, workers=WORKERS, **shapes):
  """Of each worker its own, with something in common."""
  normal = np.random.default_rng(seed).standard_normal
  draw = lambda shape: np.float32(normal(shape) + normal((workers, *shape)))
  shapes = shapes or {"a": (20, 48), "b": (900,)}
  return {name: draw(shape) for name, shape in shapes.items()}


def some(cases, rare):
  """The cases, of which these are slow."""
  marks = lambda name: pytest.mark.slow if name in rare else ()
  return [pytest.param(x, id=name, marks=marks(name)) for name, x in cases.items()]


def of_workers(function):
  """A function of one worker, for all of them."""
  return jax.jit(jax.vmap(function, axis_name="data"))


def one(tree):
  """What the first worker has; it must be what all have."""
  for leaf in jax.tree.leaves(tree):
    assert_same_bits(leaf, np.stack([leaf[0]] * len(leaf)))
  return jax.tree.map(lambda x: np.asarray(x[0]), tree)


def close(got, expected, rtol=2e-5, atol=1e-6):
  """Measures are sums of some thousand float32, and quotients of them."""
  for name, value in expected.items():
    found = getattr(got, name)
    np.testing.assert_allclose(found, value, rtol=rtol, atol=atol, err_msg=name)
