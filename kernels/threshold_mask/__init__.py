"""Marks the elements that reach a threshold in magnitude, by one bit each."""

from typing import Any

import numpy as np
from jax import Array

from gradcomp._src.kernels.common.row_view import RowView
from gradcomp._src.kernels.compaction.reference import TILE
from gradcomp._src.kernels.gpu import dispatch, self_check, tiles
from gradcomp._src.kernels.threshold_mask import pallas, reference


def mark(
  x: RowView,
  threshold: Array,
  sign: Array | None = None,
  *,
  implementation: dispatch.Implementation | None = None,
) -> tuple[Array, Array]:
  """Runs :func:`reference.mark` or a kernel, as :func:`dispatch.run` chooses."""
  refusal = tiles.refusal_of_tiles
  no = refusal(x.size, TILE) or refusal(x.matrices[0].size, TILE)
  operation = dispatch.Operation(reference.mark, no or pallas.mark)
  example = lambda size: _example(size, x.rows > 1, sign is not None)
  return dispatch.run(operation, implementation, (x, threshold, sign), {}, example)


def _example(elements: int, several: bool, signed: bool) -> self_check.Example:
  """Returns a row, the only one or one of two, and a threshold that some reach."""
  matrix: Any = self_check.elements((1 + several) * (elements // TILE * TILE + 77))
  number: Any = np.int32(several)
  half = np.float32(0.5).view(np.uint32)
  sign = np.float32(-1) if signed else None
  x = RowView([matrix.reshape(1 + several, -1)], number)
  return self_check.Example((x, half, sign))
