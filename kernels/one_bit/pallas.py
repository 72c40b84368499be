"""Encodes and decodes 1-bit SGD by Pallas kernels for GPUs and TPUs, in one pass."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common.fixed_point import exact_divide, held
from gradcomp._src.kernels.common.planes import float_words, floats
from gradcomp._src.kernels.gpu import tiles
from gradcomp._src.kernels.one_bit import reference
from gradcomp._src.kernels.one_bit.reference import WORD, Form
from gradcomp._src.kernels.tpu import lines


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
  view = *chunks, steps, *halves(lanes)

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
    block.put(lax.fori_loop(jnp.int32(0), jnp.int32(WORD), add_plane, none))

  launch = tiles.Launch(
    "one_bit_encode", [form.row_words], interpret, form.keep, [(size,), view]
  )
  return tiles.encode(body, x, (), form, launch)


def _sum(x: Array, kept: Callable[[Array], Array] = lambda x: x) -> Array:
  """Sums numbers of zero or more over all axes but the first, each of two."""
  x = kept(x)
  while x.ndim > 1:
    x = kept(x.sum(axis=1, dtype=x.dtype))
  return x


@lines.completed(reference.encode_rows)
def encode_on_tpu(x: Array, *, form: Form, interpret: Any = False) -> tiles.Encoded:
  """Encodes as :func:`reference.encode_rows` does, to the same bits."""
  size, width = form.bucket_size, lines.width(form.bucket_size)
  count = WORD * size // width  # lines of a tile

  def body(x: Array) -> tuple[Array, ...]:
    columns = x.T
    buckets = [columns[at : at + size] for at in range(0, width, size)]
    pairs = [_means(bucket) for bucket in buckets]
    words = [lines.packed((x < 0).astype(jnp.int32), count, size)]
    for side in zip(*pairs, strict=True):
      bits = [lax.bitcast_convert_type(mean, jnp.int32) for mean in side]
      words.append(lines.rows_of_tiles(bits, count, WORD))
    found = [jnp.concatenate(words, axis=1)]
    if form.keep:
      sides = zip(buckets, pairs, strict=True)
      sent = [jnp.where(x < 0, low, high) for x, (high, low) in sides]
      found.append((columns - jnp.concatenate(sent)).T)
    return tuple(found)

  launch = tiles.Launch("one_bit_encode", [form.row_words], interpret, form.keep)
  rows, *rest = lines.encode(body, x, launch, WORD * size, width)
  return rows, rest[0] if rest else None


def _means(bucket: Array) -> tuple[Array, Array]:
  """Returns ``avg+`` and ``avg-`` of columns, ``float32[1, columns]`` each."""
  size, first = bucket.shape[0], bucket[:1]
  chunk, lanes = reference.chunks(size)
  add = lambda a, b: tuple(map(jnp.add, a, b))
  sides = lambda at: reference.sides(bucket[at : at + lanes], first, size)
  of_chunk = lambda at: functools.reduce(add, map(sides, range(at, at + chunk, lanes)))
  parts = map(of_chunk, range(0, size, chunk))
  totals = [_sum_by_halves(jnp.concatenate(x)) for x in zip(*parts, strict=True)]
  return reference.means_of_sums(totals, first, size, size, exact_divide)


def _sum_by_halves(x: Array) -> Array:
  """Sums over the first axis as :func:`scales.sum_by_halves` does over the last."""
  while (size := x.shape[0]) > 1:
    if size % 2:
      x, size = jnp.concatenate([x, jnp.zeros_like(x[:1])]), size + 1
    x = x[: size // 2] + x[size // 2 :]
  return jnp.where(x == 0, 0, x)  # the reference starts from zero: no minus zeros


@lines.decoder(reference.decode_rows)
def decode_on_tpu(rows: Array, *, form: Form, interpret: Any = False) -> Array:
  """Decodes as :func:`reference.decode_rows` does, to the same bits."""
  size = form.bucket_size

  def body(columns: Array) -> list[Array]:
    words, means = columns[:size], floats(columns[size:])
    own = lambda k: means[k : k + 1]
    bit = lambda k: words & lax.shift_left(np.int32(1), np.int32(k)) != 0
    return [jnp.where(bit(k), own(WORD + k), own(k)) for k in range(WORD)]

  given = lax.bitcast_convert_type(rows, jnp.int32)
  return lines.decode(body, [given], "one_bit_decode", WORD * size, interpret)
