"""``ring``: partial sums travel from worker to worker, encoded again at every hop."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp import _axes
from gradcomp.exchange._all_gather import all_gather
from gradcomp.exchange._collectives import (
  Workers,
  join,
  pass_on,
  shares,
  split,
  stacked,
)
from gradcomp.kernels import fold_key
from gradcomp.layout import Layout


def ring(
  layout: Layout,
  tiles: Sequence[jax.Array],
  workers: Workers,
  keys: jax.Array | None,
  memory: jax.Array | None,
) -> tuple[list[jax.Array], list[jax.Array]]:
  r"""Reduce-scatter over N-1 hops, then all_gather.

  The rows are cut into N shares. The sum of share ``d`` starts at worker ``d + 1`` and
  ends at its owner ``d``: who receives it adds its own part and encodes the sum again.

  .. math:: s_{k} = Q(s_{k-1} + g_k)

  Each worker encodes each share once, its own share last, so that all that is lost is
  lost in N encodings whose errors one residual a worker holds:
  :math:`\sum_k e_k = \sum_k g_k - s_N`.

  Args:
    layout: the plan that the tiles follow.
    tiles: ``float32[rows, tile_size]`` for each codec.
    workers: who exchanges.
    keys: ``uint32[codecs, 2]``; hop k rounds with ``fold_in(key, k)``; or None.
    memory: of the codec that has one.

  Returns:
    For each codec the encoded sums ``uint32[rows, words]``, rows padded to a multiple
    of N, the same on every worker; and what this worker's encodings lost,
    ``float32[rows, tile_size]``.

  References:
    Han et al., 2021, section 4.2, whose rings add in a low-precision format
  """
  n = workers.size
  parts = [shares(rows, workers) for rows in tiles]
  index = lax.axis_index(workers.axis_name)

  def own(share: jax.Array) -> list[jax.Array]:
    return [lax.dynamic_index_in_dim(x, share, keepdims=False) for x in parts]

  def encode(
    sums: list[jax.Array], lost: list[jax.Array], hop: jax.Array | int
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """The words of hop ``hop``, and what is lost with theirs written in."""
    share = (index - 1 - hop) % n
    words, errors = [], []
    for i, (codec, x) in enumerate(zip(layout.codecs, sums, strict=True)):
      key = None if keys is None else fold_key(keys[i], hop)
      with jax.named_scope("gradcomp_encode"):
        words.append(codec.encode_rows(x, key=key, stats=memory))
        error = x - codec.decode_rows(words[i]).reshape(x.shape)
      errors.append(lax.dynamic_update_index_in_dim(lost[i], error, share, 0))
    return words, errors

  def hop(k: jax.Array, carry: tuple[list[jax.Array], list[jax.Array]]) -> tuple:
    words, lost = encode(*carry, k)
    received = pass_on(join(words, 1), workers.axis_name, n)
    sums = []
    rows = [x[0] for x in split(received, [x.shape for x in words])]
    for codec, got, mine in zip(
      layout.codecs, rows, own((index - 2 - k) % n), strict=True
    ):
      with jax.named_scope("gradcomp_decode"):
        sums.append(codec.decode_rows(got).reshape(mine.shape) + mine)
    return sums, lost

  zeros = [_axes.mark_varying(jnp.zeros_like(x), workers.axis_name) for x in parts]
  sums, lost = lax.fori_loop(0, n - 1, hop, (own((index - 1) % n), zeros))
  words, lost = encode(sums, lost, n - 1)
  result = all_gather(layout, words, workers)
  return [stacked(x) for x in result], [stacked(x) for x in lost]
