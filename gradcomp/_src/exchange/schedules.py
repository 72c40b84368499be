"""The schedules of exchanges: one stage, ``two_shot`` by owners, and a ``ring``."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src import checks
from gradcomp._src.codecs.sums.records import Context
from gradcomp._src.codecs.sums.sum import LeafRows, Partial, RowDecoder, Sent, Sum, Way
from gradcomp._src.exchange import collectives, protocol
from gradcomp._src.exchange.protocol import Exchange, Received, Sending, Stage, Work
from gradcomp._src.kernels.common.fixed_point import divide
from gradcomp._src.mesh.types import mark_varying

Merge = Literal["mean", "senders"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGather(Exchange, checks.Checked):
  """Sends every payload to every worker, which decodes all of them and adds.

  A worker sends ``(N-1) c`` bytes, where c is the bytes of a payload. It keeps the loss
  of adding its own numbers.

  Attributes:
    merge: ``"mean"``, or ``"senders"`` with a sparse codec: the sum of an element is
      divided by the number of workers that sent it, and not by N.

  Raises:
    ValueError: ``merge`` is neither.
  """

  merge: Merge = checks.field("mean", checks.choice(Merge))

  name: ClassVar[str] = "all_gather"
  way: ClassVar[Way] = "gathered"

  @property
  def stages(self) -> tuple[Stage, ...]:
    return (self._gather,)

  def _gather(self, own: Sending, _: None) -> Received:
    workers, sums, agreed = own.workers, own.layout.sums, own.agreed
    rows = collectives.in_turn(own.parts, own.before)
    gathered = protocol.gather_rows(own.layout, rows, workers)[0]
    lost: dict[int, RowDecoder] = {}
    if own.keep:
      number = lax.axis_index(workers.axis_name)
      for i, total in enumerate(sums):
        if loss := total.gathered_loss(gathered[i], agreed[i], number):
          lost[i] = loss

    def decoder(i: int, total: Sum) -> RowDecoder:
      """Returns the decoder of the mean, over all workers or over senders."""
      senders = total.senders(gathered[i]) if self.merge == "senders" else None
      if senders is None:
        return total.gathered(gathered[i], agreed[i], workers.scale)
      added = total.gathered(gathered[i], agreed[i], workers.scale * workers.size)
      return lambda *at: divide(added(*at), jnp.maximum(senders(*at), 1.0))

    decoders = lambda: {i: decoder(i, total) for i, total in enumerate(sums)}
    return Received(gathered, decoders, lost=lost)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    return Work(encoded=Fraction(1), added=Fraction(math.prod(sizes)))


def _add(own: Sending, _: None) -> Received:
  """Adds the leaves, or the terms of all codecs."""
  layout, workers = own.layout, own.workers
  name = collectives.final_stage(layout.completed, workers)
  if layout.plain:
    reduce = collectives.psum if workers.scale == 1 else collectives.pmean
    leaves = collectives.in_turn(own.parts, own.before)
    if not layout.replaced:
      return Received(reduce(leaves, workers.axis_name))
    # JAX makes a collective of each array, which XLA combines as it likes.
    means: list[jax.Array] = []
    for leaf, of in zip(leaves, collectives.names_of(leaves, name), strict=True):
      with jax.named_scope(of):
        means += reduce([leaf], workers.axis_name)
    return Received(means)
  pairs = zip(layout.sums, own.parts, strict=True)
  terms = [total.terms(rows, workers.size) for total, rows in pairs]
  turn = collectives.in_turn(terms, own.before)
  results = collectives.totals(turn, workers.axis_name, name)

  def decoders() -> dict[int, RowDecoder]:
    leaves: dict[int, list[LeafRows]] = {}
    for context, (i, start, stop) in zip(own.contexts, layout.slots, strict=True):
      leaves.setdefault(i, []).append((context.key, stop - start))
    return {
      i: total.reduced(result, leaves[i], own.agreed[i], workers.scale)
      for i, (total, result) in enumerate(zip(layout.sums, results, strict=True))
    }

  return Received(results, decoders)


@dataclasses.dataclass(frozen=True)
class AllReduce(Exchange):
  """Lets the backend add codes, in integers that hold their sums, or plain leaves."""

  name: ClassVar[str] = "psum"
  way: ClassVar[Way] = "reduced"
  stages = (_add,)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    # Rows are unpacked to the codes that are added, and their sums decoded.
    return Work() if plain else Work(encoded=Fraction(1), decoded=Fraction(2))


def _own(own: Sending, _: None) -> Received:
  return Received(own.parts, None if own.layout.plain else own.decoders)


@dataclasses.dataclass(frozen=True)
class Local(Exchange):
  """Decodes each worker's own payload: only the codec's noise is added."""

  name: ClassVar[str] = "local"
  way: ClassVar[Way] = "gathered"
  sends: ClassVar[bool] = False
  stages = (_own,)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    return Work() if plain else protocol.CODED_ONCE


def _reduce(own: Sending, _: None) -> list[Sent]:
  """Adds the rows that a worker owns."""
  parts = [collectives.shares(x, own.workers) for x in own.parts]
  send = functools.partial(collectives.scatter, axis_name=own.workers.axis_name)
  rows = protocol.exchanged(parts, send)
  return protocol.finish_shares(own, rows, [own.workers.scale] * len(rows))


def _broadcast(own: Sending, sent: Sequence[Sent]) -> Received:
  """Sends the sums to all."""
  workers = own.workers
  rows = collectives.in_turn([x.rows for x in sent], own.before)
  gathered, line = protocol.gather_rows(own.layout, rows, workers)
  place = lambda lost: collectives.place(lost[None], workers, workers.size)
  lost = [None if x.lost is None else place(x.lost) for x in sent]
  owned = {i: x.lost for i, x in enumerate(sent) if x.lost is not None}
  total = protocol.owned_total(own, sent, lost, gathered)
  return total._replace(line=line, owned=owned)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoShot(Exchange, checks.Checked):
  r"""Sends each share to its owner, which adds it up and sends the mean to all.

  Each worker owns an Nth of the rows. If the codec has its own scales, the owner
  averages the received rows in float32. It adds its owner residual r, the rounding
  error of its last encoding :math:`Q_2`, and encodes again, to nearest:

  .. math:: y = Q_2(\tfrac{1}{N} \sum_i Q(g_i) + r), \qquad
     r' = \tfrac{1}{N} \sum_i Q(g_i) + r - y

  If the codec shares its statistics, the owner adds the codes as integers, and sends
  the sums in as many bits as they need: exact, without an owner residual. A worker
  sends ``2 (N-1)/N c`` bytes, where c is the bytes of a payload.

  Attributes:
    feedback: whether owners keep r, an Nth of the gradient in float32. ``init`` must
      then know the number of workers: call it inside the map, under
      ``jax.set_mesh(mesh)``, or with parameters on the mesh. If it does not, ``update``
      raises an error if the workers keep residuals, and else warns. Owners then keep
      nothing, as with False: :math:`Q_2` rounds at random where the codec does,
      unbiased with twice the variance. ``QSGD(bits=1)`` always rounds at random,
      because it has no value near zero; its owners keep r only if the workers keep
      residuals.
    in_turn: whether a message is encoded after the one before it has come. On one slice
      of TPUs with asynchronous all-to-alls (a flag), each message but the last then
      spans a product of the backward pass. Else XLA puts encoders after the backward
      pass, and hides all but the first message beside these. Between slices messages go
      side by side without it, and none spans a product with it. The bits are the same.

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning
    <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, section 2.4.1
  """

  feedback: bool = checks.field(True, checks.FLAG)
  in_turn: bool = checks.field(False, checks.FLAG)

  papers: ClassVar[tuple[str, ...]] = ("grubic2018synchronous",)
  name: ClassVar[str] = "two_shot"
  way: ClassVar[Way] = "owned"
  owners: ClassVar[bool] = True
  stages: ClassVar[tuple[Stage, ...]] = (_reduce, _broadcast)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    share = Fraction(1, math.prod(sizes))
    return Work(encoded=1 + share, decoded=Fraction(1), added=Fraction(1))


def _to_owners(own: Sending, _: None) -> Received:
  """Sends the rows of each leaf to their owners, which add them."""
  layout, workers = own.layout, own.workers

  def split(group: int, rows: jax.Array) -> jax.Array:
    """Splits the rows of each leaf in a matrix into shares, ``[N, shares, ...]``."""
    leaves = [lax.slice_in_dim(rows, *x[1:]) for x in layout.slots if x.group == group]
    return jnp.concatenate([collectives.shares(x, workers) for x in leaves], axis=1)

  send = functools.partial(collectives.scatter, axis_name=workers.axis_name)
  shares = [split(i, rows) for i, rows in enumerate(own.parts)]
  owned = protocol.exchanged(shares, send)

  def decoders() -> dict[int, RowDecoder]:
    number, found = lax.axis_index(workers.axis_name), {}
    for i, (total, agreed) in enumerate(zip(layout.sums, own.agreed, strict=True)):
      mine = agreed
      if agreed is not None:
        mine = lax.dynamic_index_in_dim(split(i, agreed), number, keepdims=False)
      found[i] = total.gathered(owned[i], mine, workers.scale)
    return found

  return Received(owned, decoders, to_all=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceScatter(TwoShot):
  """The first half of :class:`TwoShot`, for ZeRO: means stay with their owners."""

  feedback: bool = False
  stages: ClassVar[tuple[Stage, ...]] = (_to_owners,)


_Sums = tuple[jax.Array, jax.Array | None, jax.Array | None]  # arrays of a Partial


def _pass_around(own: Sending, _: None) -> Received:
  """Adds up this worker's share, and sends the sums; keeps errors of all rows."""
  sums, workers, n = own.layout.sums, own.workers, own.workers.size
  parts = [collectives.shares(addend, workers) for addend in own.parts]
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
class Ring(Exchange):
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

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    hops = Fraction(math.prod(sizes) - 1, math.prod(sizes))
    return Work(encoded=Fraction(1), decoded=hops + 1, summed=hops)
