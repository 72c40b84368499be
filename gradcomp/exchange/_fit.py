"""What codecs with a memory remember: fitted to the gradients of all workers."""

from collections.abc import Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp import _axes
from gradcomp._axes import AxisName
from gradcomp.codecs import Codec, FittedCodec, is_fitted
from gradcomp.exchange._collectives import psum, stage
from gradcomp.exchange._plan import Message


def refit(
  codec: FittedCodec,
  memory: jax.Array,
  messages: Sequence[Message],
  leaves: Sequence[jax.Array],
  step: jax.Array,
  axis_name: AxisName | None,
) -> jax.Array:
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
  if not encoded:
    return memory
  axes: set[str] = set().union(*(message.others for message in messages))

  def fit() -> jax.Array:
    counts = sum(codec.measure(leaves[number]) for number in encoded)
    if axis_name is not None:
      names = (*_axes.names(axis_name), *sorted(axes))
      with stage():
        counts = psum(counts, names if len(names) > 1 else names[0])
    return codec.fit(jnp.asarray(counts), memory)

  return lax.cond(step % codec.refit_every == 0, fit, lambda: memory)


def fit_bytes(codec: Codec, messages: Sequence[Message], workers: int) -> Fraction:
  """What a worker sends for a fit: an all-reduce of 32-bit counts."""
  if not is_fitted(codec) or not _encoded(codec, messages):
    return Fraction(0)
  counts = jax.eval_shape(codec.measure, jax.ShapeDtypeStruct((1,), jnp.float32))
  return Fraction(2 * (workers - 1), workers) * 4 * counts.size


def _encoded(codec: Codec, messages: Sequence[Message]) -> list[int]:
  """The numbers of the leaves that the codec encodes, where anything is exchanged."""
  return [
    number
    for message in messages
    if message.exchange != "local"
    for number, slot in zip(message.leaves, message.layout.slots, strict=True)
    if message.layout.codecs[slot.group] == codec
  ]
