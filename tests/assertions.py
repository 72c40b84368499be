"""Compares trees and floats bit for bit, and matches the messages of errors."""

import re

import jax
import numpy as np


def says(*parts):
  """A pattern for all parts, in this order."""
  return "(?s)" + ".*".join(re.escape(part) for part in parts)


def assert_trees_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_equal(got, expected):
  """The same tree and types, and the same values: NaN equals NaN."""
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, expected)
  jax.tree.map(np.testing.assert_array_equal, got, expected)


def bits(x):
  return np.asarray(x, np.float32).view(np.uint32)


def assert_same_bits(a, b):
  np.testing.assert_array_equal(bits(a), bits(b))


def assert_same_floats(got, expected):
  """NaN of any bits."""
  got, expected = np.asarray(got), np.asarray(expected, np.float32)
  assert got.dtype == np.float32
  np.testing.assert_array_equal(got, expected)
  real = ~np.isnan(expected)
  np.testing.assert_array_equal(np.signbit(got)[real], np.signbit(expected)[real])
