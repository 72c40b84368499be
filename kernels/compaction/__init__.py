"""Lists the positions of set bits, one bit for each element."""

import jax
import numpy as np

from gradcomp._src.kernels.compaction import pallas, reference
from gradcomp._src.kernels.compaction.reference import LANES as LANES
from gradcomp._src.kernels.compaction.reference import TILE as TILE
from gradcomp._src.kernels.compaction.reference import WORD as WORD
from gradcomp._src.kernels.compaction.reference import count_bits as count_bits
from gradcomp._src.kernels.compaction.reference import first_bits as first_bits
from gradcomp._src.kernels.compaction.reference import (
  groups_of_slots as groups_of_slots,
)
from gradcomp._src.kernels.gpu import dispatch, self_check, triton_tiles


def positions(
  words: jax.Array,
  capacity: int,
  size: int,
  *,
  implementation: dispatch.Implementation | None = None,
) -> jax.Array:
  """Runs :func:`reference.positions` or a kernel, as :func:`dispatch.run` chooses."""
  no = triton_tiles.refusal_of_tiles(words.size * WORD, TILE)
  operation = dispatch.Operation(reference.positions, no or pallas.positions)
  options = {"capacity": capacity, "size": size}
  return dispatch.run(operation, implementation, (words,), options, _example)


def _example() -> self_check.Example:
  """Returns words with one set bit or two, and more slots than there are set bits."""
  bits = np.random.default_rng(0).integers(0, WORD, (2, 100 * LANES), np.uint32)
  words = np.bitwise_or.reduce(np.uint32(1) << bits)
  slots = {"capacity": 2 * words.size, "size": words.size * WORD}
  return self_check.Example((words,), slots)
