"""Compares trees and floats bit by bit, ranks bits, and matches messages of errors."""

import importlib
import re
import sys

import chex
import jax
import numpy as np


def says(*parts):
  """A pattern for all parts, in this order."""
  return "(?s)" + ".*".join(re.escape(part) for part in parts)


def vanish(monkeypatch, name):
  """Makes imports of a module fail."""
  package, _, module = name.rpartition(".")
  monkeypatch.delattr(importlib.import_module(package), module)
  monkeypatch.setitem(sys.modules, name, None)


def bits_of(x):
  """The bits of an array of floats as unsigned integers; all else as it is."""
  x = np.asarray(x)
  floats = jax.dtypes.issubdtype(x.dtype, np.floating)
  return x.view(f"uint{8 * x.dtype.itemsize}") if floats else x


def rank(numbers):
  """The rank of rows of bits modulo 2, each row an integer."""
  basis = []
  for number in numbers:
    for other in basis:
      number = min(number, number ^ other)
    if number:
      basis.append(number)
  return len(basis)


def assert_same_bits(got, expected):
  """Trees of one structure, with leaves of the same shapes, types and bits.

  chex takes zeros of both signs for equal, all NaN, and bfloat16 for float32: it says
  which numbers differ, and then compares their bits.
  """
  got, expected = jax.device_get((got, expected))
  chex.assert_trees_all_equal_dtypes(got, expected)
  chex.assert_trees_all_equal(got, expected)
  got, expected = (jax.tree.map(bits_of, tree) for tree in (got, expected))
  chex.assert_trees_all_equal(got, expected, strict=True)


def assert_same_floats(got, expected):
  """Arrays of the same float32 numbers, bit for bit; any NaN is as good as another."""
  one_nan = lambda x: np.where(np.isnan(x), np.float32(np.nan), x)
  chex.assert_type(got, np.float32)
  assert_same_bits(one_nan(got), one_nan(np.asarray(expected, np.float32)))


def assert_equal(got, expected):
  """Trees of the same values, whose leaves JAX's types do not tell apart either.

  Zeros may differ in sign, for optax's wrappers add zeros.
  """
  chex.assert_trees_all_equal_structs(got, expected)
  assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, expected)
  chex.assert_trees_all_equal(*jax.device_get((got, expected)))
