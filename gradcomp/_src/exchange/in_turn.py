"""``in_turn``: messages, or their last stages, one after the other."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from gradcomp._src.mesh.types import varying_axes


def behind(arrays: Sequence[jax.Array], before: Sequence[jax.Array]) -> list[jax.Array]:
  """Returns arrays when ``before`` has come, unchanged."""
  # What comes of a barrier varies over all axes of what goes in: so messages of other
  # axes do not wait for each other, nor does one whose leaves differ in them.
  known = [varying_axes(x) for x in arrays]
  before = [x for x in before if all(varying_axes(x) <= own for own in known)]
  if not before or any(own != known[0] for own in known):
    return list(arrays)
  return lax.optimization_barrier((list(arrays), before))[0]


def in_turn(
  arrays: Sequence[jax.Array], before: Sequence[jax.Array]
) -> list[jax.Array]:
  """Returns arrays that a GPU sends when ``before`` has come, unchanged."""
  # XLA:GPU joins all-gathers of less than 30 MiB together to one, and all-reduces too,
  # which waits for the last message; then first stages do not overlap either. It cannot
  # join two of which one needs the other. They run one after the other in any case, on
  # one stream. Elsewhere nothing is joined, and between TPU slices several are on their
  # way.
  if not before:
    return list(arrays)
  either: dict[str, Any] = {"cuda": behind, "rocm": behind}
  free = lambda arrays, _: arrays
  return lax.platform_dependent(list(arrays), list(before), default=free, **either)
