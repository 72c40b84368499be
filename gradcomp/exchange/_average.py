"""One message: encode, exchange, decode, and what was lost on the way."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp.codecs import Codec, Dense, LinearCodec, SelectingCodec, is_adding
from gradcomp.exchange._all_gather import all_gather
from gradcomp.exchange._collectives import (
  Workers,
  largest,
  pmean,
  psum,
  split,
)
from gradcomp.exchange._decoders import (
  linear_decoders,
  owned_decoder,
  psum_decoder,
  rows_decoder,
  unscaled,
)
from gradcomp.exchange._hierarchical import hierarchical
from gradcomp.exchange._in_format import sums_in_format
from gradcomp.exchange._plan import Message
from gradcomp.exchange._ring import ring
from gradcomp.exchange._two_shot import two_shot
from gradcomp.layout import Layout, RowDecoder, row_cutter

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
    sent: this worker's own rows for each codec; None where it does not encode leaves.
  """

  mean: Leaves
  unsent: Leaves | None
  residuals: Residuals
  sent: list[jax.Array] | None = None


def average(
  message: Message,
  leaves: Leaves,
  keys: Keys | None,
  workers: Workers | None,
  *,
  group_size: int | None,
  residuals: Residuals,
  memory: jax.Array | None,
  thresholds: Sequence[jax.Array | None],
  keep: bool,
) -> Outcome:
  """The mean of all workers' leaves, and what was lost.

  Args:
    message: the plan.
    leaves: float32 arrays; float64 ones only for a plain mean.
    keys: for stochastic rounding, or None.
    workers: who exchanges; None to exchange nothing.
    group_size: for ``hierarchical`` over one axis.
    residuals: of the second stage, ``float32[share, tile_size]`` for each codec; None
      where none is kept.
    memory: of the codec that has one, equal on all workers.
    thresholds: for each leaf those that its codec uses again, this worker's own; None
      where there are none.
    keep: whether to return what was not sent.
  """
  layout, exchange = message.layout, message.exchange
  if workers is None or not layout.elements or exchange == "local":
    if layout.codecs == (Dense(),):
      return Outcome(leaves, None, residuals)
    if exchange == "local" and any(codec.fitted for codec in layout.codecs):
      memory = None  # nobody agrees on levels
    own = _encode(layout, leaves, keys, layout.stats(leaves), memory, thresholds, keep)
    sent = layout.decode(own.decoders)
    unsent = _unsent(layout, leaves, own, sent) if keep else None
    return Outcome(sent, unsent, residuals, own.matrices)
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
      rows_decoder(codec, words[None], None, scale)
      for codec, words in zip(layout.codecs, rows, strict=True)
    ]
    unsent = layout.decode([row_cutter(x) for x in lost]) if keep else None
    return Outcome(layout.decode(decoders), unsent, residuals)

  shared = _shared(layout.stats(leaves), workers)
  own = _encode(layout, leaves, keys, shared, memory, thresholds, keep)
  if exchange == "all_gather":
    gathered = all_gather(layout, own.matrices, workers)
    decoders = [
      rows_decoder(codec, rows, stats, workers.scale)
      for codec, rows, stats in zip(layout.codecs, gathered, own.stats, strict=True)
    ]
  elif exchange == "two_shot":
    gathered, residuals = two_shot(
      layout, own.matrices, workers, stages, residuals, memory
    )
    decoders = [
      owned_decoder(codec, rows, stats, workers, total)
      for codec, rows, stats, total in zip(
        layout.codecs, gathered, own.stats, layout.rows, strict=True
      )
    ]
  elif any(isinstance(codec, LinearCodec) for codec in layout.codecs):
    assert keys is not None  # which choose the elements
    decoders = linear_decoders(layout, own.matrices, keys.leaves, workers)
  else:
    decoders = [
      psum_decoder(layout, codec, rows, stats, workers)
      for codec, rows, stats in zip(layout.codecs, own.matrices, own.stats, strict=True)
    ]
  unsent = _unsent(layout, leaves, own) if keep else None
  return Outcome(layout.decode(decoders), unsent, residuals, own.matrices)


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
  own = _encode(layout, leaves, keys, shared, None, [None] * len(leaves), keep)
  sums, lost = sums_in_format(
    message.exchange, layout, own.matrices, workers, group_size, keep=keep
  )

  def values(decoders: Sequence[RowDecoder], scale: float) -> Leaves:
    parts = zip(layout.codecs, decoders, own.stats, strict=True)
    return layout.decode([unscaled(*part, scale) for part in parts])

  unsent = None
  if lost is not None:
    coded = _unsent(layout, leaves, own)
    unsent = [x + y for x, y in zip(coded, values(lost, 1.0), strict=True)]
  return Outcome(values(sums, workers.scale), unsent, residuals)


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
  thresholds: Sequence[jax.Array | None],
  keep: bool,
) -> _Encoded:
  leaf_keys = None if keys is None else keys.leaves
  codecs = [layout.codecs[slot.group] for slot in layout.slots]
  remembered = [
    memory if _remembers(codec) else own
    for codec, own in zip(codecs, thresholds, strict=True)
  ]
  agreed = [
    other if stat is None else stat
    for stat, other in zip(stats, remembered, strict=True)
  ]
  with jax.named_scope("gradcomp_encode"):
    matrices, unsent = layout.encode(leaves, leaf_keys, agreed, keep=keep)
  row_stats = layout.row_stats(stats)
  decoders = [
    rows_decoder(codec, rows[None], stat, 1.0)
    for codec, rows, stat in zip(layout.codecs, matrices, row_stats, strict=True)
  ]
  return _Encoded(matrices, row_stats, decoders, unsent)


def _remembers(codec: Codec) -> bool:
  """Whether a codec encodes with a memory that is equal on all workers."""
  return codec.fitted or (isinstance(codec, SelectingCodec) and codec.alternates)


def _unsent(
  layout: Layout, leaves: Leaves, own: _Encoded, sent: Leaves | None = None
) -> Leaves:
  """What this worker did not send of each leaf, decoded only where nobody knows."""

  def lost(i: int) -> jax.Array:
    gone = sent[i] if sent else layout.decode_leaf(i, own.decoders)
    return leaves[i] - gone

  return [lost(i) if rest is None else rest for i, rest in enumerate(own.unsent)]


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
