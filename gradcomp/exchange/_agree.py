"""What workers agree on before they encode: the largest statistics, and what fits."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gradcomp.codecs import Adding, LeafCodec, Memory, refitted
from gradcomp.exchange._collectives import STAGE, Workers, largest, split, totals
from gradcomp.exchange._notes import noted
from gradcomp.exchange._plan import Plan
from gradcomp.workers import axis_names, require_size


def largest_stats(
  stats: Sequence[jax.Array | None], workers: Workers
) -> list[jax.Array | None]:
  """The largest statistics of all workers, in one message."""
  own = [x for x in stats if x is not None]
  if not own:
    return list(stats)
  message = jnp.concatenate([x.reshape(-1) for x in own])
  agreed = iter(
    split(largest(message, workers.axis_name)[None], [x.shape for x in own])
  )
  return [None if x is None else next(agreed)[0] for x in stats]


def refit(
  plan: Plan,
  leaves: Sequence[jax.Array],
  memory: Sequence[Memory],
  step: jax.Array,
) -> list[Memory]:
  """The memories of this step: what all workers share is fitted to all their leaves.

  Args:
    plan: says which codec encodes what.
    leaves: float32 arrays.
    memory: of the last step.
    step: ``int32[]``.
  """
  if not plan.sends:
    return list(memory)
  data = () if plan.axis_name is None else axis_names(plan.axis_name)

  def adding(codec: LeafCodec, numbers: Sequence[int]) -> Adding:
    others = {axis for i in numbers for axis in plan.others[i]}
    names = (*data, *sorted(others))

    def add(counts: jax.Array) -> jax.Array:
      if not names:
        return counts
      with noted(codec):
        return totals([counts], names, STAGE)[0]

    return Adding(add, math.prod(map(require_size, names)))

  old = [x.shared for x in memory]
  shared = refitted(plan.codecs, leaves, old, plan.others, step, adding)
  return [x._replace(shared=y) for x, y in zip(memory, shared, strict=True)]
