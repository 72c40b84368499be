"""Rows in shares, one for each owner, and as lines of a message: split and joined."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.sums.sum import RowDecoder, Sent
from gradcomp._src.exchange.collectives import (
  Workers,
  final_stage,
  gather,
  note_parts,
  scatter,
)
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.exchange.protocol import Outgoing, Received


def shares(rows: jax.Array, workers: Workers) -> jax.Array:
  """Splits rows into N shares, ``[N, share, ...]``, with zeros behind the last."""
  share = -(-rows.shape[0] // workers.size)
  padding = workers.size * share - rows.shape[0]
  padded = jnp.pad(rows, [(0, padding)] + [(0, 0)] * (rows.ndim - 1))
  return padded.reshape(workers.size, share, *rows.shape[1:])


def own_share(rows: jax.Array, workers: Workers) -> jax.Array:
  """Returns the rows that this worker owns: ``[rows, ...]`` to ``[share, ...]``."""
  number = lax.axis_index(workers.axis_name)
  return lax.dynamic_index_in_dim(shares(rows, workers), number, keepdims=False)


def own_rows(share: int, worker: jax.Array) -> jax.Array:
  """Returns the numbers of the rows in a worker's share, ``int32[share]``."""
  return worker * share + lax.iota(jnp.int32, share)


def stacked(x: jax.Array) -> jax.Array:
  """Joins shares to rows, with their padding: ``[N * share, ...]``."""
  return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def join(parts: Sequence[jax.Array], lines: int) -> jax.Array:
  """Concatenates arrays ``[lines, ...]`` to ``[lines, M]``."""
  note_parts(parts)
  return jnp.concatenate([x.reshape(lines, x.size // lines) for x in parts], axis=1)


def split(lines: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
  """Splits ``[lines, M]`` to arrays ``[lines, *shape]``: undoes :func:`join`."""
  result = []
  start = 0
  for shape in shapes:
    stop = start + math.prod(shape)
    result.append(lines[:, start:stop].reshape(lines.shape[0], *shape))
    start = stop
  return result


def place(lost: jax.Array, workers: Workers, size: int) -> jax.Array:
  """Places the errors of shares ``(*, c)``, c this worker's place, among zeros.

  ``lost`` is ``float32[groups, share, ...]``, and the result ``float32[groups * size *
  share, ...]``, with ``size`` workers in a group.
  """
  groups, share, *tile = lost.shape
  own = lax.axis_index(workers.axis_name) % size
  mine = jnp.arange(size) == own
  placed = jnp.where(mine.reshape(-1, *[1] * (1 + len(tile))), lost[:, None], 0.0)
  return placed.reshape(groups * size * share, *tile)


def owned_loss(sent: Sent, workers: Workers) -> jax.Array | None:
  """Returns the rounding errors of this worker's share, with zeros in other rows."""
  return None if sent.lost is None else place(sent.lost[None], workers, workers.size)


def scatter_rows(own: Outgoing, workers: Workers) -> list[jax.Array]:
  """Receives this worker's share of all workers' rows, ``uint32[N, share, words]``."""
  lines = [shares(rows, workers) for rows in own.parts]
  received = scatter(join(lines, workers.size), workers.axis_name)
  return split(received, [line.shape[1:] for line in lines])


def finish_shares(
  own: Outgoing,
  rows: Sequence[jax.Array],
  scales: Sequence[float],
  workers: Workers,
) -> list[Sent]:
  """Adds the rows that this worker owns, and encodes the sum of each codec for all.

  ``rows`` are those of K payloads, ``uint32[K, share, words]``.
  """
  sent = []
  for i, total in enumerate(own.layout.sums):
    partial = total.fold(rows[i], scales[i], keep=own.keep)
    stage = own.stages[i]
    given = partial, stage.whole, stage.residual, workers.size
    sent.append(total.finish(*given, keep=own.keep))
  return sent


def gather_rows(
  layout: Layout, matrices: Sequence[jax.Array], workers: Workers
) -> list[jax.Array]:
  """Gathers the rows of all workers, in one message.

  ``matrices`` are ``uint32[rows, row_words]``, one a codec. They become ``uint32[N,
  rows, row_words]``, equal on all workers.
  """
  name = final_stage(layout.elements, workers)
  received = gather(join(matrices, 1)[0], workers.axis_name, name)
  return split(received, [matrix.shape for matrix in matrices])


def owned_total(
  own: Outgoing,
  sent: Sequence[Sent],
  lost: Sequence[jax.Array | None],
  gathered: Sequence[jax.Array],
  workers: Workers,
) -> Received:
  """Returns the sums of N owners, ``gathered``, and the errors that a worker keeps.

  For each codec, ``sent`` is this worker's encoded sum, ``gathered`` those of all,
  ``uint32[N, rows, words]``, and ``lost`` ``float32[rows, *tile_shape]``, or None.
  """
  sums, agreed = own.layout.sums, own.agreed
  n = workers.size
  owned = [-(-rows // n) for rows in own.layout.rows]

  def decoders() -> dict[int, RowDecoder]:
    return {
      i: total.value(gathered[i], agreed[i], sent[i].scale, owned[i], n)
      for i, total in enumerate(sums)
    }

  return Received(
    gathered,
    decoders,
    lost={i: sums[i].loss(x, agreed[i]) for i, x in enumerate(lost) if x is not None},
    residuals=[x.residual for x in sent],
  )
