"""``in_turn``: the last stages of messages, one after the other on GPUs."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from gradcomp._src.mesh.types import varying_axes


def in_turn(
  arrays: Sequence[jax.Array], before: Sequence[jax.Array]
) -> list[jax.Array]:
  """Returns arrays that a GPU sends when ``before`` has come, unchanged."""
  # XLA:GPU joins all-gathers of less than 30 MiB together to one, and all-reduces too,
  # which waits for the last message; then first stages do not overlap either. It cannot
  # join two of which one needs the other. They run one after the other in any case, on
  # one stream. Elsewhere nothing is joined, and between TPU slices several are on their
  # way.
  # What comes of a barrier varies over all axes of what goes in: so messages of other
  # axes do not wait for each other, nor does one whose leaves differ in them.
  known = [varying_axes(x) for x in arrays]
  before = [x for x in before if all(varying_axes(x) <= own for own in known)]
  if not before or any(own != known[0] for own in known):
    return list(arrays)

  def tied(arrays: list[jax.Array], before: list[jax.Array]) -> list[jax.Array]:
    return lax.optimization_barrier((arrays, before))[0]

  either: dict[str, Any] = {"cuda": tied, "rocm": tied}
  free = lambda arrays, _: arrays
  return lax.platform_dependent(list(arrays), list(before), default=free, **either)
