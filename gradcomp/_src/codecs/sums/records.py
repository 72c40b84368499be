"""The records that codecs exchange with the library."""

import math
from typing import Literal, NamedTuple

import jax


class Payload(NamedTuple):
  """The arrays that cross the wire for one leaf; their bytes are all that is sent."""

  rows: jax.Array  # uint32[rows, row_words], words and scales
  agreed: jax.Array | None = None  # the statistics that workers agreed on, if any


class Context(NamedTuple):
  """The inputs of an encoding other than the leaf and the key; None where unused.

  Attributes:
    agreed: the scale, or the byte of the exponent, that all workers agree on.
    dither: ``uint32[3]``, the random source in place of the key: the key that all
      workers share, and the worker's mask, see :func:`gradcomp.kernels.dither`.
    levels: the levels that are fitted to the gradients of all workers.
    thresholds: ``float32[rows]``, from the worker's last search; 0 for none.
    turn: ``float32[]``, the sign to send in this step: 1 or -1.
  """

  agreed: jax.Array | None = None
  dither: jax.Array | None = None
  levels: jax.Array | None = None
  thresholds: jax.Array | None = None
  turn: jax.Array | None = None


NOTHING = Context()


class Leaf(NamedTuple):
  """The facts about a leaf that a codec may depend on before it encodes."""

  shape: tuple[int, ...]
  addends: int | None = None  # how many workers' numbers are added, if any are
  ranges: int = 1  # of consecutive elements, each of which a worker owns
  path: str = ""  # in the tree, like "layer/kernel"

  @property
  def size(self) -> int:
    """The number of elements."""
    return math.prod(self.shape)


Rounding = Literal["stochastic", "nearest"]
Accumulate = Literal["format", "kahan", "float32"]
