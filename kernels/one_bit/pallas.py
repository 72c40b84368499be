"""Encodes 1-bit SGD by a Pallas kernel: means, signs and residual in one pass.

Sums are taken in the order of the reference: the steps of a lane one after the other,
each a load of its own, and the lanes by halves. The signs read the block once more, out
of the cache.
"""

import jax
import jax.numpy as jnp

from gradcomp._src.kernels.common.fixed_point import exact_divide, held
from gradcomp._src.kernels.common.planes import float_words
from gradcomp._src.kernels.gpu import triton_tiles
from gradcomp._src.kernels.gpu.triton_tiles import Launch
from gradcomp._src.kernels.one_bit import reference
from gradcomp._src.kernels.one_bit.reference import (
  WORD,
  Form,
  chunks,
  means_of_sums,
  sides,
)

_ELEMENTS = 2048  # of a plane in a block: a lane or more for each thread of four warps


@triton_tiles.completed(reference.encode_rows)
def encode_rows(
  x: jax.Array, *, form: Form, interpret: bool = False
) -> triton_tiles.Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""

  def body(block: triton_tiles.Block) -> None:
    def add_plane(k: jax.Array, words: jax.Array) -> jax.Array:
      positive, negative = _means(block, k)
      block.put_scale(k, float_words(positive))
      block.put_scale(k + WORD, float_words(negative))
      x = block.plane(k)
      below = x < 0
      if form.keep:
        sent = jnp.where(below, negative[:, None], positive[:, None])
        block.put_residual(k, x - sent)
      return words | (below.astype(jnp.uint32) << k.astype(jnp.uint32))

    none = jnp.zeros(block.shape, jnp.uint32)
    block.put(jax.lax.fori_loop(jnp.int32(0), jnp.int32(WORD), add_plane, none))

  launch = Launch(
    "one_bit_encode", form.row_words, form.keep, _ELEMENTS, interpret=interpret
  )
  return triton_tiles.encode(body, x, (), form, launch)


def _means(block: triton_tiles.Block, plane: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns ``avg+`` and ``avg-`` of a plane's buckets: ``float32[rows]`` each."""
  size = block.shape[1]
  chunk, lanes = chunks(size)
  bucket = block.elements(plane, 0, 1)
  first = block.part(bucket)
  number = block.elements(plane, 0, size // chunk * lanes) - bucket
  # The first element of each lane, by the lane's number.
  start = bucket + number // lanes * chunk + number % lanes
  sums = sides(block.part(start), first, size)
  for step in range(1, chunk // lanes):
    found = sides(block.part(start + step * lanes), first, size)
    sums = tuple(a + b for a, b in zip(sums, found, strict=True))
  counts = sums[2].astype(jnp.int32).sum(axis=1).astype(jnp.uint32)
  positive, negative = _sum_by_halves(sums[0]), 0.0 - _sum_by_halves(-sums[1])
  sums = positive, negative, counts
  return means_of_sums(sums, first.reshape(first.shape[0]), size, size, exact_divide)


def _sum_by_halves(x: jax.Array) -> jax.Array:
  """Sums numbers of zero or more over the last axis: ``float32[rows]``."""
  while x.shape[1] > 1:
    x = held(x.reshape(x.shape[0], 2, x.shape[1] // 2).sum(axis=1))
  return x.reshape(x.shape[0])
