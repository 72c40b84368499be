"""Lists of set bits: from a bit for each element to the positions of some."""

import functools

import jax

from gradcomp.kernels import blocks, dispatch
from gradcomp.kernels.listing import pallas, reference
from gradcomp.kernels.listing.reference import LANES as LANES
from gradcomp.kernels.listing.reference import TILE as TILE
from gradcomp.kernels.listing.reference import WORD as WORD
from gradcomp.kernels.listing.reference import count_bits as count_bits
from gradcomp.kernels.listing.reference import first_bits as first_bits
from gradcomp.kernels.listing.reference import groups_of_slots as groups_of_slots


def positions(
  words: jax.Array,
  capacity: int,
  size: int,
  *,
  implementation: dispatch.Implementation | None = None,
) -> jax.Array:
  """See :func:`reference.positions`; and :func:`dispatch.run`."""
  no = blocks.refusal(words.size * WORD, WORD, LANES)
  return dispatch.run(
    implementation,
    words,
    xla=functools.partial(reference.positions, capacity=capacity, size=size),
    pallas=no or functools.partial(pallas.positions, capacity=capacity, size=size),
  )
