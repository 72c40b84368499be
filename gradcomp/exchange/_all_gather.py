"""``all_gather``: every worker receives every payload."""

from collections.abc import Sequence

import jax

from gradcomp.exchange._collectives import Workers, final_stage, gather, join, split
from gradcomp.layout import Layout


def all_gather(
  layout: Layout, matrices: Sequence[jax.Array], workers: Workers
) -> list[jax.Array]:
  """Every worker receives every payload.

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
