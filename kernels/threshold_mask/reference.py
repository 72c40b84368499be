"""Marks the elements that reach a threshold in magnitude, by one bit each, in jnp."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common.row_view import RowView
from gradcomp._src.kernels.compaction.reference import LANES, TILE, WORD, count_bits

ABOVE_ALL = np.uint32(0x80000000)  # above all magnitudes, NaN's too
_SMALLEST_NORMAL, _INFINITY = np.uint32(0x00800000), np.uint32(0x7F800000)  # bits


def magnitudes(x: Array, sign: Array | None = None) -> Array:
  """Returns ``|x|`` in order, as ``uint32``; with ``sign``, the other sign's are 0."""
  # Infinity and NaN are above all numbers, and have both signs.
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  magnitude = bits & np.uint32(ABOVE_ALL - 1)
  if sign is None:
    return magnitude
  own = (bits >> 31 == 0) == (sign > 0)
  return jnp.where(own | (magnitude >= _INFINITY), magnitude, jnp.uint32(0))


def as_floats(order: Array) -> Array:
  """Returns normal floats in the same order, which are sorted faster than integers."""
  # CPUs take subnormal numbers for zeros: they become negative, and NaN infinity.
  subnormal = ABOVE_ALL | (2 * _SMALLEST_NORMAL - 1 - order)
  bits = jnp.where(order < _SMALLEST_NORMAL, subnormal, jnp.minimum(order, _INFINITY))
  return lax.bitcast_convert_type(bits, jnp.float32)


def mark(x: RowView, threshold: Array, sign: Array | None) -> tuple[Array, Array]:
  """Marks the elements that reach a threshold by one bit each, and counts them."""
  # The threshold is `uint32[]`, in the order of `magnitudes`. Bit p of word w of a tile
  # is its element 32 p + w: `uint32[tiles * 32]`. The count is `int32[]`.

  def reached(x: Array) -> Array:
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
