"""What sparse codecs are: those that send some elements, and all of each."""

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from gradcomp._checks import static_integer, static_number
from gradcomp.codecs._codec import Codec
from gradcomp.kernels import sparse

_MOST_ELEMENTS = 1 << 30  # of a row: positions are int32


@runtime_checkable
class SparseCodec(Codec, Protocol):
  """A codec that sends some of a row's elements, and zero for all others.

  A row is a range of a leaf: all of it where every worker receives every payload, an
  Nth where workers own ranges.
  """

  @property
  def density(self) -> float:
    """The share of the elements that is sent."""

  @property
  def slots(self) -> int:
    """Entries that a row has room for."""

  def for_leaf(self, size: int, ranges: int) -> "SparseCodec":
    """The codec of leaves of so many elements, cut into so many ranges."""

  def entries(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions and values: ``uint32[..., words]`` to ``int32`` and ``float32[...,
    slots]``. Positions of slots that are not used are ``tile_size`` or more."""


@runtime_checkable
class SelectingCodec(SparseCodec, Protocol):
  """A sparse codec that chooses elements by their values, each worker its own.

  ``encode`` and ``encode_rows`` take as ``stats`` what the choice depends on besides
  the values: ``float32[rows]`` thresholds of a codec with ``reuses``, 0 for none; the
  :meth:`turn` of one with ``alternates``.
  """

  @property
  def reuses(self) -> bool:
    """Whether thresholds are used again for ``interval`` steps."""

  @property
  def alternates(self) -> bool:
    """Whether signs take turns."""

  @property
  def interval(self) -> int:
    """Steps from one search for a threshold to the next."""

  def encode_leaves(
    self, leaves: Sequence[jax.Array], stats: Sequence[jax.Array | None]
  ) -> list[tuple[jax.Array, jax.Array]]:
    """``encode_with_residual`` of leaves of one size, by one program for all.

    Args:
      leaves: ``float32``.
      stats: of each.

    Returns:
      Of each its rows, and what is not sent.
    """

  def turn(self, step: jax.Array) -> jax.Array:
    """``float32[]``: the sign whose turn it is, 1 or -1."""

  def used(self, rows: jax.Array) -> jax.Array:
    """Entries of each row: ``uint32[rows, words]`` to ``int32[rows]``."""

  def thresholds(self, rows: jax.Array) -> jax.Array:
    """The smallest magnitude that each row sends: ``float32[rows]``."""


@runtime_checkable
class LinearCodec(SparseCodec, Protocol):
  """A sparse codec whose payloads can be added as floats.

  All workers send the same elements, so that the sum of their values is that of their
  gradients there.
  """

  @property
  def header_words(self) -> int:
    """Words in front of a row's values, the same for all workers."""

  def header(self, key: jax.Array, rows: int) -> jax.Array:
    """Those of the rows that a key encodes: ``uint32[rows, header_words]``."""


def checked_density(value: Any) -> float:
  """A share of all elements; ValueError for what is none."""
  rule = "a share of the elements, above 0 and at most 1"
  if isinstance(value, jax.Array):
    raise ValueError(
      f"`density` must be {rule}, and known when a program is traced, got an array; "
      "change it by steps with gradcomp.switch."
    )
  density = static_number("density", rule, value)
  if density > 1:
    raise ValueError(f"`density` must be {rule}, got {value!r}.")
  return density


def checked_range(value: Any) -> int | None:
  """The elements of a row, or None; ValueError for anything else."""
  if value is None:
    return None
  rule = f"a number of elements from 1 to {_MOST_ELEMENTS}, or None for whole leaves"
  size = static_integer("range_size", rule, value)
  if not 1 <= size <= _MOST_ELEMENTS:
    raise ValueError(f"`range_size` must be {rule}, got {size}.")
  return size


def range_of(size: int, ranges: int) -> int:
  """Elements of a range; ValueError for a leaf that is too large for positions."""
  if size > _MOST_ELEMENTS:
    raise ValueError(
      f"`x` must have at most {_MOST_ELEMENTS} elements, got {size}; leave the leaf to "
      "another codec with optax.partition."
    )
  return max(1, -(-size // ranges))


def sent_of(density: float, size: int) -> int:
  """How many of so many elements are sent: at least one, rounded up.

  Example:
    >>> sent_of(0.001, 1000), sent_of(0.001, 1001), sent_of(0.001, 5)
    (1, 2, 1)
  """
  # A share like 0.001 is no binary fraction: what it exceeds by is no element.
  return max(1, min(size, math.ceil(density * size * (1 - 2.0**-40))))


def sum_entries(
  codec: SparseCodec, positions: jax.Array, values: jax.Array, scale: float
) -> jax.Array:
  """The sum of K payloads times ``scale``: ``float32[rows, 1, elements]``.

  Args:
    codec: of the rows.
    positions: ``int32[K, rows, slots]``.
    values: ``float32[K, rows, slots]``.
    scale: of each value.
  """
  shape = (positions.shape[1], codec.tile_size)
  return sparse.add_entries(shape, positions, values, scale)[:, None]


def decode_sparse_rows(codec: SparseCodec, rows: jax.Array) -> jax.Array:
  """Each row alone: ``uint32[..., words]`` to ``float32[..., 1, elements]``."""
  positions, values = codec.entries(rows.reshape(1, -1, codec.row_words))
  dense = sum_entries(codec, positions, values, 1.0)
  return dense.reshape(*rows.shape[:-1], 1, codec.tile_size)
