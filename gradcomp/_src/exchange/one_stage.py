"""Exchanges of at most one stage: ``all_gather``, ``psum`` and ``local``."""

import dataclasses
import math
from fractions import Fraction
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src import checks
from gradcomp._src.codecs.sums.sum import RowDecoder, Sum, Way
from gradcomp._src.exchange.collectives import (
  Workers,
  final_stage,
  named,
  pmean,
  psum,
  totals,
)
from gradcomp._src.exchange.in_turn import in_turn
from gradcomp._src.exchange.protocol import Outgoing, Received, WithoutOwners, Work
from gradcomp._src.exchange.shares import gather_rows
from gradcomp._src.kernels.common.fixed_point import divide

Merge = Literal["mean", "senders"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGather(WithoutOwners, checks.Checked):
  """Sends every payload to every worker, which decodes all of them and adds.

  A worker sends ``(N-1) c`` bytes, where c is the bytes of a payload. It keeps what an
  addition loses of its numbers.

  Attributes:
    merge: ``"mean"``, or ``"senders"``: of a sparse codec, the sum of an element is
      divided by the number of workers that sent it, and not by N.

  Raises:
    ValueError: ``merge`` is neither.
  """

  merge: Merge = checks.field("mean", checks.choice(Merge))

  name: ClassVar[str] = "all_gather"
  way: ClassVar[Way] = "gathered"

  def run(self, own: Outgoing, workers: Workers) -> Received:
    gathered = gather_rows(own.layout, in_turn(own.parts, own.before), workers)
    parts = list(zip(own.layout.sums, gathered, own.agreed, strict=True))
    number = lax.axis_index(workers.axis_name) if own.keep else None
    decoders = lambda: {i: self._decoder(*x, workers) for i, x in enumerate(parts)}
    lose = lambda x, *given: None if number is None else x.gathered_loss(*given, number)
    losses = [lose(*part) for part in parts]
    lost = {i: loss for i, loss in enumerate(losses) if loss is not None}
    return Received(gathered, decoders, lost=lost)

  def _decoder(
    self, total: Sum, rows: jax.Array, agreed: jax.Array | None, workers: Workers
  ) -> RowDecoder:
    """Returns the decoder of the mean, over all workers or over senders."""
    senders = total.senders(rows) if self.merge == "senders" else None
    if senders is None:
      return total.gathered(rows, agreed, workers.scale)
    added = total.gathered(rows, agreed, workers.scale * workers.size)

    def decode(start: int, stop: int) -> jax.Array:
      number = senders(start, stop)
      return divide(added(start, stop), jnp.maximum(number, 1.0))

    return decode

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    return Work(encoded=Fraction(1), added=Fraction(math.prod(sizes)))


@dataclasses.dataclass(frozen=True)
class AllReduce(WithoutOwners):
  """Lets the backend add the numbers that all workers send.

  The numbers are codes, in integers that hold their sums, or plain values. If all
  leaves are plain, the backend adds the leaves themselves, in their own dtype.
  """

  name: ClassVar[str] = "psum"
  way: ClassVar[Way] = "reduced"

  def run(self, own: Outgoing, workers: Workers) -> Received:
    layout = own.layout
    if layout.plain:
      reduce = psum if workers.scale == 1 else pmean
      leaves = in_turn(own.parts, own.before)
      if layout.replaced is None:
        return Received(reduce(leaves, workers.axis_name))
      name = final_stage(layout.completed, workers)
      return Received(named(reduce, leaves, workers.axis_name, name))
    pairs = zip(layout.sums, own.parts, strict=True)
    terms = [total.terms(rows, workers.size) for total, rows in pairs]
    name = final_stage(layout.completed, workers)
    results = totals(in_turn(terms, own.before), workers.axis_name, name)

    def decoders() -> dict[int, RowDecoder]:
      return {
        i: total.reduced(result, own.leaf_rows(i), own.agreed[i], workers.scale)
        for i, (total, result) in enumerate(zip(layout.sums, results, strict=True))
      }

    return Received(results, decoders)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    # Rows are unpacked to the codes that are added, and their sums decoded.
    return Work() if plain else Work(encoded=Fraction(1), decoded=Fraction(2))


@dataclasses.dataclass(frozen=True)
class Local(WithoutOwners):
  """Decodes each worker's own payload: only the codec's noise is added.

  Outputs differ between workers, and under Explicit axes they stay unreduced.
  """

  name: ClassVar[str] = "local"
  way: ClassVar[Way] = "gathered"
  sends: ClassVar[bool] = False

  def run(self, own: Outgoing, workers: Workers | None = None) -> Received:
    return Received(own.parts, None if own.layout.plain else own.decoders)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    return Work() if plain else Work(encoded=Fraction(1), decoded=Fraction(1))
