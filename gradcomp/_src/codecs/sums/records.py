"""The records that codecs exchange with the library."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from gradcomp._src.kernels.common.dithers import dither

ArrayT = TypeVar("ArrayT", jax.Array, np.ndarray)
ArrayLike = jax.Array | jax.ShapeDtypeStruct  # a shape and a dtype


class Payload(NamedTuple):
  """The arrays that cross the wire for one leaf; their bytes are all that is sent."""

  rows: jax.Array  # uint32[rows, row_words], words and scales
  agreed: jax.Array | None = None  # the statistics that workers agreed on, if any


class Memory(NamedTuple):
  """The state that a codec keeps for one leaf from step to step.

  Attributes:
    shared: a tree of arrays that are equal on all workers.
    own: a tree of arrays that each worker has for itself.
  """

  shared: Any = ()
  own: Any = ()


class Encoded(NamedTuple):
  """The result of encoding one leaf."""

  rows: jax.Array  # uint32[rows, row_words]
  unsent: jax.Array | None = None  # float32, the residual, if encoding knows it
  own: Any = ()  # this worker's own codec state after the step


class Context(NamedTuple):
  """The inputs of an encoding other than the leaf; None where unknown.

  Attributes:
    key: ``uint32[2]``, the worker's own; for codecs that draw random numbers.
    dither: ``uint32[3]``, the random source in place of the key: the key that all
      workers share, and the worker's mask, see :func:`gradcomp.kernels.dither`.
    agreed: the statistics that all workers agree on.
    memory: the codec state of the leaf. Its ``own`` is None where a sum of several
      workers' gradients is encoded.
    step: the number of the step, ``int32[]``.
  """

  key: jax.Array | None = None
  dither: jax.Array | None = None
  agreed: jax.Array | None = None
  memory: Memory | None = None
  step: jax.Array | None = None

  @property
  def drawn(self) -> jax.Array:
    """The dither; where there is none, one from the key, without a mask."""
    if self.dither is not None:
      return self.dither
    assert self.key is not None  # the codec needs one
    return dither(self.key)


NOTHING = Context()


@dataclasses.dataclass(frozen=True)
class Fit:
  """A codec state that all workers fit to the sum of their counts, every few steps.

  The leaves of one codec count together, and share one state.

  Attributes:
    every: the number of steps from one fit to the next.
    most: the largest sum of one leaf's counts.
    count: counts a leaf's elements, ``int32[k]``.
    fit: returns the shared codec state for counts, given the old one.
  """

  every: int
  most: int
  count: Callable[[jax.Array], jax.Array]
  fit: Callable[[jax.Array, Any], Any]


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
