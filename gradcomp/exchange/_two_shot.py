"""``two_shot``: reduce and broadcast. Each worker owns an Nth of the rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gradcomp.codecs import Codec, Dense, is_shared
from gradcomp.exchange._all_gather import all_gather
from gradcomp.exchange._collectives import (
  Workers,
  join,
  scatter,
  shares,
  split,
)
from gradcomp.exchange._sums import add_codes, pack_sums
from gradcomp.layout import Layout, mean_of_rows


def loses(codec: Codec) -> bool:
  """Whether encoding a mean once more loses something: a second residual helps."""
  return codec != Dense() and not codec.shares_stats and not codec.adds


def two_shot(
  layout: Layout,
  matrices: Sequence[jax.Array],
  workers: Workers,
  keys: jax.Array | None,
  residuals: Sequence[jax.Array | None],
  memory: jax.Array | None,
) -> tuple[list[jax.Array], list[jax.Array | None]]:
  r"""The owner receives its rows from all, adds, and sends what it made of them to all.

  Of a codec with scales of its own, the owner decodes the rows and averages them in
  float32, adds what its last encoding :math:`Q_2` lost, and encodes again:

  .. math:: y = Q_2(\tfrac{1}{N} \sum_i Q(g_i) + r), \qquad
     r' = \tfrac{1}{N} \sum_i Q(g_i) + r - y

  Of a codec with shared statistics, it adds the codes as integers and sends the sums,
  in as many bits as they need: nothing is lost, and there is no residual.

  Args:
    layout: the plan that the matrices follow.
    matrices: ``uint32[rows, row_words]`` for each codec.
    workers: who exchanges.
    keys: ``uint32[codecs, 2]`` for rounding the rows that this worker owns, or None.
    residuals: ``float32[share, tile_size]`` for each codec, or None.
    memory: of the codec that has one.

  Returns:
    For each codec ``uint32[N, rows, words]``, what the owners made of their shares, the
    same on every worker. And the new residuals.

  References:
    Grubic et al., 2018, section 2.4.1
  """
  lines = [shares(matrix, workers) for matrix in matrices]
  received = scatter(join(lines, workers.size), workers.axis_name)
  owned = split(received, [line.shape[1:] for line in lines])
  sent, kept = [], []
  for i, (codec, rows) in enumerate(zip(layout.codecs, owned, strict=True)):
    residual = residuals[i]
    if is_shared(codec):
      sent.append(pack_sums(codec, add_codes(codec, rows), workers.size))
    else:
      key = None if keys is None else keys[i]
      with jax.named_scope("gradcomp_decode"):
        mean = mean_of_rows(codec, rows, workers.scale)
      words, residual = encode_with_residual(codec, mean, key, residual, memory)
      sent.append(words)
    kept.append(residual)
  return all_gather(layout, sent, workers), kept


def encode_with_residual(
  codec: Codec,
  tiles: jax.Array,
  key: jax.Array | None,
  residual: jax.Array | None,
  memory: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
  """Rows of ``tiles + residual``, and what they lost; the old where that is not finite.

  Args:
    codec: one with scales of its own.
    tiles: ``float32[rows, ...]``.
    key: for rounding.
    residual: ``float32[rows, tile_size]``, or None to keep none.
    memory: of a codec that has one.
  """
  with jax.named_scope("gradcomp_encode"):
    if residual is None:
      return codec.encode_rows(tiles, key=key, stats=memory), None
    corrected = tiles.reshape(residual.shape) + residual
    words = codec.encode_rows(corrected, key=key, stats=memory)
    lost = corrected - codec.decode_rows(words).reshape(residual.shape)
    return words, jnp.where(jnp.isfinite(lost), lost, residual)
