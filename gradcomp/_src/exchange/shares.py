"""Rows in shares, one for each owner, which are sent, added and gathered."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.sums.sum import RowDecoder, Sent
from gradcomp._src.exchange import collectives, lines
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.exchange.protocol import Outgoing, Received

Rows = Sequence[jax.Array]
Lost = Sequence[jax.Array | None]


def shares(rows: jax.Array, workers: Workers) -> jax.Array:
  """Splits rows into N shares, ``[N, share, ...]``, with zeros behind the last."""
  share = -(-rows.shape[0] // workers.size)
  padding = workers.size * share - rows.shape[0]
  padded = jnp.pad(rows, [(0, padding)] + [(0, 0)] * (rows.ndim - 1))
  return padded.reshape(workers.size, share, *rows.shape[1:])


def leaf_shares(
  layout: Layout, group: int, rows: jax.Array, workers: Workers
) -> jax.Array:
  """Splits the rows of each leaf in a matrix into N shares, ``[N, shares, ...]``."""
  own = [rows[start:stop] for at, start, stop in layout.slots if at == group]
  return jnp.concatenate([shares(x, workers) for x in own], axis=1)


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


def place(lost: jax.Array, workers: Workers, size: int) -> jax.Array:
  """Places errors of this worker's shares, ``[groups, share, ...]``, among zeros."""
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
  parts = [shares(rows, workers) for rows in own.parts]
  received = collectives.scatter(lines.join(parts), workers.axis_name)
  return lines.split(received, [part.shape[1:] for part in parts])


def finish_shares(
  own: Outgoing, rows: Rows, scales: Sequence[float], workers: Workers
) -> list[Sent]:
  """Adds K payloads of owned rows, ``[K, share, words]``, and encodes sums for all."""
  sent = []
  for i, total in enumerate(own.layout.sums):
    partial = total.fold(rows[i], scales[i], keep=own.keep)
    stage = own.stages[i]
    given = partial, stage.whole, stage.residual, workers.size
    sent.append(total.finish(*given, keep=own.keep))
  return sent


def gather_rows(layout: Layout, matrices: Rows, workers: Workers) -> list[jax.Array]:
  """Gathers all workers' rows, one matrix a codec, as ``uint32[N, rows, words]``."""
  line = gather_line(layout, matrices, workers)
  return lines.split(line, [matrix.shape for matrix in matrices])


def gather_line(layout: Layout, matrices: Rows, workers: Workers) -> jax.Array:
  """Gathers all workers' rows as the lines that they are sent in."""
  name = collectives.final_stage(layout.completed, workers)
  line = lines.join([matrix[None] for matrix in matrices])[0]
  return collectives.gather(line, workers.axis_name, name)


def owned_total(
  own: Outgoing, sent: Sequence[Sent], lost: Lost, gathered: Rows, workers: Workers
) -> Received:
  """Returns the sums of N owners, ``gathered``, and the errors that a worker keeps.

  For each codec, ``sent`` is this worker's encoded sum, ``gathered`` has all,
  ``uint32[N, rows, words]``, and ``lost`` ``float32[rows, *tile_shape]``, or None.
  """
  sums, agreed, n = own.layout.sums, own.agreed, workers.size
  owned = [-(-rows // n) for rows in own.layout.rows]

  def decoders() -> dict[int, RowDecoder]:
    value = lambda i, x: x.value(gathered[i], agreed[i], sent[i].scale, owned[i], n)
    return {i: value(i, x) for i, x in enumerate(sums)}

  kept = {i: sums[i].loss(x, agreed[i]) for i, x in enumerate(lost) if x is not None}
  residuals = [x.residual for x in sent]
  return Received(gathered, decoders, lost=kept, residuals=residuals)
