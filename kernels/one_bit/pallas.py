"""Encodes 1-bit SGD by a Pallas kernel: means, signs and residual in one pass."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.kernels.common.fixed_point import exact_divide, held
from gradcomp._src.kernels.common.planes import float_words
from gradcomp._src.kernels.gpu import tiles
from gradcomp._src.kernels.one_bit import reference
from gradcomp._src.kernels.one_bit.reference import WORD, Form


@tiles.completed(reference.encode_rows)
def encode_rows(x: Array, *, form: Form, interpret: Any = False) -> tiles.Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  size = form.bucket_size
  chunk, lanes = reference.chunks(size)
  # Sums have the order of the reference: the steps of a lane one after the other, each
  # a load of its own, and the lanes by halves.
  # Each axis of two is a half of the lanes: of their chunks, or within a chunk.
  halves = lambda count: (2,) * (count.bit_length() - 1)
  chunks, steps = halves(size // chunk), chunk // lanes
  lines = *chunks, steps, *halves(lanes)

  def body(block: tiles.Block) -> None:
    def add_plane(k: Array, words: Array) -> Array:
      first = block.plane(k, 0)
      added: tuple[Array, ...] = ()
      for step in range(steps):
        x = block.plane(k, *[slice(None)] * len(chunks), step, view=1)
        found = reference.sides(x, block.spread(first, x.shape), size)
        added = tuple(map(jnp.add, added, found)) if added else found
      above, below, counts = added
      sums = _sum(above, held), 0.0 - _sum(-below, held), _sum(counts)
      pair = reference.means_of_sums(sums, first, size, size, exact_divide)
      for side, mean in enumerate(pair):
        block.put(float_words(mean), size + side * WORD + k)
      x = block.plane(k)
      is_below = x < 0
      if form.keep:
        low, high = (block.spread(side, x.shape) for side in reversed(pair))
        block.put_residual(k, x - jnp.where(is_below, low, high))
      return words | (is_below.astype(jnp.uint32) << k.astype(jnp.uint32))

    none = block.placed(jnp.zeros(block.shape, jnp.uint32))
    block.put(jax.lax.fori_loop(jnp.int32(0), jnp.int32(WORD), add_plane, none))

  launch = tiles.Launch(
    "one_bit_encode", form.row_words, interpret, form.keep, [(size,), lines]
  )
  return tiles.encode(body, x, (), form, launch)


def _sum(x: Array, kept: Callable[[Array], Array] = lambda x: x) -> Array:
  """Sums numbers of zero or more over all axes but the first, each of two."""
  x = kept(x)
  while x.ndim > 1:
    x = kept(x.sum(axis=1, dtype=x.dtype))
  return x
