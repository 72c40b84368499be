"""One message: encode, exchange, decode, and what was lost on the way."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp.codecs import Codec, Dense, SharedCodec, is_adding, is_shared
from gradcomp.exchange._all_gather import all_gather
from gradcomp.exchange._collectives import (
  Workers,
  final_stage,
  largest,
  pmean,
  psum,
  split,
  stacked,
)
from gradcomp.exchange._hierarchical import hierarchical
from gradcomp.exchange._in_format import sums_in_format
from gradcomp.exchange._plan import Message
from gradcomp.exchange._ring import ring
from gradcomp.exchange._sums import add_codes, sum_dtype, unpack_sums
from gradcomp.exchange._two_shot import two_shot
from gradcomp.kernels.fixed_point import scaled
from gradcomp.layout import Layout, RowDecoder, mean_of_rows, row_cutter

Leaves = list[jax.Array]
Residuals = list[jax.Array | None]  # of the second stage, one for each codec


class Keys(NamedTuple):
  """Of one worker and step."""

  leaves: jax.Array  # uint32[leaves, 2]
  stages: jax.Array  # uint32[codecs, 2], for what is encoded after the leaves


class Outcome(NamedTuple):
  """What :func:`average` returns.

  Attributes:
    mean: float32 leaves, equal on all workers.
    unsent: what this worker did not send, in the units of the leaves; None for a plain
      mean, which loses nothing, and where nobody asked.
    residuals: what the owners' encodings lost.
  """

  mean: Leaves
  unsent: Leaves | None
  residuals: Residuals


def average(
  message: Message,
  leaves: Leaves,
  keys: Keys | None,
  workers: Workers | None,
  *,
  group_size: int | None,
  residuals: Residuals,
  memory: jax.Array | None,
  keep: bool,
) -> Outcome:
  """The mean of all workers' leaves, and what was lost.

  Args:
    message: the plan.
    leaves: float32 arrays.
    keys: for stochastic rounding, or None.
    workers: who exchanges; None to exchange nothing.
    group_size: for ``hierarchical`` over one axis.
    residuals: of the second stage, ``float32[share, tile_size]`` for each codec; None
      where none is kept.
    memory: of the codec that has one, equal on all workers.
    keep: whether to return what was not sent.
  """
  layout, exchange = message.layout, message.exchange
  if workers is None or not layout.elements or exchange == "local":
    if exchange == "local":
      memory = None  # nobody agrees on anything
    own = _encode(layout, leaves, keys, layout.stats(leaves), memory, keep)
    sent = layout.decode(own.decoders)
    return Outcome(sent, _unsent(leaves, own, sent) if keep else None, residuals)
  if exchange == "psum" and layout.codecs == (Dense(),):
    reduce = psum if workers.scale == 1 else pmean
    return Outcome(reduce(leaves, workers.axis_name), None, residuals)
  if any(is_adding(codec) for codec in layout.codecs):
    return _in_format(message, leaves, keys, workers, group_size, residuals, keep)
  stages = None if keys is None else keys.stages

  if exchange in ("ring", "hierarchical"):
    tiles = layout.tiles(leaves)
    if exchange == "ring":
      rows, lost = ring(layout, tiles, workers, stages, memory)
      scale = workers.scale
    else:
      rows, lost, residuals = hierarchical(
        layout, tiles, workers, group_size, stages, residuals, memory
      )
      scale = 1.0
    decoders = [
      _rows_decoder(codec, words[None], None, scale)
      for codec, words in zip(layout.codecs, rows, strict=True)
    ]
    unsent = layout.decode([row_cutter(x) for x in lost]) if keep else None
    return Outcome(layout.decode(decoders), unsent, residuals)

  shared = _shared(layout.stats(leaves), workers)
  own = _encode(layout, leaves, keys, shared, memory, keep)
  if exchange == "all_gather":
    gathered = all_gather(layout, own.matrices, workers)
    decoders = [
      _rows_decoder(codec, rows, stats, workers.scale)
      for codec, rows, stats in zip(layout.codecs, gathered, own.stats, strict=True)
    ]
  elif exchange == "two_shot":
    gathered, residuals = two_shot(
      layout, own.matrices, workers, stages, residuals, memory
    )
    decoders = [
      _owned_decoder(codec, rows, stats, workers, total)
      for codec, rows, stats, total in zip(
        layout.codecs, gathered, own.stats, layout.rows, strict=True
      )
    ]
  else:
    decoders = [
      _psum_decoder(layout, codec, rows, stats, workers)
      for codec, rows, stats in zip(layout.codecs, own.matrices, own.stats, strict=True)
    ]
  unsent = _unsent(leaves, own, layout.decode(own.decoders)) if keep else None
  return Outcome(layout.decode(decoders), unsent, residuals)


def _in_format(
  message: Message,
  leaves: Leaves,
  keys: Keys | None,
  workers: Workers,
  group_size: int | None,
  residuals: Residuals,
  keep: bool,
) -> Outcome:
  """The mean where a codec adds in its own numbers."""
  layout = message.layout
  shared = _shared(layout.stats(leaves), workers)
  own = _encode(layout, leaves, keys, shared, None, keep)
  sums, lost = sums_in_format(
    message.exchange, layout, own.matrices, workers, group_size, keep=keep
  )

  def unscaled(decoders: Sequence[RowDecoder], scale: float) -> Leaves:
    parts = zip(layout.codecs, decoders, own.stats, strict=True)
    return layout.decode([_unscaled(*part, scale) for part in parts])

  unsent = None
  if lost is not None:
    coded = _unsent(leaves, own, layout.decode(own.decoders))
    unsent = [x + y for x, y in zip(coded, unscaled(lost, 1.0), strict=True)]
  return Outcome(unscaled(sums, workers.scale), unsent, residuals)


def _unscaled(
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


class _Encoded(NamedTuple):
  """What this worker sends: for each codec its rows, their statistics and decoder.

  And of each leaf what is not sent, where encoding says so; else None.
  """

  matrices: list[jax.Array]
  stats: list[jax.Array | None]
  decoders: list[RowDecoder]
  unsent: list[jax.Array | None]


def _encode(
  layout: Layout,
  leaves: Leaves,
  keys: Keys | None,
  stats: Sequence[jax.Array | None],
  memory: jax.Array | None,
  keep: bool,
) -> _Encoded:
  leaf_keys = None if keys is None else keys.leaves
  matrices, unsent = layout.encode(leaves, leaf_keys, stats, memory=memory, keep=keep)
  row_stats = layout.row_stats(stats)
  decoders = [
    _rows_decoder(codec, rows[None], stat, 1.0)
    for codec, rows, stat in zip(layout.codecs, matrices, row_stats, strict=True)
  ]
  return _Encoded(matrices, row_stats, decoders, unsent)


def _unsent(leaves: Leaves, own: _Encoded, sent: Leaves) -> Leaves:
  """What this worker did not send of each leaf."""
  return [
    leaf - gone if rest is None else rest
    for leaf, gone, rest in zip(leaves, sent, own.unsent, strict=True)
  ]


def _shared(
  stats: Sequence[jax.Array | None], workers: Workers
) -> list[jax.Array | None]:
  """The largest statistics of all workers, in one message."""
  own = [x for x in stats if x is not None]
  if not own:
    return list(stats)
  message = jnp.concatenate([x.reshape(-1) for x in own])
  agreed = iter(
    split(largest(message, workers.axis_name)[None], [x.shape for x in own])
  )
  return [None if x is None else next(agreed)[0] for x in stats]


def _rows_decoder(
  codec: Codec, rows: jax.Array, stats: jax.Array | None, scale: float
) -> RowDecoder:
  """Of K payloads, ``uint32[K, rows, words]``."""
  if is_shared(codec):
    return _sums_decoder(codec, add_codes(codec, rows), stats, scale)
  if is_adding(codec):
    return _unscaled(codec, _mean_decoder(codec, rows, 1.0), stats, scale)
  return _mean_decoder(codec, rows, scale)


def _mean_decoder(codec: Codec, rows: jax.Array, scale: float) -> RowDecoder:
  return lambda start, stop: mean_of_rows(codec, rows[:, start:stop], scale)


def _owned_decoder(
  codec: Codec, rows: jax.Array, stats: jax.Array | None, workers: Workers, total: int
) -> RowDecoder:
  """Of what the owners sent, ``uint32[N, rows, words]``."""
  if not is_shared(codec):
    return _rows_decoder(codec, stacked(rows)[None], None, 1.0)
  share = -(-total // workers.size)
  unpack = functools.partial(unpack_sums, codec, rows=share, workers=workers.size)
  sums = stacked(jax.vmap(unpack)(rows))
  return _sums_decoder(codec, sums, stats, workers.scale)


def _psum_decoder(
  layout: Layout,
  codec: Codec,
  rows: jax.Array,
  stats: jax.Array | None,
  workers: Workers,
) -> RowDecoder:
  """Of the exact sum of all workers' codes, in the narrowest integers that hold it."""
  assert is_shared(codec)  # plan_messages puts nothing else into such a message
  codes = codec.codes(rows).astype(sum_dtype(codec, workers.size))
  with final_stage(layout.elements, workers):
    sums = psum(codes, workers.axis_name)
  return _sums_decoder(codec, sums.astype(jnp.int32), stats, workers.scale)


def _sums_decoder(
  codec: SharedCodec, sums: jax.Array, stats: jax.Array | None, scale: float
) -> RowDecoder:
  """Of sums of codes, ``int32[rows, P, B]``."""
  assert stats is not None
  return lambda start, stop: scaled(
    codec.from_codes(sums[start:stop], stats[start:stop]), scale
  )
