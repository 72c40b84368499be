"""Agreement of workers, before they encode, on statistics and on fitted memories."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.memory import Adding, Memory, refitted
from gradcomp._src.exchange.collectives import STAGE, Workers, largest, split, totals
from gradcomp._src.exchange.notes import FITTING, noted
from gradcomp._src.exchange.plan import Plan
from gradcomp._src.mesh.axes import axis_names, require_size


def agree(
  wanted: Sequence[jax.Array | None], workers: Workers
) -> list[jax.Array | None]:
  """Takes the maximum of each leaf's statistics over all workers, in one message.

  A leaf whose codec has no statistics has None.
  """
  own = [x for x in wanted if x is not None]
  if not own:
    return list(wanted)
  message = jnp.concatenate([x.reshape(-1) for x in own])
  agreed = iter(
    split(largest(message, workers.axis_name)[None], [x.shape for x in own])
  )
  return [None if x is None else next(agreed)[0] for x in wanted]


def refit(
  plan: Plan,
  leaves: Sequence[jax.Array],
  memory: Sequence[Memory],
  step: jax.Array,
) -> list[Memory]:
  """Fits the leaves' shared memories to all workers, and keeps each worker's own ones.

  ``leaves`` are float32, and ``step`` is the number of the step, ``int32[]``.
  """
  if not plan.sends:
    return list(memory)
  data = () if plan.axis_name is None else axis_names(plan.axis_name)

  def adding(numbers: Sequence[int]) -> Adding:
    others = {axis for i in numbers for axis in plan.others[i]}
    names = (*data, *sorted(others))

    def add(counts: jax.Array) -> jax.Array:
      if not names:
        return counts
      with noted(FITTING):
        return totals([counts], names, STAGE)[0]

    return Adding(add, math.prod(map(require_size, names)))

  old = [x.shared for x in memory]
  shared = refitted(plan.codecs, leaves, old, plan.others, step, adding)
  return [x._replace(shared=y) for x, y in zip(memory, shared, strict=True)]
