"""Encodes 1-bit SGD by a Pallas kernel for TPUs: means, signs and residual at once."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common import fixed_point, planes
from gradcomp._src.kernels.gpu.tiles import Encoded
from gradcomp._src.kernels.one_bit import reference
from gradcomp._src.kernels.one_bit.reference import WORD
from gradcomp._src.kernels.tpu import lines


@lines.completed(reference.encode_rows)
def encode_rows(x: Array, *, form: reference.Form, interpret: Any = False) -> Encoded:
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

  launch = lines.Launch(
    "one_bit_encode", WORD * size, width, (form.row_words,), interpret, form.keep
  )
  rows, *rest = lines.encode(body, x, launch)
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
  return reference.means_of_sums(totals, first, size, size, fixed_point.exact_divide)


def _sum_by_halves(x: Array) -> Array:
  """Sums over the first axis as :func:`scales.sum_by_halves` does over the last."""
  while (size := x.shape[0]) > 1:
    if size % 2:
      x, size = jnp.concatenate([x, jnp.zeros_like(x[:1])]), size + 1
    x = x[: size // 2] + x[size // 2 :]
  return jnp.where(x == 0, 0, x)  # the reference starts from zero: no minus zeros


@lines.decoder(reference.decode_rows)
def decode_rows(rows: Array, *, form: reference.Form, interpret: Any = False) -> Array:
  """Decodes as :func:`reference.decode_rows` does, to the same bits."""
  size = form.bucket_size

  def body(columns: Array) -> list[Array]:
    words, means = columns[:size], planes.floats(columns[size:])
    own = lambda k: means[k : k + 1]
    bit = lambda k: words & lax.shift_left(np.int32(1), np.int32(k)) != 0
    return [jnp.where(bit(k), own(WORD + k), own(k)) for k in range(WORD)]

  given = lax.bitcast_convert_type(rows, jnp.int32)
  return lines.decode(body, [given], "one_bit_decode", WORD * size, interpret)
