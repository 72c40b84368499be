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
from gradcomp._src.kernels.gpu import mosaic_tiles, triton_tiles
from gradcomp._src.kernels.gpu.triton_tiles import Launch
from gradcomp._src.kernels.one_bit import reference
from gradcomp._src.kernels.one_bit.reference import WORD, Form, means_of_sums, sides


@triton_tiles.completed(reference.encode_rows)
def encode_rows(
  x: jax.Array, *, form: Form, interpret: Any = False
) -> triton_tiles.Encoded:
  """Encodes as :func:`reference.encode_rows` does, but for last bits of the means."""
  size = form.bucket_size

  def body(tile: mosaic_tiles.Tile) -> None:
    words: Any = None
    for k in range(WORD):
      x, first = tile.plane(k), tile.first(k)
      sums = [side.sum() for side in sides(x, first, size)]
      positive, negative = means_of_sums(sums, first, size, size, exact_divide)
      tile.put_scale(k, float_words(positive))
      tile.put_scale(k + WORD, float_words(negative))
      below = x < 0
      if form.keep:
        tile.put_residual(k, x - jnp.where(below, negative, positive))
      signs = below.astype(jnp.uint32) << k
      words = signs if words is None else words | signs
    tile.put(words)

  launch = Launch("one_bit_encode", form.row_words, form.keep, interpret=interpret)
  return mosaic_tiles.encode(body, x, (), form, launch)
