"""Exchanges of at most one stage: ``all_gather``, ``psum`` and ``local``."""

import dataclasses
import math
from fractions import Fraction
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src import checks
from gradcomp._src.codecs.sums.sum import LeafRows, RowDecoder, Sum, Way
from gradcomp._src.exchange import collectives, protocol
from gradcomp._src.exchange.protocol import Exchange, Received, Sending, Stage, Work
from gradcomp._src.kernels.common.fixed_point import divide

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
    layout, workers = own.layout, own.workers
    turn = collectives.in_turn(own.parts, own.before)
    gathered = protocol.gather_rows(layout, turn, workers)[0]
    parts = list(zip(layout.sums, gathered, own.agreed, strict=True))
    lost: dict[int, RowDecoder] = {}
    if own.keep:
      number = lax.axis_index(workers.axis_name)
      losses = [x.gathered_loss(rows, agreed, number) for x, rows, agreed in parts]
      lost = {i: loss for i, loss in enumerate(losses) if loss is not None}

    def decoder(total: Sum, rows: jax.Array, agreed: jax.Array | None) -> RowDecoder:
      """Returns the decoder of the mean, over all workers or over senders."""
      senders = total.senders(rows) if self.merge == "senders" else None
      if senders is None:
        return total.gathered(rows, agreed, workers.scale)
      added = total.gathered(rows, agreed, workers.scale * workers.size)
      return lambda *at: divide(added(*at), jnp.maximum(senders(*at), 1.0))

    decoders = lambda: {i: decoder(*part) for i, part in enumerate(parts)}
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
    if layout.replaced is None:
      return Received(reduce(leaves, workers.axis_name))
    return Received(collectives.named(reduce, leaves, workers.axis_name, name))
  pairs = zip(layout.sums, own.parts, strict=True)
  terms = [total.terms(rows, workers.size) for total, rows in pairs]
  turn = collectives.in_turn(terms, own.before)
  results = collectives.totals(turn, workers.axis_name, name)

  def decoders() -> dict[int, RowDecoder]:
    leaves: dict[int, list[LeafRows]] = {}
    for context, (i, start, stop) in zip(own.contexts, layout.slots, strict=True):
      leaves.setdefault(i, []).append(LeafRows(context.key, stop - start))
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
