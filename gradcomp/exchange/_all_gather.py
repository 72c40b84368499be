"""``all_gather``: every worker receives every payload."""

from collections.abc import Sequence

import jax
from jax import lax

from gradcomp.exchange._collectives import Workers, final_stage, gather, join, split
from gradcomp.exchange._contribution import Contribution, Total
from gradcomp.layout import Layout


def all_gather(own: Contribution, workers: Workers) -> Total:
  """Every worker receives every payload, decodes all and adds.

  What additions lose of a worker's numbers, that worker keeps.
  """
  gathered = gather_rows(own.layout, own.rows, workers)
  parts = list(zip(own.sums, gathered, own.agreed, strict=True))
  number = lax.axis_index(workers.axis_name) if own.keep else None
  return Total(
    [total.gathered(rows, agreed, workers.scale) for total, rows, agreed in parts],
    [
      None if number is None else total.gathered_loss(rows, agreed, number)
      for total, rows, agreed in parts
    ],
    own.residuals,
  )


def gather_rows(
  layout: Layout, matrices: Sequence[jax.Array], workers: Workers
) -> list[jax.Array]:
  """All workers' rows, in one message.

  Args:
    layout: the plan that the matrices follow.
    matrices: ``uint32[rows, row_words]`` for each codec.
    workers: who exchanges.

  Returns:
    ``uint32[N, rows, row_words]`` for each codec, the same on every worker.
  """
  name = final_stage(layout.elements, workers)
  received = gather(join(matrices, 1)[0], workers.axis_name, name)
  return split(received, [matrix.shape for matrix in matrices])
