"""Marks the elements whose magnitude reaches a threshold by one bit each."""

import jax

from gradcomp.kernels import blocks, dispatch
from gradcomp.kernels.listing import LANES, WORD
from gradcomp.kernels.marks import pallas, reference
from gradcomp.kernels.rows import Row


def mark(
  x: Row,
  threshold: jax.Array,
  sign: jax.Array | None = None,
  *,
  implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Marks elements by the implementation that :func:`dispatch.run` chooses.

  See :func:`reference.mark` for the other arguments and the result.
  """
  sizes = x.size, x.matrices[0].size
  no = next(filter(None, (blocks.refusal(n, WORD, LANES) for n in sizes)), "")
  return dispatch.run(
    implementation,
    x,
    threshold,
    sign,
    xla=reference.mark,
    pallas=no or pallas.mark,
  )
