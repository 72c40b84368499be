"""Distributes a worker's words over its devices along Auto axes.

XLA places arrays over Auto axes itself. It gathers the operands of most collectives
over them, so that every device would send all words. A map over these axes makes each
device send a part.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradcomp._src.mesh.axes import AxisName, automatic_axes
from gradcomp._src.mesh.types import is_typed


def devices(axis_name: AxisName) -> int:
  """Returns the number of devices that share the work of one worker."""
  return math.prod(automatic_axes(axis_name).values())


def spread(
  function: Callable[[jax.Array], jax.Array],
  words: jax.Array,
  axis_name: AxisName,
  name: str,
  *,
  ndim: int | None = None,
) -> jax.Array:
  """Runs a collective in which each device sends a part of the last axis.

  Args:
    function: a collective over ``axis_name`` that treats all places of the last axis
      equally.
    words: ``[..., M]``, or a scalar, which every device sends. Zeros fill M up to a
      multiple of the number of devices.
    axis_name: the axes of the workers.
    name: the name of the collective. XLA's own transfers between devices do not get it.
    ndim: the number of axes of the result, of which the last is again M; by default
      that of ``words``.
  """
  axes = automatic_axes(axis_name)
  named = jax.named_scope(name)(function)
  if not axes or not words.ndim:
    return named(words)
  length = words.shape[-1]
  filling = -length % math.prod(axes.values())
  # The constraint keeps the words whole outside of the map. Without it, XLA would shard
  # the operands of the words, and the arrays that are computed from them. That takes
  # many small messages, and whole leaves would come out sharded.
  words = jax.lax.with_sharding_constraint(words, PartitionSpec())
  padded = jnp.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, filling)])

  def cut(ndim: int) -> PartitionSpec:
    return PartitionSpec(*[None] * (ndim - 1), tuple(axes))

  mapped = jax.shard_map(
    named,
    in_specs=cut(words.ndim),
    out_specs=cut(words.ndim if ndim is None else ndim),
    axis_names=set(axes),
    check_vma=is_typed(axis_name),
  )
  whole = jax.lax.with_sharding_constraint(mapped(padded), PartitionSpec())
  return whole[..., :length]
