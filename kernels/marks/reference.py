"""Marks in jnp: a bit for each element whose magnitude reaches a threshold.

Magnitudes are compared as the integers that their bits are: these have the same order,
with infinity and NaN above all numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp.kernels.listing import LANES, TILE, WORD, count_bits
from gradcomp.kernels.rows import Row

# Of a float's bits.
_MAGNITUDE, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


def magnitudes(x: jax.Array, sign: jax.Array | None = None) -> jax.Array:
  """``uint32`` in the order of ``|x|``, or of the elements of one sign, others zero.

  What is not finite counts for both signs.

  Args:
    x: ``float32[n]``.
    sign: ``float32[]``, positive or negative.

  Example:
    >>> values = jnp.array([-2.0, 0.0, 1.0])
    >>> magnitudes(values).argmax().item(), magnitudes(values, 1.0).argmax().item()
    (0, 2)
  """
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  magnitude = bits & _MAGNITUDE
  if sign is None:
    return magnitude
  own = (bits >> 31 == 0) == (sign > 0)
  return jnp.where(own | (magnitude >= _INFINITY), magnitude, jnp.uint32(0))


def mark(
  x: Row, threshold: jax.Array, sign: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """The bits of the elements that reach a threshold, and how many they are.

  Args:
    x: n elements.
    threshold: ``uint32[]``, in the order of :func:`magnitudes`.
    sign: ``float32[]``, to take the elements of the other for zeros.

  Returns:
    ``uint32[tiles * 32]``: bit p of word w of a tile is its element 32 p + w; of what
    fills the last tile, none is set. And ``int32[]``.
  """

  def reached(x: jax.Array) -> jax.Array:
    # Or XLA computes the magnitudes in front of the loop over thresholds: a whole copy.
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
