"""Of rows that have come, what they stand for: a decoder for each matrix."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gradcomp.codecs import (
  Codec,
  LinearCodec,
  SharedCodec,
  SparseCodec,
  is_adding,
  is_shared,
  sum_entries,
)
from gradcomp.exchange._collectives import Workers, final_stage, stacked, totals
from gradcomp.exchange._sums import add_codes, sum_dtype, unpack_sums
from gradcomp.kernels.fixed_point import scaled
from gradcomp.kernels.rows import COPIED
from gradcomp.layout import Layout, RowDecoder, mean_of_rows


def unscaled(
  codec: Codec, decode: RowDecoder, stats: jax.Array | None, scale: float
) -> RowDecoder:
  """What scaled sums of K payloads stand for, times ``scale``."""
  if not is_adding(codec):
    return lambda start, stop: scaled(decode(start, stop), scale)

  def values(start: int, stop: int) -> jax.Array:
    tiles = scaled(decode(start, stop), scale)
    # What is lost comes as whole rows.
    planes = codec.tile_size // codec.row_words
    tiles = tiles.reshape(stop - start, planes, codec.row_words)
    return codec.unscaled(tiles, None if stats is None else stats[start:stop])

  return values


def rows_decoder(
  codec: Codec, rows: jax.Array, stats: jax.Array | None, scale: float
) -> RowDecoder:
  """Of K payloads, ``uint32[K, rows, words]``."""
  if is_shared(codec):
    return sums_decoder(codec, add_codes(codec, rows), stats, scale)
  if is_adding(codec):
    return unscaled(codec, mean_decoder(codec, rows, 1.0), stats, scale)
  return mean_decoder(codec, rows, scale)


def mean_decoder(codec: Codec, rows: jax.Array, scale: float) -> RowDecoder:
  """Of rows that can be added once they are decoded; sparse ones are read at once.

  Those of small leaves, of which there may be many, are added at once, too.
  """
  if isinstance(codec, SparseCodec):
    return _sum_decoder(codec, rows, scale)
  return lambda start, stop: mean_of_rows(codec, rows[:, start:stop], scale)


def _sum_decoder(codec: SparseCodec, rows: jax.Array, scale: float) -> RowDecoder:
  positions, values = codec.entries(rows)
  together = rows.shape[1] * codec.tile_size < 2**31  # as int32 says where they lie
  every = functools.cache(lambda: sum_entries(codec, positions, values, scale))

  def decode(start: int, stop: int) -> jax.Array:
    few = (stop - start) * codec.tile_size <= COPIED
    if few and together and stop - start < rows.shape[1]:
      return every()[start:stop]
    return sum_entries(codec, positions[:, start:stop], values[:, start:stop], scale)

  return decode


def owned_decoder(
  codec: Codec, rows: jax.Array, stats: jax.Array | None, workers: Workers, total: int
) -> RowDecoder:
  """Of what the owners sent, ``uint32[N, rows, words]``."""
  if not is_shared(codec):
    return rows_decoder(codec, stacked(rows)[None], None, 1.0)
  share = -(-total // workers.size)
  unpack = functools.partial(unpack_sums, codec, rows=share, workers=workers.size)
  sums = stacked(jax.vmap(unpack)(rows))
  return sums_decoder(codec, sums, stats, workers.scale)


def psum_decoder(
  layout: Layout,
  codec: Codec,
  rows: jax.Array,
  stats: jax.Array | None,
  workers: Workers,
) -> RowDecoder:
  """Of the exact sum of all workers' codes, in the narrowest integers that hold it."""
  assert is_shared(codec)  # plan_messages puts nothing else into such a message
  codes = codec.codes(rows).astype(sum_dtype(codec, workers.size))
  name = final_stage(layout.elements, workers)
  (sums,) = totals([codes], workers.axis_name, name)
  return sums_decoder(codec, sums.astype(jnp.int32), stats, workers.scale)


def linear_decoders(
  layout: Layout,
  matrices: Sequence[jax.Array],
  keys: jax.Array,
  workers: Workers,
) -> list[RowDecoder]:
  """Of the sums of all workers' values, as floats: of dense leaves, and of chosen
  elements, which are the same on all."""
  headers: list[list[jax.Array]] = [[] for _ in layout.codecs]
  for key, (group, start, stop) in zip(keys, layout.slots, strict=True):
    codec = layout.codecs[group]
    header = jnp.zeros((stop - start, 0), jnp.uint32)
    if isinstance(codec, LinearCodec):
      header = codec.header(key, stop - start)
    headers[group].append(header)
  fronts = [jnp.concatenate(parts) for parts in headers]
  values = [
    jax.lax.bitcast_convert_type(rows[:, front.shape[1] :], jnp.float32)
    for rows, front in zip(matrices, fronts, strict=True)
  ]
  name = final_stage(layout.elements, workers)
  sums = totals(values, workers.axis_name, name)
  decoders = []
  for codec, front, total in zip(layout.codecs, fronts, sums, strict=True):
    words = jax.lax.bitcast_convert_type(total, jnp.uint32)
    rows = jnp.concatenate([front, words], axis=1)
    decoders.append(mean_decoder(codec, rows[None], workers.scale))
  return decoders


def sums_decoder(
  codec: SharedCodec, sums: jax.Array, stats: jax.Array | None, scale: float
) -> RowDecoder:
  """Of sums of codes, ``int32[rows, P, B]``."""
  assert stats is not None
  return lambda start, stop: scaled(
    codec.from_codes(sums[start:stop], stats[start:stop]), scale
  )
