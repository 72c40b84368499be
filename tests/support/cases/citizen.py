"""Provides the transformations that are good citizens, each a line in ``FACTORIES``."""

import functools

import jax.numpy as jnp

import gradcomp

qsgd = functools.partial(gradcomp.qsgd, bucket_size=32)
error4 = functools.partial(qsgd, bits=4, feedback="error")

FACTORIES = {
  "qsgd4": functools.partial(qsgd, bits=4),
  "qsgd4-error": error4,
  "qsgd8-nearest": functools.partial(qsgd, bits=8, rounding="nearest"),
  "qsgd2-uniform-tensor": functools.partial(
    qsgd, bits=2, levels="uniform", bucket_size=None
  ),
  "dense": gradcomp.dense,
  "dense-bfloat16": functools.partial(gradcomp.dense, jnp.bfloat16),
}
