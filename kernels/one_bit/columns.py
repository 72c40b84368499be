"""Encodes 1-bit SGD by columns, as CNTK does: each column of a matrix is a bucket."""

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.kernels.common.planes import float_words, floats
from gradcomp._src.kernels.common.scales import sum_lanes
from gradcomp._src.kernels.one_bit.reference import WORD, means_of_sums, sides


def encode_columns(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Encodes the columns of ``float32[d, n]``; returns rows and the residual.

  The rows are ``uint32[n, ceil(d / 32) + 2]``.
  """
  size, count = matrix.shape
  present = jnp.full(count, size)
  first = matrix[0] if size else jnp.zeros(count, jnp.float32)
  # This sums over the first axis, with a column in each lane.
  sums = sum_lanes(sides(matrix, first, size))
  pair = means_of_sums(sums, first, present, size)
  signs = jnp.pad((matrix < 0).astype(jnp.uint32), ((0, -size % WORD), (0, 0)))
  place = np.arange(WORD, dtype=np.uint32)[:, None]
  signs = signs.reshape(-(-size // WORD), WORD, count)
  words = jnp.sum(signs << place, axis=1, dtype=jnp.uint32)
  rows = jnp.concatenate([words.T, float_words(jnp.stack(pair, axis=1))], axis=1)
  return rows, matrix - jnp.where(matrix < 0, pair[1], pair[0])


def decode_columns(rows: jax.Array, *, size: int) -> jax.Array:
  """Decodes ``uint32[..., n, words]`` to columns, ``float32[..., n, d]``."""
  place = jax.lax.broadcasted_iota(jnp.uint32, (WORD,), 0)
  bits = (rows[..., :-2, None] >> place) & jnp.uint32(1)
  words = rows.shape[-1] - 2
  negative = bits.reshape(*rows.shape[:-1], words * WORD)[..., :size] == 1
  pair = floats(rows[..., -2:])
  return jnp.where(negative, pair[..., 1:], pair[..., :1])
