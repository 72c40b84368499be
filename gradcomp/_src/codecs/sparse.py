"""Protocols of sparse codecs, which send some of the elements, and their helpers."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self, cast, runtime_checkable

import jax
import jax.numpy as jnp

from gradcomp._src.checks import static_integer, static_number
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.row_codec import RowCodec
from gradcomp._src.codecs.sums.records import Context, Leaf, Payload
from gradcomp._src.codecs.tiles import decode_payload
from gradcomp._src.kernels.common import sparse

_MOST_ELEMENTS = 1 << 30  # of a row: int32 counts twice as many


@runtime_checkable
class DroppingCodec(Codec, Protocol):
  """A codec that sends some of a row's elements, and zero for all others.

  Its rows are tiles of one size, which are added as those of other codecs.
  """

  @property
  def density(self) -> float:
    """The share of the elements that is sent."""

  @property
  def slots(self) -> int:
    """The number of entries that a row has room for."""

  def entries(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the positions and values of rows, ``uint32[..., words]``.

    Returns:
      ``int32[..., slots]`` positions, which are ``tile_size`` or more in slots that are
      not used, and ``float32[..., slots]`` values.
    """


@runtime_checkable
class SparseCodec(DroppingCodec, Protocol):
  """A codec that drops elements, with entries that are added one by one.

  A row is a range of a leaf: all of it where every worker receives every payload, an
  Nth where workers own ranges.
  """

  def ranged(self, size: int, ranges: int) -> "SparseCodec":
    """Returns the codec of leaves of ``size`` elements in ``ranges`` ranges."""


class Selected(NamedTuple):
  """The codec state of a selecting codec: a threshold and a count for each row.

  Attributes:
    threshold: ``float32[rows]``, the smallest magnitude sent at the last search.
    used: ``int32[rows]``, the entries sent in this step.
  """

  threshold: jax.Array
  used: jax.Array


@runtime_checkable
class SelectingCodec(SparseCodec, Protocol):
  """A sparse codec that chooses elements by their values, on each worker by itself.

  The context holds what else the choice depends on: with ``reuses`` thresholds,
  ``float32[rows]``, 0 for none; with ``alternates`` the :meth:`turn`.
  """

  @property
  def reuses(self) -> bool:
    """True if thresholds are used again for ``search_every`` steps."""

  @property
  def alternates(self) -> bool:
    """True if a step sends only positive or only negative elements, in turn."""

  @property
  def search_every(self) -> int:
    """The number of steps from one search for a threshold to the next."""

  def encode_leaves(
    self, leaves: Sequence[jax.Array], contexts: Sequence[Context]
  ) -> list[tuple[jax.Array, jax.Array, Selected]]:
    """Encodes leaves of one size as ``encode_with_residual`` does, by one program.

    Returns:
      For each leaf its rows, ``uint32[rows, words]``, its residual, and its state.
    """

  def turn(self, step: jax.Array) -> jax.Array:
    """Returns the sign to send in a step, 1 or -1: ``float32[]``."""


@runtime_checkable
class LinearCodec(SparseCodec, Protocol):
  """A sparse codec with payloads that can be added as floats.

  All workers send the same elements, so that their values add up to the gradients' sum
  there.
  """

  @property
  def header_words(self) -> int:
    """The number of words in front of a row's values, equal on all workers."""

  def header(self, key: jax.Array, rows: int) -> jax.Array:
    """Returns the headers of a key's rows: ``uint32[rows, header_words]``."""


class SparseRows(RowCodec):
  """A base of sparse codecs: a dataclass with a ``density`` and a ``range_size``."""

  density: float
  range_size: int | None

  @property
  def tile_size(self) -> int:
    return self.range_size or 0  # 0 until bind knows the leaf

  def bind(self, leaf: Leaf) -> Codec:
    """Returns the codec of a leaf's ranges; ``Dense()`` if all elements are sent."""
    if self.density == 1:
      return Dense()
    return cast(Codec, self.ranged(leaf.size, leaf.ranges))

  def ranged(self, size: int, ranges: int = 1) -> Self:
    """Returns the codec of leaves of ``size`` elements in ``ranges`` ranges."""
    if self.range_size is not None:
      return self
    return dataclasses.replace(self, range_size=range_of(size, ranges))  # type: ignore[type-var]

  def decode(self, payload: Payload, *, like: jax.Array) -> jax.Array:
    """Decodes a payload to the shape and dtype of ``like``."""
    return decode_payload(payload, like, cast(Codec, self.ranged(like.size)))

  def decode_rows(self, rows: jax.Array) -> jax.Array:
    return decode_sparse_rows(cast(SparseCodec, self), rows)


def checked_density(value: Any) -> float:
  """Returns a valid density; raises ValueError for other numbers, and for arrays."""
  rule = "a share of the elements, above 0 and at most 1"
  if isinstance(value, jax.Array):
    raise ValueError(
      f"`density` must be {rule}, and known when a program is traced, got an array; "
      "change it by steps with gradcomp.wrappers.switch."
    )
  density = static_number("density", rule, value)
  if density > 1:
    raise ValueError(f"`density` must be {rule}, got {value!r}.")
  return density


def checked_range(value: Any) -> int | None:
  """Returns a valid number of elements of a row, or None; else raises ValueError."""
  if value is None:
    return None
  rule = f"a number of elements from 1 to {_MOST_ELEMENTS}, or None for whole leaves"
  size = static_integer("range_size", rule, value)
  if not 1 <= size <= _MOST_ELEMENTS:
    raise ValueError(f"`range_size` must be {rule}, got {size}.")
  return size


def range_of(size: int, ranges: int) -> int:
  """Returns the number of elements of a range.

  Positions are counted in 32 bits. So a leaf of more elements is cut into 2, 4, 8, ...
  times as many ranges, until none is longer than 2**30.

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


@functools.partial(jax.jit, static_argnums=(0, 3))  # leaves of a shape: traced once
def sum_entries(
  codec: DroppingCodec, positions: jax.Array, values: jax.Array, scale: float
) -> jax.Array:
  """Adds the entries of K payloads, ``[K, rows, slots]``: ``float32[rows, 1, n]``.

  Example:
    >>> codec = gradcomp.codecs.TopK(density=0.5, range_size=4)
    >>> positions = jnp.array([[[1, 2]], [[1, 3]]])
    >>> sum_entries(codec, positions, jnp.ones((2, 1, 2)), 0.5)
    Array([[[0. , 1. , 0.5, 0.5]]], dtype=float32)
  """
  shape = (positions.shape[1], codec.tile_size)
  return sparse.add_entries(shape, positions, values, scale)[:, None]


@functools.partial(jax.jit, static_argnums=(0, 2))
def sent_positions(codec: DroppingCodec, rows: jax.Array, size: int) -> jax.Array:
  """Returns the positions in a flat leaf of its nonzero entries: ``int32[entries]``.

  Entries that send nothing are at ``size``, behind the leaf. Positions in a leaf of
  2**31 elements or more do not fit, so there it returns a mask: ``bool[size]``.

  Example:
    >>> codec = gradcomp.codecs.TopK(density=0.5, range_size=4)
    >>> rows = codec.encode(jnp.array([3.0, 0.0, 0.0, -2.0])).rows
    >>> sorted(sent_positions(codec, rows, 4).tolist())
    [0, 3]
  """
  positions, values = codec.entries(rows)
  used = (positions < codec.tile_size) & (values != 0)
  if size >= sparse.COUNTED:
    parts = positions[None], used[None].astype(jnp.float32)
    return sum_entries(codec, *parts, 1.0).reshape(-1)[:size] > 0
  start = codec.tile_size * jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
  return jnp.where(used, start + positions, size).reshape(-1)


def decode_sparse_rows(codec: SparseCodec, rows: jax.Array) -> jax.Array:
  """Decodes row by row: ``uint32[..., words]`` to ``float32[..., 1, elements]``."""
  positions, values = codec.entries(rows.reshape(1, -1, codec.row_words))
  dense = sum_entries(codec, positions, values, 1.0)
  return dense.reshape(*rows.shape[:-1], 1, codec.tile_size)
