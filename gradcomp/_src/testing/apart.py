"""The law of random bits: no two elements of a leaf share them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs import sums
from gradcomp._src.codecs.leaf import Leaf
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.tiles import from_tiles, payload_tiles, tile_shape
from gradcomp._src.testing.broken import BrokenLaw
from gradcomp._src.testing.leaves import KEY, gaussian, tile_of
from gradcomp._src.testing.noise import variance_of_sums
from gradcomp._src.testing.trial import encode

_ROWS = 4  # the last is cut short


def elements_draw_apart(codec: LeafCodec, draws: int = 32) -> None:
  """No two elements round by the same random bits, in any row or plane.

  A codec may be unbiased nevertheless. But the errors of elements that share their bits
  add up, as in the mean over a layer.

  The law sends positive numbers, the same ones in every bucket. It adds up the errors
  of all buckets at one place, and of all elements of a bucket. If errors are
  independent, the variance of a sum is the sum of variances. If all rows have the same
  bits, it is larger by the number of rows. Five standard deviations are allowed.

  Args:
    codec: a codec that needs a key, with the same rows for all leaves.
    draws: the number of keys.

  Example:
    >>> from gradcomp.testing import laws
    >>> laws.elements_draw_apart(gradcomp.codecs.QSGD(bits=4))
  """
  tile = tile_of(codec)
  if not codec.needs_key or tile is None:
    return
  size = _ROWS * tile
  bound: Any = codec.bind(Leaf((size,)))
  if sums.of(bound).alike:
    return
  width = tile_shape(bound)[-1]
  # In the tiles, where a codec rounds: one that rotates has other elements there.
  tiles = np.resize(np.abs(gaussian(width)), (_ROWS, *tile_shape(bound)))
  like = jax.ShapeDtypeStruct((size - width // 2,), jnp.float32)
  x = from_tiles(jnp.asarray(tiles), like, bound)
  keys = np.stack([np.full(draws, KEY[0]), np.arange(draws, dtype=np.uint32)], axis=1)

  @jax.jit
  def sent(x: jax.Array, keys: jax.Array) -> jax.Array:
    return jax.lax.map(lambda key: payload_tiles(encode(codec, x, key), bound), keys)

  found = np.asarray(sent(x, jnp.asarray(keys)), np.float64)
  errors = (found - found.mean(axis=0)).reshape(draws, -1, width)
  for axis, these in ((1, "at one place of all buckets"), (2, "of a bucket")):
    ratio, spread = variance_of_sums(errors, axis)
    if ratio > 1 + 5 * spread:
      raise BrokenLaw(
        "elements_draw_apart",
        codec,
        "draw for each element anew, so that errors are independent",
        f"the errors {these} have a sum with {ratio:.3f} times the variance of "
        f"independent ones, give or take {spread:.3f}",
        "the shape that `encode_rows` draws for, which is that of all rows, and "
        "which of `random_lanes` each plane takes",
      )
