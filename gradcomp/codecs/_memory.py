"""What a codec remembers that all workers share: fitted levels, or whose turn it is."""

from typing import TypeGuard

import jax

from gradcomp.codecs._codec import Codec, is_fitted
from gradcomp.codecs._sparse import SelectingCodec


def first_memory(codec: Codec) -> jax.Array | None:
  """Returns the memory before the first step; None for a codec without.

  Example:
    >>> first_memory(gradcomp.codecs.QSGD(bits=2, levels="nonuniform")).shape
    (2,)
  """
  return codec.init() if is_fitted(codec) else None


def takes_memory(codec: Codec) -> bool:
  """Returns True if a codec encodes with what :func:`recalled` returns."""
  return is_fitted(codec) or _alternates(codec)


def recalled(
  codec: Codec, memory: jax.Array | None, step: jax.Array, *, agreed: bool
) -> jax.Array | None:
  """Returns what a step's encodings take as ``stats``, equal on all workers; or None.

  Args:
    codec: the codec.
    memory: what it remembers.
    step: ``int32[]``.
    agreed: whether workers have agreed on the memory.
  """
  if _alternates(codec):
    return codec.turn(step)
  return memory if agreed else None


def _alternates(codec: Codec) -> TypeGuard[SelectingCodec]:
  return isinstance(codec, SelectingCodec) and codec.alternates
