"""A base of sparse codecs, which send some of the elements, and their checks."""

import abc
import dataclasses
import math
from typing import Any, Self

from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.kernels.common.sparse import add_entries
from gradcomp._src.public import StaticError

_MOST_ELEMENTS = 1 << 30  # of a row: int32 counts twice as many


class SparseRows(Codec):
  """A base of sparse codecs. A row is a leaf, or an Nth where workers own ranges."""

  density: float
  range_size: int | None

  @property
  def tile_size(self) -> int:
    return self.range_size or 0  # 0 until bind knows the leaf

  @property
  @abc.abstractmethod
  def slots(self) -> int:
    """The number of entries that a row has room for."""

  @abc.abstractmethod
  def entries(self, rows: Array) -> tuple[Array, Array]:
    """Returns ``int32`` positions and ``float32`` values of rows, ``[..., slots]``.

    Positions of unused slots are ``tile_size`` or more.
    """

  def bind(self, leaf: Leaf) -> Codec:
    """Returns the codec of a leaf's ranges; ``Dense()`` if all elements are sent."""
    return Dense() if self.density == 1 else self.ranged(leaf.size, leaf.ranges)

  def ranged(self, size: int, ranges: int = 1) -> Self:
    """Returns the codec of leaves of ``size`` elements in ``ranges`` ranges."""
    size = self.range_size or range_of(size, ranges)
    return dataclasses.replace(self, range_size=size)  # type: ignore[type-var]

  def decode_rows(self, rows: Array) -> Array:
    """Decodes row by row: ``uint32[..., words]`` to ``float32[..., 1, elements]``."""
    positions, values = self.entries(rows.reshape(1, -1, self.row_words))
    dense = add_entries(self.tile_size, positions, values)
    return dense.reshape(*rows.shape[:-1], 1, self.tile_size)


def _density(name: str, value: Any) -> float:
  rule = "a share of the elements, above 0 and at most 1"
  if isinstance(value, Array):
    cure = "change it by steps with gradcomp.wrappers.switch, or, "
    raise StaticError(name, rule, cure)
  return checks.static_number(name, rule, value, most=1)


DENSITY = checks.Rule(_density, "above 0 and at most 1", (0, 1.5))
RANGE = checks.optional(
  checks.integer(
    "a number of elements from 1 to 2**30, or None for whole leaves",
    1,
    _MOST_ELEMENTS,
  )
)


def range_of(size: int, ranges: int) -> int:
  """Returns the size of a range; 2, 4, 8, ... times the ranges keep it to 2**30.

  Example:
    >>> range_of(1000, 3), range_of(2**30 + 1, 1), range_of(3 * 2**30, 2)
    (334, 536870913, 805306368)
  """
  while size > ranges * _MOST_ELEMENTS:
    ranges *= 2
  return max(1, -(-size // ranges))


def sent_of(density: float, size: int) -> int:
  """Returns the number of elements to send, ``density * size`` rounded up, at least 1.

  Example:
    >>> sent_of(0.001, 1000), sent_of(0.001, 1001), sent_of(0.001, 5)
    (1, 2, 1)
  """
  # A share like 0.001 is no binary fraction. Its excess must not count as an element.
  return max(1, min(size, math.ceil(density * size * (1 - 2.0**-40))))
