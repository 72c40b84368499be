"""``ring``: sends partial sums from worker to worker, encoded again at each hop."""

import dataclasses
from typing import ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp.exchange._all_gather import gather_rows
from gradcomp.exchange._collectives import (
  Workers,
  join,
  pass_on,
  shares,
  split,
  stacked,
)
from gradcomp.exchange._contribution import Contribution, Total
from gradcomp.exchange._exchange import WithoutOwners
from gradcomp.exchange._two_shot import owned_total
from gradcomp.kernels import fold_key
from gradcomp.sums import PartialSum, Sent, Way
from gradcomp.workers import mark_varying


class _Passing(NamedTuple):
  """Holds the partial sums that a worker passes on next, one for each codec."""

  rows: list[jax.Array]
  riders: list[tuple[jax.Array, ...]]
  lost: list[jax.Array]  # float32[N, share, tile_size]; empty without keep


@dataclasses.dataclass(frozen=True)
class Ring(WithoutOwners):
  r"""Passes partial sums from worker to worker, and sends the whole sums to all.

  The rows are cut into N shares. The sum of share ``d`` starts at worker ``d + 1``,
  takes N-1 hops, and ends at its owner ``d``. Each worker that receives it adds its own
  part and encodes the sum again:

  .. math:: s_{k} = Q(s_{k-1} + g_k)

  Each worker encodes each share once, and its own share last. So it needs one residual,
  which holds the error :math:`e_k` of each of its encodings. The N errors of a share
  are all that is lost: :math:`\sum_k e_k = \sum_k g_k - s_N`. Hop k rounds with
  ``fold_in(key, k)``.

  References:
    Han et al., `Auto-Precision Scaling for Distributed Deep Learning
    <https://arxiv.org/abs/1911.08907>`_, 2021, section 4.2
  """

  name: ClassVar[str] = "ring"
  way: ClassVar[Way] = "passed"
  of_leaves: ClassVar[bool] = False

  def run(self, own: Contribution, workers: Workers) -> Total:
    passing = reduce(own, workers)
    gathered = gather_rows(own.layout, passing.rows, workers)
    lost = [stacked(x) for x in passing.lost] if own.keep else own.nothing
    sent = [
      Sent(rows, residual=residual, scale=workers.scale)
      for rows, residual in zip(passing.rows, own.residuals, strict=True)
    ]
    return owned_total(own, gathered, sent, lost, workers)._replace(encoded=False)


def reduce(own: Contribution, workers: Workers) -> _Passing:
  """Returns the whole sums of this worker's share, and what it lost of all shares."""
  sums = cast(list[PartialSum], own.sums)  # check_exchange makes sure of that
  n = workers.size
  parts = [shares(addend, workers) for addend in own.addends]
  index = lax.axis_index(workers.axis_name)

  def addend(group: int, share: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(parts[group], share, keepdims=False)

  def key(group: int, hop: jax.Array | int) -> jax.Array | None:
    known = own.keys.stages[group]
    return None if known is None else fold_key(known, hop)

  def noted(lost: list[jax.Array], sent: list[Sent], share: jax.Array) -> list:
    """Writes what encoding a share lost into the losses so far."""
    return [
      x if y.lost is None else lax.dynamic_update_index_in_dim(x, y.lost, share, 0)
      for x, y in zip(lost, sent, strict=bool(lost))
    ]

  def hop(k: jax.Array, passing: _Passing) -> _Passing:
    arrays = [
      x
      for rows, riders in zip(passing.rows, passing.riders, strict=True)
      for x in (rows, *riders)
    ]
    message = pass_on(join(arrays, 1), workers.axis_name, n)
    received = iter(x[0] for x in split(message, [x.shape for x in arrays]))
    share = (index - 2 - k) % n
    sent = []
    for i, total in enumerate(sums):
      came = Sent(next(received), tuple(next(received) for _ in passing.riders[i]))
      partial = total.add(came, addend(i, share), keep=own.keep)
      sent.append(total.send(partial, key(i, k + 1), own.sum_context(i), keep=own.keep))
    return _passing(sent, noted(passing.lost, sent, share))

  first = (index - 1) % n
  sent = [
    total.start(addend(i, first), key(i, 0), own.sum_context(i), keep=own.keep)
    for i, total in enumerate(sums)
  ]
  # The zeros have the type of the addends, which may differ over other axes, too.
  lost = [
    jnp.zeros_like(total.read(part))
    for total, part in zip(sums, parts, strict=True)
    if own.keep
  ]
  lost = mark_varying(lost, workers.axis_name)
  riders = mark_varying([x.riders for x in sent], workers.axis_name)
  passing = _Passing([x.rows for x in sent], riders, noted(lost, sent, first))
  return lax.fori_loop(0, n - 1, hop, passing)


def _passing(sent: list[Sent], lost: list[jax.Array]) -> _Passing:
  return _Passing([x.rows for x in sent], [x.riders for x in sent], lost)
