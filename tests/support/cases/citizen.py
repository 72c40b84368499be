"""Provides the transformations that are good citizens, and one worker's gradients.

A new transformation is one more line in ``FACTORIES``.
"""

import functools

import jax.numpy as jnp
import numpy as np

import gradcomp
from gradcomp.codecs import QSGD, PowerSGD, TopK

qsgd4 = functools.partial(gradcomp.qsgd, bits=4, bucket_size=32)
error4 = functools.partial(qsgd4, feedback="error")

FACTORIES = {
  "qsgd4": qsgd4,
  "qsgd4-error": error4,
  "qsgd8-nearest": functools.partial(
    gradcomp.qsgd, bits=8, bucket_size=32, rounding="nearest"
  ),
  "qsgd2-uniform-tensor": functools.partial(
    gradcomp.qsgd, bits=2, levels="uniform", bucket_size=None
  ),
  "dense": gradcomp.dense,
  "dense-bfloat16": functools.partial(gradcomp.dense, jnp.bfloat16),
}
REMEMBERING = [
  QSGD(bits=3, bucket_size=32, levels="nonuniform"),
  TopK(density=0.1, selection="sampled"),
  PowerSGD(rank=1),
]
KEEP_RESIDUAL = ("qsgd4-error", "qsgd8-nearest", "dense-bfloat16")


def gradients(seed=0):
  """A leaf to compress, an odd one, a small one, a scalar and an empty one."""
  rng = np.random.default_rng(seed)
  shapes = {"m": (32, 32), "odd": (3, 5, 43), "b": (5,), "s": (), "empty": (0, 3)}
  return {
    name: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    for name, shape in shapes.items()
  }


def pick(tree, *names):
  return {name: tree[name] for name in names}
