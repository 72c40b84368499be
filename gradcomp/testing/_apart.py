"""A law of what is drawn: every element of a leaf has random bits of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp import sums
from gradcomp.codecs import Leaf, LeafCodec, tile_shape
from gradcomp.testing._broken import BrokenLaw
from gradcomp.testing._leaves import KEY, gaussian, tile_of
from gradcomp.testing._noise import variance_of_sums
from gradcomp.testing._trial import round_trip

_ROWS = 4  # the last is cut short


def elements_draw_apart(codec: LeafCodec, draws: int = 32) -> None:
  """No two elements round by the same random bits, whatever their rows and planes.

  Each codec may be unbiased all the same. But the errors of elements that share their
  bits add up, as in the mean over a layer.

  The law sends positive numbers, the same ones in every bucket. It adds up the errors
  of all buckets at one place, and those of all elements of a bucket. If errors are
  independent, the variance of a sum is the sum of variances. If all rows have the same
  bits, it is as many times that as there are rows, but for five standard deviations.

  Args:
    codec: a codec that draws, and whose rows are the same for all leaves.
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
  x = np.resize(np.abs(gaussian(width)), size - width // 2)
  keys = np.stack([np.full(draws, KEY[0]), np.arange(draws, dtype=np.uint32)], axis=1)

  @jax.jit
  def sent(x: jax.Array, keys: jax.Array) -> jax.Array:
    return jax.lax.map(lambda key: round_trip(codec, x, key), keys)

  found = np.asarray(sent(jnp.asarray(x), jnp.asarray(keys)), np.float64)
  errors = np.pad(found - found.mean(axis=0), ((0, 0), (0, size - x.size)))
  for axis, these in ((1, "at one place of all buckets"), (2, "of a bucket")):
    buckets = errors.reshape(draws, -1, width)
    ratio, spread = variance_of_sums(buckets, axis)
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
