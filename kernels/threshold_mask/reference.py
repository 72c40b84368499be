"""Marks the elements that reach a threshold in magnitude, by one bit each, in jnp."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp._src.kernels.common.magnitudes import magnitudes
from gradcomp._src.kernels.common.row_view import RowView
from gradcomp._src.kernels.compaction import LANES, TILE, WORD, count_bits


def mark(
  x: RowView, threshold: jax.Array, sign: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Marks the elements that reach a threshold by one bit each, and counts them.

  The threshold is ``uint32[]``, in the order of magnitudes.py. With ``sign``,
  ``float32[]``, elements of the other sign count as zeros.

  Returns:
    ``uint32[tiles * 32]``, in which bit p of word w of a tile is its element 32 p + w,
    and no bit is set behind the row; and the number of marked elements, ``int32[]``.
  """

  def reached(x: jax.Array) -> jax.Array:
    # Without the barrier XLA computes the magnitudes in front of the loop over
    # thresholds, which makes a copy of the row.
    x, limit = lax.optimization_barrier((x, threshold))
    whole = x.size // TILE * TILE
    parts = [x[:whole], jnp.pad(x[whole:], (0, -x.size % TILE))]
    bit = jnp.uint32(1) << lax.iota(jnp.uint32, WORD)[:, None]
    words = []
    for part in parts:
      order = magnitudes(part.reshape(-1, WORD, LANES), sign)
      bits = jnp.where(order >= limit, bit, jnp.uint32(0))
      words.append(lax.reduce(bits, np.uint32(0), lax.bitwise_or, (1,)))
    return jnp.concatenate(words)

  words = x.read(reached)
  if missing := -x.size % TILE:
    real = np.arange(TILE).reshape(WORD, LANES) < TILE - missing
    kept = (real.astype(np.uint32) << np.arange(WORD, dtype=np.uint32)[:, None]).sum(0)
    words = words.at[-1].set(words[-1] & kept.astype(np.uint32))
  words = words.reshape(-1)
  return words, count_bits(words)
