"""The protocol of codecs whose rows hold smaller numbers than float32 does."""

from typing import Protocol, TypeGuard, runtime_checkable

from gradcomp._src.codecs.protocol import Codec, LeafCodec


@runtime_checkable
class RangedCodec(Codec, Protocol):
  """A codec whose rows hold smaller numbers than float32 does, with no scale for them.

  Sums on the way are divided by powers of two.
  """

  @property
  def largest(self) -> float | None:
    """The largest number that a row holds; None for that of float32."""


def is_ranged(codec: LeafCodec) -> TypeGuard[RangedCodec]:
  """Returns True for a :class:`RangedCodec`, which the hyperparameters decide.

  Example:
    >>> half, short = (gradcomp.codecs.Dense(dtype=t) for t in ("float16", "bfloat16"))
    >>> is_ranged(half), is_ranged(short)
    (True, False)
  """
  return getattr(codec, "largest", None) is not None
