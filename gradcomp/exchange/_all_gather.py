"""``all_gather``: every worker receives every payload."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

import jax
from jax import lax

from gradcomp.exchange._collectives import Workers, final_stage, gather, join, split
from gradcomp.exchange._contribution import Contribution, Total
from gradcomp.exchange._exchange import WithoutOwners
from gradcomp.exchange._work import Work
from gradcomp.layout import Layout
from gradcomp.sums import RowDecoder, Way


@dataclasses.dataclass(frozen=True)
class AllGather(WithoutOwners):
  """Sends every payload to every worker, which decodes all of them and adds.

  An addition may lose a part of the numbers that it adds. The worker whose numbers were
  added keeps that part. A worker sends ``(N-1) c`` bytes, where c is the bytes of a
  payload.
  """

  name: ClassVar[str] = "all_gather"
  way: ClassVar[Way] = "gathered"
  of_leaves: ClassVar[bool] = True

  def run(self, own: Contribution, workers: Workers) -> Total:
    gathered = gather_rows(own.layout, own.rows, workers)
    parts = list(zip(own.sums, gathered, own.agreed_rows, strict=True))
    number = lax.axis_index(workers.axis_name) if own.keep else None

    def decoders() -> list[RowDecoder]:
      scale = workers.scale
      return [total.gathered(rows, agreed, scale) for total, rows, agreed in parts]

    return Total(
      own.means(decoders, gathered[0]),
      [
        None if number is None else total.gathered_loss(rows, agreed, number)
        for total, rows, agreed in parts
      ],
      own.residuals,
    )

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    return Work(encoded=Fraction(1), added=Fraction(math.prod(sizes)))


def gather_rows(
  layout: Layout, matrices: Sequence[jax.Array], workers: Workers
) -> list[jax.Array]:
  """Gathers the rows of all workers, in one message.

  Args:
    layout: the layout of the matrices.
    matrices: ``uint32[rows, row_words]`` for each codec.
    workers: the workers that exchange.

  Returns:
    ``uint32[N, rows, row_words]`` for each codec, the same on every worker.
  """
  name = final_stage(layout.elements, workers)
  received = gather(join(matrices, 1)[0], workers.axis_name, name)
  return split(received, [matrix.shape for matrix in matrices])
