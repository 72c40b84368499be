"""Encodes 1-bit SGD by a Mosaic GPU kernel: means, signs and residual in one pass.

Mosaic cannot reduce a part of a plane, so that sums have an order of their own. A mean
may therefore differ from the reference's in its last bits, relatively by less than ``(B
/ 128 + 40) * 2**-24``: that is the number of roundings on an element's way to the two
sums, which have terms of one sign. The difference measured is 1.8e-7 (interpreted).
Signs are equal, and the residual is exact for the code.
"""

from typing import Any

import jax
import jax.numpy as jnp

from gradcomp._src.kernels.common.fixed_point import exact_divide
from gradcomp._src.kernels.common.planes import float_words
from gradcomp._src.kernels.gpu import mosaic_tiles
from gradcomp._src.kernels.one_bit import reference
from gradcomp._src.kernels.one_bit.reference import WORD, means_of_sums, sides


def encode_rows(
  x: jax.Array, *, bucket_size: int, keep: bool, interpret: Any = None
) -> tuple[jax.Array, jax.Array | None]:
  """Encodes as :func:`reference.encode_rows` does, but for last bits of the means."""

  def body(tile: mosaic_tiles.Tile) -> None:
    words: Any = None
    for k in range(WORD):
      x, first = tile.plane(k), tile.first(k)
      sums = [side.sum() for side in sides(x, first, bucket_size)]
      positive, negative = means_of_sums(
        sums, first, bucket_size, bucket_size, exact_divide
      )
      tile.put_scale(k, float_words(positive))
      tile.put_scale(k + WORD, float_words(negative))
      below = x < 0
      if keep:
        tile.put_residual(k, x - jnp.where(below, negative, positive))
      signs = below.astype(jnp.uint32) << k
      words = signs if words is None else words | signs
    tile.put(words)

  def last(rest: jax.Array, row: int) -> tuple[jax.Array, jax.Array | None]:
    del row  # nothing is random
    return reference.encode_rows(rest, bucket_size=bucket_size, keep=keep)

  return mosaic_tiles.encode(
    body,
    "one_bit_encode",
    x,
    (),
    planes=WORD,
    bucket_size=bucket_size,
    row_words=bucket_size + 2 * WORD,
    keep=keep,
    last=last,
    interpret=interpret,
  )
