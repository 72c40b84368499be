"""Codecs with rows of a smaller range than ``float32``, like ``float16``."""

from typing import Protocol, TypeGuard, runtime_checkable

from gradcomp._src.codecs.protocol import Codec, LeafCodec


@runtime_checkable
class RangedCodec(Codec, Protocol):
  """A codec with rows of a smaller range than ``float32``, and without a scale.

  Sums on the way are divided by powers of two.
  """

  @property
  def largest(self) -> float | None:
    """The largest number that a row holds; None for the range of float32."""


def is_ranged(codec: LeafCodec) -> TypeGuard[RangedCodec]:
  """Returns True if the hyperparameters make a codec a :class:`RangedCodec`.

  Example:
    >>> half, short = (gradcomp.codecs.Dense(dtype=t) for t in ("float16", "bfloat16"))
    >>> is_ranged(half), is_ranged(short)
    (True, False)
  """
  return getattr(codec, "largest", None) is not None
