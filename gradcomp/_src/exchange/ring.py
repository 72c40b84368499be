"""``ring``: sends partial sums from worker to worker, encoded again at each hop."""

import dataclasses
import math
from fractions import Fraction
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.sums.records import Context
from gradcomp._src.codecs.sums.sum import Partial, Sent, Way
from gradcomp._src.exchange import collectives, lines, protocol
from gradcomp._src.mesh.types import mark_varying

_Sums = tuple[jax.Array, jax.Array | None, jax.Array | None]  # arrays of a Partial


def _pass_around(own: protocol.Sending, _: None) -> protocol.Received:
  """Adds up this worker's share, and sends the sums; keeps errors of all rows."""
  sums, workers, n = own.layout.sums, own.workers, own.workers.size
  parts = [lines.shares(addend, workers) for addend in own.parts]
  index = lax.axis_index(workers.axis_name)
  addend = lambda i, share: lax.dynamic_index_in_dim(parts[i], share, keepdims=False)

  def context(group: int, hop: jax.Array | int) -> Context:
    return own.of_sum(group, (index - 1 - hop) % n, n - 1 - hop)

  def noted(lost: list[jax.Array], sent: list[Sent], share: jax.Array) -> list:
    """Writes the rounding errors of a share into the array of all rows' errors."""
    write = lambda x, new: lax.dynamic_update_slice_in_dim(x, new, share * len(new), 0)
    pairs = zip(lost, sent, strict=bool(lost))
    return [x if y.lost is None else write(x, y.lost) for x, y in pairs]

  def receive(sent: list[Sent], hop: jax.Array | int) -> list[_Sums]:
    """Passes sums on, and adds this worker's part to the received ones."""
    arrays = [x for one in sent for x in (one.rows, *one.riders)]
    pass_on = lambda line: collectives.pass_on(line[0], workers.axis_name, n)[None]
    received = (x[0] for x in protocol.exchanged([x[None] for x in arrays], pass_on))
    partials = []
    for i, (total, one) in enumerate(zip(sums, sent, strict=True)):
      came = Sent(next(received), tuple(next(received) for _ in one.riders))
      mine = addend(i, (index - 2 - hop) % n)
      partials.append(total.add(came, mine, keep=own.keep)[:3])
    return partials

  def step(hop: jax.Array, passing: tuple) -> tuple:
    partials, lost = passing
    pairs = enumerate(zip(sums, partials, strict=True))
    sent = [x.hop(Partial(*y), context(i, hop), keep=own.keep) for i, (x, y) in pairs]
    return receive(sent, hop), noted(lost, sent, (index - 1 - hop) % n)

  def finish(partials: list[_Sums]) -> list[Sent]:
    """Encodes whole sums in the row format of means."""
    return [
      total.send(total.like_one(Partial(*x), n), context(i, n - 1), keep=own.keep)
      for i, (total, x) in enumerate(zip(sums, partials, strict=True))
    ]

  first = (index - 1) % n
  if n == 1:
    sent = finish([(x.read(addend(i, first)), None, None) for i, x in enumerate(sums)])
  else:
    start = lambda i, x: x.start(addend(i, first), context(i, 0), keep=own.keep)
    sent = [start(i, x) for i, x in enumerate(sums)]
  # The zeros have the type of the addends, which may differ over other axes, too.
  pairs = zip(sums, parts, strict=True) if own.keep else ()
  lost = [jnp.zeros_like(lax.collapse(total.read(part), 0, 2)) for total, part in pairs]
  lost = noted(mark_varying(lost, workers.axis_name), sent, first)
  if n > 1:
    # A loop materializes sums before a step encodes them. Else XLA would decode the
    # received rows once for the scales and once for the codes.
    passing = lax.fori_loop(1, n - 1, step, (receive(sent, 0), lost))
    sent = finish(passing[0])
    lost = noted(passing[1], sent, index)
  rows = collectives.in_turn([x.rows for x in sent], own.before)
  gathered = protocol.gather_rows(own.layout, rows, workers)[0]
  # Scales are applied to whole sums; no owner keeps a residual.
  sent = [Sent(x.rows, scale=workers.scale * x.scale) for x in sent]
  return protocol.owned_total(own, sent, lost or [None] * len(sent), gathered)


@dataclasses.dataclass(frozen=True)
class Ring(protocol.Exchange):
  """Passes partial sums from worker to worker, and sends the whole sums to all.

  The rows are split into N shares. The sum of share ``d`` starts at worker ``d + 1``,
  takes N-1 hops, and ends at its owner ``d``. A worker encodes each share once, its own
  last, and its residual holds the errors. The hops of a share round by the same random
  bits, each with its own mask. The last two, of the largest sums, are a pair: a part of
  their errors cancels. But the last hop rounds a sum that depends on its bits, so the
  mean is biased: docs/methods/exchanges.md says how much.
  """

  papers: ClassVar[tuple[str, ...]] = ("han2021aps",)
  name: ClassVar[str] = "ring"
  way: ClassVar[Way] = "passed"
  of_leaves: ClassVar[bool] = False
  stages = (_pass_around,)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> protocol.Work:
    hops = Fraction(math.prod(sizes) - 1, math.prod(sizes))
    return protocol.Work(encoded=Fraction(1), decoded=hops + 1, summed=hops)
