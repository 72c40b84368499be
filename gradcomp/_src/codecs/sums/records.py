"""The records that codecs exchange with the library."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np
from jax import Array

from gradcomp._src.kernels.common.dithers import dither

ArrayT = TypeVar("ArrayT", Array, np.ndarray)
ArrayLike = Array | jax.ShapeDtypeStruct  # a shape and a dtype


class Payload(NamedTuple):
  """The arrays that cross the wire for one leaf, and all that is sent for it."""

  rows: Array  # uint32[rows, row_words], words and scales
  agreed: Array | None = None  # the statistics that workers agreed on, if any


class Memory(NamedTuple):
  """The state that a codec keeps for one leaf from step to step.

  Attributes:
    shared: a tree of arrays, equal on all workers.
    own: a tree of arrays, each worker's own.
  """

  shared: Any = ()
  own: Any = ()


class Encoded(NamedTuple):
  """The result of encoding one leaf."""

  rows: Array  # uint32[rows, row_words]
  # float32, the residual, if encoding knows it: to the bit the leaf less its decoded
  # rows, from which a CPU may compute it instead
  unsent: Array | None = None
  own: Any = ()  # this worker's own codec state after the step
  chosen: Array | None = None  # as of Sum.sent_at, if encoding knows it
  lost: Array | None = None  # the unsent part there; elsewhere it is the leaf


class Context(NamedTuple):
  """The inputs of an encoding other than the leaf; None where unknown.

  Attributes:
    key: ``uint32[2]``, the worker's own, for codecs that draw random numbers.
    dither: ``uint32[3]`` in place of the key: the key that all workers share, and the
      worker's mask of 16 bits, twice in one word.
    agreed: the statistics that all workers agree on.
    memory: the codec state of the leaf; ``own`` is None where a sum is encoded.
    step: the number of the step, ``int32[]``.
    measured: what this worker measured in the leaf beside its statistics.
  """

  key: Array | None = None
  dither: Array | None = None
  agreed: Array | None = None
  memory: Memory | None = None
  step: Array | None = None
  measured: Any = None

  @property
  def drawn(self) -> Array:
    """The dither; where there is none, one from the key, without a mask."""
    if self.dither is not None:
      return self.dither
    assert self.key is not None  # the codec needs one
    return dither(self.key)


NOTHING = Context()


@dataclasses.dataclass(frozen=True)
class Fit:
  """A codec state that all workers fit to the sum of their counts, every few steps."""

  every: int  # the number of steps from one fit to the next
  most: int  # the largest sum of one leaf's counts
  count: Callable[[Array], Array]  # counts a leaf's elements, int32[k]
  fit: Callable[[Array, Any], Any]  # of counts and the old shared state, the new one


class Leaf(NamedTuple):
  """The facts about a leaf that a codec may depend on before it encodes."""

  shape: tuple[int, ...]
  addends: int | None = None  # how many workers' numbers are added, if any are
  ranges: int = 1  # of consecutive elements, one for each owner
  path: str = ""  # in the tree, like "layer/kernel"

  @property
  def size(self) -> int:
    """The number of elements."""
    return math.prod(self.shape)


Rounding = Literal["stochastic", "nearest"]
Accumulate = Literal["format", "kahan", "float32"]
