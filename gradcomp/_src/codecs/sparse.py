"""Sparse codecs: their rows of entries, and the checks of their fields."""

import abc
import dataclasses
import math
from typing import Any, Literal, Self

from jax import Array

from gradcomp._src import checks, public
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.kernels.common import sparse

Quantize = Literal["asq", "mean"]
Selection = Literal["auto", "exact", "trimmed", "threshold", "sampled"]
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
    """Returns positions, ``tile_size`` or more if unused, and values."""

  def bind(self, leaf: Leaf) -> Codec:
    """Returns the codec of a leaf's ranges; ``Dense()`` if all elements are sent."""
    return Dense() if self.density == 1 else self.ranged(leaf.size, leaf.ranges)

  def ranged(self, size: int, ranges: int = 1) -> Self:
    """Returns the codec of leaves of ``size`` elements in ``ranges`` ranges."""
    while size > ranges * _MOST_ELEMENTS:
      ranges *= 2
    size = self.range_size or max(1, -(-size // ranges))
    return dataclasses.replace(self, range_size=size)  # type: ignore[type-var]

  def decode_rows(self, rows: Array) -> Array:
    """Decodes row by row: ``uint32[..., words]`` to ``float32[..., 1, elements]``."""
    positions, values = self.entries(rows.reshape(1, -1, self.row_words))
    dense = sparse.add_entries(self.tile_size, positions, values)
    return dense.reshape(*rows.shape[:-1], 1, self.tile_size)


def _density(name: str, value: Any) -> float:
  rule = "a share of the elements, above 0 and at most 1"
  if isinstance(value, Array):
    cure = "change it by steps with gradcomp.wrappers.switch, or, "
    raise public.StaticError(name, rule, cure)
  return checks.static_number(name, rule, value, most=1)


DENSITY = checks.Rule(_density, "above 0 and at most 1", (0, 1.5))
_RANGE = "a number of elements from 1 to 2**30, or None for whole leaves"
RANGE = checks.optional(checks.integer(_RANGE, 1, _MOST_ELEMENTS))


def sent_of(density: float, size: int) -> int:
  """Returns the number of elements to send: ``density * size``, rounded up."""
  # A share like 0.001 is no binary fraction. Its excess must not count as an element.
  return max(1, min(size, math.ceil(density * size * (1 - 2.0**-40))))
