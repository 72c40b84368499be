"""Holds what the leaves of a step, and their sums, are rounded with."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.kernels.common import dithers
from gradcomp._src.kernels.common.threefry import fold_key


class StepKey(NamedTuple):
  """Holds what a leaf, or the sum of one, is rounded with in a step.

  Attributes:
    own: ``uint32[2]``, a key of this worker's own; or that of all workers, where they
      must choose the same elements.
    dither: ``uint32[3]``, the key that all workers share, and this worker's mask, see
      ``common.dithers``; None for draws of its own.
  """

  own: jax.Array
  dither: jax.Array | None

  def in_round(self, number: int) -> "StepKey":
    """Returns the key of a round of messages; in the first one, this one."""
    if not number:
      return self
    own, shared = fold_key(self.own, number), self.dither
    if shared is not None:
      shared = jnp.append(fold_key(shared[:2], number), shared[2])
    return StepKey(own, shared)

  def at(self, part: jax.Array, number: jax.Array | int) -> "StepKey":
    """Returns the key of one of the sums that are encoded on the way to the whole one.

    Args:
      part: the number of the rows that are added. Other rows draw other bits.
      number: the number of the sum among those of these rows: its mask is that of the
        worker of this number.
    """
    own, shared = fold_key(self.own, number), self.dither
    if shared is not None:
      shared = dithers.dither(fold_key(shared[:2], part), number)
    return StepKey(own, shared)


class Keys(NamedTuple):
  """Holds the keys of one worker and step, or None where nothing is drawn."""

  leaves: Sequence[StepKey | None]
  stages: Sequence[StepKey | None]  # one for each codec, for its later encodings
