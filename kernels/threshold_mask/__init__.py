"""Marks the elements that reach a threshold in magnitude, by one bit each."""

from typing import Any

import jax
import numpy as np

from gradcomp._src.kernels.common.row_view import RowView
from gradcomp._src.kernels.compaction import TILE
from gradcomp._src.kernels.gpu import dispatch, self_check, triton_tiles
from gradcomp._src.kernels.threshold_mask import pallas, reference


def mark(
  x: RowView,
  threshold: jax.Array,
  sign: jax.Array | None = None,
  *,
  implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Runs :func:`reference.mark` or a kernel, as :func:`dispatch.run` chooses."""
  refusal = triton_tiles.refusal_of_tiles
  no = refusal(x.size, TILE) or refusal(x.matrices[0].size, TILE)
  operation = dispatch.Operation(reference.mark, no or pallas.mark)
  example = lambda: _example(x.matrices[0].shape[0] > 1, sign is not None)
  return dispatch.run(operation, implementation, (x, threshold, sign), {}, example)


def _example(several: bool, signed: bool) -> self_check.Example:
  """Returns a row, the only one or one of two, and a threshold that some reach."""
  matrix: Any = self_check.elements((1 + several) * (100 * TILE + 77))
  number: Any = np.int32(several)
  half = np.float32(0.5).view(np.uint32)
  sign = np.float32(-1) if signed else None
  x = RowView([matrix.reshape(1 + several, -1)], number)
  return self_check.Example((x, half, sign))
