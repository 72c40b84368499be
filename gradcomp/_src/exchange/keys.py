"""Random keys and dithers of one step, for each leaf and for each re-encoding."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.sums.records import Context
from gradcomp._src.kernels.common import dithers
from gradcomp._src.kernels.common.threefry import fold_key


class Keys(NamedTuple):
  """The contexts of one worker and step, which have a key and a dither at most."""

  leaves: Sequence[Context]
  stages: Sequence[Sequence[Context]]  # for each codec of each message


def in_round(context: Context, number: int) -> Context:
  """Returns the context for a round of messages, unchanged for round 0."""
  if not number or context.key is None:
    return context
  key, shared = fold_key(context.key, number), context.dither
  if shared is not None:
    shared = jnp.append(fold_key(shared[:2], number), shared[2])
  return context._replace(key=key, dither=shared)


class Stage(NamedTuple):
  """The later encodings of one codec, which encode sums.

  Attributes:
    context: the context of this worker and codec.
    residual: the owner residual from the last step, or None.
  """

  context: Context
  residual: jax.Array | None

  @property
  def whole(self) -> Context:
    """The context for encoding whole sums."""
    # Only one worker encodes the sum of a share, so that it draws its own bits.
    return self.context._replace(dither=None)

  def partial(self, part: jax.Array, number: jax.Array | int) -> Context:
    """Returns the context for encoding partial sum ``number`` of the rows ``part``.

    Other rows draw other bits. The mask is that of the worker with this number.
    """
    key, shared = self.context.key, self.context.dither
    if key is None:
      return self.context
    if shared is not None:
      shared = dithers.dither(fold_key(shared[:2], part), number)
    return self.context._replace(key=fold_key(key, number), dither=shared)
