"""Spreads what is sent over the devices that Auto axes group together.

XLA gathers the operands of most collectives over the axes that it places itself, and
every device then sends the whole. A map over those axes leaves each its part.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradcomp.workers import AxisName, automatic_axes, is_typed


def devices(axis_name: AxisName) -> int:
  """The devices that share the work of one worker, each with a part."""
  return math.prod(automatic_axes(axis_name).values())


def spread(
  function: Callable[[jax.Array], jax.Array],
  words: jax.Array,
  axis_name: AxisName,
  name: str,
  *,
  ndim: int | None = None,
) -> jax.Array:
  """``function(words)``, each device with its part of the last axis.

  Args:
    function: a collective over ``axis_name`` that treats all places of the last axis
      alike.
    words: ``[..., M]``, or one alone, which all send. Zeros fill M up to a multiple of
      the devices.
    axis_name: the axes of the workers.
    name: of the collective alone, not of what XLA moves between devices around it.
    ndim: of the result, whose last axis is again M; by default that of ``words``.
  """
  axes = automatic_axes(axis_name)
  named = jax.named_scope(name)(function)
  if not axes or not words.ndim:
    return named(words)
  length = words.shape[-1]
  filling = -length % math.prod(axes.values())
  # Else XLA would cut whatever the words are made of, and what is made of them. That
  # takes many small messages, and leaves that lie whole would come out in parts.
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
