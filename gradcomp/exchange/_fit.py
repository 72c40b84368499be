"""What codecs with a memory remember: fitted to the gradients of all workers."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp.codecs import Codec, FittedCodec, is_fitted
from gradcomp.exchange._collectives import STAGE, totals
from gradcomp.exchange._notes import noted
from gradcomp.exchange._plan import Message
from gradcomp.workers import AxisName, axis_names, require_size


def refit(
  codec: Codec,
  memory: jax.Array | None,
  messages: Sequence[Message],
  leaves: Sequence[jax.Array],
  step: jax.Array,
  axis_name: AxisName | None,
) -> jax.Array | None:
  """The memory of this step: fitted anew every ``codec.refit_every`` steps.

  The workers' counts are added as integers, exactly, so that all fit the same.

  Args:
    codec: of the large leaves.
    memory: of the last step.
    messages: the plan, which says what the codec encodes.
    leaves: float32 arrays.
    step: ``int32[]``.
    axis_name: the axes of the workers; None for one alone.
  """
  encoded = _encoded(codec, messages)
  if memory is None or not is_fitted(codec) or not encoded:
    return memory
  names: tuple[str, ...] = ()
  if axis_name is not None:
    others = {axis for number in encoded for axis in encoded[number]}
    names = (*axis_names(axis_name), *sorted(others))
  measured = len(encoded) * math.prod(map(require_size, names))
  # The counts of all leaves and workers fit in 32 bits, cut to fewer digits if need be.
  shift = max(0, (measured * codec.most_counted).bit_length() - 31)

  def fit() -> jax.Array:
    counts = sum(_measure(codec, leaves[number]) >> shift for number in encoded)
    if names:
      with noted(codec):
        (counts,) = totals([counts], names, STAGE)
    return codec.fit(jnp.asarray(counts), memory)

  return lax.cond(step % codec.refit_every == 0, fit, lambda: memory)


@functools.partial(jax.jit, static_argnums=0)
def _measure(codec: FittedCodec, leaf: jax.Array) -> jax.Array:
  """Jitted by itself, so that leaves of one shape are traced once."""
  return codec.measure(leaf)


def _encoded(codec: Codec, messages: Sequence[Message]) -> dict[int, tuple[str, ...]]:
  """The leaves that the codec encodes, where anything is exchanged: their numbers, and
  the axes beside the data axis over which they differ."""
  return {
    number: message.others
    for message in messages
    if message.exchange.sends
    for number, slot in zip(message.leaves, message.layout.slots, strict=True)
    if message.layout.codecs[slot.group] == codec
  }
