"""Residuals of fewer bits as NumPy's numbers, and exchanges that the tests share."""

import functools

import jax
import numpy as np
import pytest

import gradcomp
from gradcomp import ErrorFeedback
from gradcomp._src.core import residual_storage
from tests.support import modes

WORKERS = 4
STORED = ("bfloat16", "int8")
CODEC = gradcomp.codecs.QSGD(bits=2, bucket_size=32, rounding="nearest")
each_way = pytest.mark.parametrize("stored", STORED)

to_int8 = jax.jit(residual_storage.to_int8)
to_bfloat16 = jax.jit(residual_storage.to_bfloat16)


def read(residual):
  """The numbers of a residual, in NumPy."""
  if not residual_storage.is_stored(residual):
    return np.asarray(residual).astype(np.float32)
  codes, scales = map(np.asarray, residual)
  size = codes.shape[-1] // max(scales.shape[-1], 1)
  return codes * np.repeat(scales, size, axis=-1)


def step_of(stored, x):
  """The distance between two numbers that can be stored, of each element."""
  if stored == "int8":
    kept = to_int8(x, np.zeros(x.shape, np.uint16))
    return read(kept._replace(codes=np.ones(x.shape, np.int8)))
  return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0**-126))) - 7)


@functools.cache
def exchange(stored, *, feedback=ErrorFeedback, **options):
  return gradcomp.compress(
    CODEC,
    axis_name="data",
    exchange="all_gather",
    min_leaf_size=0,
    feedback=feedback(residual_dtype=stored, **options),
  )


def gradients(seed, workers=WORKERS):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.standard_normal((workers, *shape)).astype(np.float32)
  return {"w": normal(6, 64), "b": normal(7), "s": normal()}


@functools.cache
def updating(mode, tx):
  """``update`` of all workers, compiled once for all tests of a file."""
  return modes.mapped(mode, tx, WORKERS)


def steps(mode, tx, trees, *, state=None):
  """Outputs and residuals ``[N, ...]`` as floats, of steps one after the other."""
  params = jax.tree.map(lambda leaf: leaf[0], trees[0])
  update = updating(mode, tx)
  outputs, kept = [], []
  for tree in trees:
    output, state = update(tree, state, params)
    residual = state.residual
    if mode not in ("vmap", "pmap"):
      unstack = lambda x: np.asarray(x).reshape(WORKERS, -1, *x.shape[1:])
      residual = jax.tree.map(unstack, residual)
    floats = jax.tree.map(read, residual, is_leaf=residual_storage.is_stored)
    if mode == modes.EXPLICIT:  # in the units of addends
      floats = jax.tree.map(lambda x: x * np.float32(WORKERS), floats)
    outputs.append(jax.device_get(output))
    kept.append(floats)
  return outputs, kept
