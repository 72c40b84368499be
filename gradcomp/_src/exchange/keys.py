"""Random keys and dithers of one step, for each leaf and for each re-encoding."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.kernels.common import dithers
from gradcomp._src.kernels.common.threefry import fold_key


class StepKey(NamedTuple):
  """The random key and dither of a leaf, or of its sum, in a step.

  Attributes:
    own: ``uint32[2]``, this worker's key; or a key of all workers, where they must
      select the same elements.
    dither: ``uint32[3]``, the key that all workers share, and this worker's mask, see
      ``common.dithers``; None to draw independently.
  """

  own: jax.Array
  dither: jax.Array | None

  def in_round(self, number: int) -> "StepKey":
    """Returns the key of a round of messages, unchanged for round 0."""
    if not number:
      return self
    own, shared = fold_key(self.own, number), self.dither
    if shared is not None:
      shared = jnp.append(fold_key(shared[:2], number), shared[2])
    return StepKey(own, shared)

  def at(self, part: jax.Array, number: jax.Array | int) -> "StepKey":
    """Returns the key of partial sum ``number`` of the rows ``part``.

    Other rows draw other bits. The mask is that of the worker with this number.
    """
    own, shared = fold_key(self.own, number), self.dither
    if shared is not None:
      shared = dithers.dither(fold_key(shared[:2], part), number)
    return StepKey(own, shared)


class Keys(NamedTuple):
  """The keys of one worker and step, None for codecs without random numbers."""

  leaves: Sequence[StepKey | None]
  stages: Sequence[StepKey | None]  # one for each codec, for its later encodings
