"""``all_gather``: every worker receives every payload."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.checks import one_of
from gradcomp._src.codecs.sums.sum import RowDecoder, Sum, Way
from gradcomp._src.exchange.collectives import Workers, final_stage, gather, join, split
from gradcomp._src.exchange.contribution import Contribution, Total
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.exchange.protocol import WithoutOwners, Work
from gradcomp._src.kernels.common.fixed_point import divide

Merge = Literal["mean", "senders"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllGather(WithoutOwners):
  """Sends every payload to every worker, which decodes all of them and adds.

  An addition may lose a part of the numbers that it adds. The worker whose numbers were
  added keeps that part. A worker sends ``(N-1) c`` bytes, where c is the bytes of a
  payload.

  Attributes:
    merge: ``"mean"``, or ``"senders"``: of a sparse codec, the sum of an element is
      divided by the number of workers that sent it, and not by N.

  Raises:
    ValueError: ``merge`` is neither.
  """

  merge: Merge = "mean"

  name: ClassVar[str] = "all_gather"
  way: ClassVar[Way] = "gathered"
  of_leaves: ClassVar[bool] = True

  def __post_init__(self) -> None:
    one_of("merge", Merge, self.merge)

  def run(self, own: Contribution, workers: Workers) -> Total:
    gathered = gather_rows(own.layout, own.rows, workers)
    parts = list(zip(own.sums, gathered, own.agreed_rows, strict=True))
    number = lax.axis_index(workers.axis_name) if own.keep else None

    def decoders() -> list[RowDecoder]:
      return [self._decoder(*part, workers) for part in parts]

    return Total(
      own.means(decoders, gathered[0]),
      [
        None if number is None else total.gathered_loss(rows, agreed, number)
        for total, rows, agreed in parts
      ],
      own.residuals,
    )

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
