"""Codecs that round at random or to nearest."""

import dataclasses
from typing import Protocol, Self, runtime_checkable

from gradcomp._src.codecs.protocol import Codec, Rounding


@runtime_checkable
class RoundingCodec(Codec, Protocol):
  """A codec that rounds at random, and has a form that rounds to nearest."""

  def to_nearest(self) -> Codec:
    """Returns the codec that rounds to nearest, with rows of the same format.

    It encodes sums with an owner residual: it loses less, and needs no random bits.
    """


class RoundsAtRandom:
  """A base of codecs that are unbiased unless they round to nearest."""

  rounding: Rounding

  @property
  def unbiased(self) -> bool:
    return self.rounding == "stochastic"

  @property
  def needs_key(self) -> bool:
    return self.rounding == "stochastic"

  def to_nearest(self) -> Self:
    """Returns the codec that rounds to nearest."""
    return dataclasses.replace(self, rounding="nearest")  # type: ignore[type-var]


def to_nearest(codec: Codec) -> Codec:
  """Returns the form of a codec that rounds to nearest, or the codec if it has none.

  Example:
    >>> to_nearest(gradcomp.codecs.QSGD(bits=4)).rounding
    'nearest'
    >>> to_nearest(gradcomp.codecs.OneBit()) == gradcomp.codecs.OneBit()
    True
  """
  return codec.to_nearest() if isinstance(codec, RoundingCodec) else codec
