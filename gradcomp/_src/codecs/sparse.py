"""Sparse codecs: their rows of entries, and the checks of their fields."""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from gradcomp._src import checks, public
from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Encoded, Leaf
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.kernels import materialize, selection
from gradcomp._src.kernels.common import sparse
from gradcomp._src.kernels.common.scales import sum_by_halves

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


def _is_negative(values: Array) -> Array:
  """Returns True where the sign bit is set, also of zeros and NaN."""
  return jax.lax.bitcast_convert_type(values, jnp.uint32) >> 31 == 1


def _mean(values: Array, used: Array) -> Array:
  """Returns the mean of the used values, added in one order in every mode."""
  count = jnp.maximum(used.sum(dtype=jnp.int32), 1).astype(jnp.float32)
  # A power of two first, so that no sum overflows. No compiler changes such products,
  # because they are exact.
  scale = 2.0 ** -values.size.bit_length()
  return sum_by_halves(values * np.float32(scale)) / count * np.float32(1 / scale)


def _float_words(values: Array) -> Array:
  if values.dtype == jnp.float32:
    return jax.lax.bitcast_convert_type(values, jnp.uint32)
  narrow = jax.lax.bitcast_convert_type(values, jnp.uint16)
  return sparse.pack_halves(narrow.astype(jnp.uint32))


class EntryRows(SparseRows):
  """A base of codecs with entries in rows: ends and places in blocks, and values."""

  quantize: Quantize | None
  dtype: DTypeLike

  @property
  def row_words(self) -> int:
    halves = sparse.half_words(self.slots)
    values = self.slots if np.dtype(self.dtype).itemsize == 4 else halves
    means = {None: values, "asq": 1, "mean": 2}
    return self._blocks + halves + means[self.quantize]

  @abc.abstractmethod
  def select(self, x: selection.RowView, given: Array | None) -> Array:
    """Returns positions, ``int32[slots]``, by a threshold, a sign, or None."""

  def pack(self, positions: Array, values: Array) -> tuple[Array, Array]:
    """Packs positions and values of slots; returns words and decoded values."""
    used = positions < self.tile_size
    code = jnp.where(used, positions % self._block, 0).astype(jnp.uint32)
    if self.quantize == "mean":
      code = code | (_is_negative(values).astype(jnp.uint32) * self._block)
    tail, sent = self._pack_values(values, used)
    ends = sparse.block_ends(positions, self.tile_size, self._block)
    return jnp.concatenate([ends, sparse.pack_halves(code), tail]), sent

  def _pack_values(self, values: Array, used: Array) -> tuple[Array, Array]:
    """Packs values; returns words and decoded values."""
    if self.quantize is None:
      narrow = fitted(values, self.dtype)
      return _float_words(narrow), narrow.astype(jnp.float32)
    negative = _is_negative(values)
    groups = [used] if self.quantize == "asq" else [used & ~negative, used & negative]
    means = [_mean(jnp.where(own, values, 0.0), own) for own in groups]
    sent = jnp.where(negative, means[-1], means[0])
    return _float_words(jnp.stack(means)), jnp.where(used, sent, 0.0)

  def entries(self, rows: Array) -> tuple[Array, Array]:
    flat = jax.vmap(self._unpack)(rows.reshape(-1, self.row_words))
    positions, values = (x.reshape(*rows.shape[:-1], self.slots) for x in flat)
    return positions, values

  def _unpack(self, row: Array) -> tuple[Array, Array]:
    """Unpacks ``uint32[words]`` to ``int32`` positions and ``float32`` values."""
    ends, rest = row[: self._blocks], row[self._blocks :]
    half = sparse.half_words(self.slots)
    code = sparse.unpack_halves(rest[:half], self.slots)
    used = jnp.arange(self.slots, dtype=jnp.int32) < ends[-1].astype(jnp.int32)
    within = (code % self._block).astype(jnp.int32)
    positions = sparse.slot_blocks(ends, self.slots) * self._block + within
    negative = code >= self._block
    values = self._unpack_values(rest[half:], negative)
    return jnp.where(used, positions, self.tile_size), jnp.where(used, values, 0.0)

  def _unpack_values(self, words: Array, negative: Array) -> Array:
    """Unpacks values, undefined in unused slots; ``negative`` chooses among means."""
    if self.quantize is None and np.dtype(self.dtype).itemsize == 2:
      narrow = sparse.unpack_halves(words, self.slots).astype(jnp.uint16)
      floats = jax.lax.bitcast_convert_type(narrow, self.dtype)
      return floats.astype(jnp.float32)
    floats = jax.lax.bitcast_convert_type(words, jnp.float32)
    return jnp.where(negative, floats[-1], floats[0]) if self.quantize else floats

  def used(self, rows: Array) -> Array:
    """Counts the entries of each row, ``uint32[..., words]``: ``int32[...]``."""
    return rows[..., self._blocks - 1].astype(jnp.int32)

  @property
  def _block(self) -> int:
    """The elements of a block; with ``"mean"``, one of 16 bits is the sign."""
    return sparse.BLOCK // 2 if self.quantize == "mean" else sparse.BLOCK

  @property
  def _blocks(self) -> int:
    return -(-self.tile_size // self._block)


class Selected(NamedTuple):
  """The codec state of a selection: the threshold and the count of each row."""

  threshold: Array  # float32[rows], the smallest magnitude of the last search
  used: Array  # int32[rows], the entries sent in this step


class SelectedEntries(NamedTuple):
  """The entries of one row, and the residual that they leave."""

  words: Array  # uint32[words]
  positions: Array  # int32[slots], the row's size in slots that are not used
  sent: Array  # float32[slots], the decoded values there
  unsent: Array  # float32[slots], the values there less the decoded values
  rest: Array | None  # float32[n], the residual of the row, if it was copied


def encode_leaves(
  codec: EntryRows,
  leaves: Sequence[Array],
  matrices: Sequence[Array],
  given: Sequence[Array | None],
) -> list[Encoded]:
  """Encodes leaves of one size, given their rows and thresholds or turns."""
  size, count = leaves[0].size, len(matrices[0])
  every = encode_rows(codec, matrices, given, copied=size <= selection.COPIED)
  # Of all leaves at once: leaf by leaf, there would be several programs for each.
  used = every.positions < codec.tile_size
  smallest = jnp.where(used, jnp.abs(every.sent), jnp.inf).min(axis=1, initial=jnp.inf)
  threshold = jnp.where(jnp.isfinite(smallest), smallest, 0.0)
  selected = Selected(threshold, codec.used(every.words))
  chosen = None
  if size < sparse.COUNTED:
    row = jnp.tile(jnp.arange(count, dtype=jnp.int32), len(leaves))
    start = codec.tile_size * row
    nonzero = used & (every.sent != 0)
    chosen = jnp.where(nonzero, start[:, None] + every.positions, size)
  starts = materialize.unknown([i * count for i in range(len(leaves))], every.words)
  result = []
  for at, leaf, matrix in zip(starts, leaves, matrices, strict=True):
    own, kept, places = jax.tree.map(
      lambda x, at=at: materialize.slice_at(x, at, count), (every, selected, chosen)
    )
    rest = _rest(leaf, matrix, own, len(leaves) > 1)
    entries = None if places is None else (places.reshape(-1), own.unsent.reshape(-1))
    result.append(Encoded(own.words, rest, kept, *(entries or ())))
  return result


def encode_rows(
  codec: EntryRows,
  matrices: Sequence[Array],
  given: Sequence[Array | None],
  *,
  copied: bool = False,
) -> SelectedEntries:
  """Encodes rows of matrices of one shape; ``copied`` ones share a program of XLA."""
  count = matrices[0].shape[0]
  total = count * len(matrices)
  if not total:
    empty = jnp.zeros((0, codec.slots), jnp.float32)
    words = jnp.zeros((0, codec.row_words), jnp.uint32)
    rest = jnp.zeros((0, codec.tile_size), jnp.float32)
    return SelectedEntries(words, empty.astype(jnp.int32), empty, empty, rest)
  lines = [jnp.broadcast_to(x, (count,)) for x in given if x is not None]
  every = jnp.concatenate(lines) if lines else None

  views = [matrices[0].reshape(-1)] if total == 1 else matrices

  def encode(number: Array) -> SelectedEntries:
    row = selection.RowView(views, number)
    if copied:
      row = row.copied()
    positions = codec.select(row, None if every is None else every[number])
    values = row.at(positions)
    words, sent = codec.pack(positions, values)
    unsent, rest = values - sent, None
    if copied:
      place = row.read(lambda x: x).at[positions]
      rest = place.set(unsent, mode="drop", unique_indices=True)
    return SelectedEntries(words, positions, sent, unsent, rest)

  if total == 1:
    return jax.tree.map(lambda x: x[None], encode(jnp.int32(0)))
  return jax.lax.map(encode, jnp.arange(total, dtype=jnp.int32))


@functools.partial(jax.jit, static_argnums=3)  # leaves of a shape: traced once
def _rest(leaf: Array, matrix: Array, own: SelectedEntries, together: bool) -> Array:
  """Returns the residual of a leaf, from the unsent values of its entries."""
  rest = own.rest
  if rest is None:
    place: tuple[Array, ...] = (own.positions,)
    lost = own.unsent
    # Written into the array that was read, so that XLA does not hold the leaf twice: of
    # one leaf with one row a flat array, of several leaves their matrices.
    if len(matrix) == 1 and not together:
      matrix, place, lost = jax.tree.map(lambda x: x[0], (matrix, place, lost))
    else:
      place = (jnp.arange(len(matrix))[:, None], *place)
    rest = matrix.at[place].set(
      lost, mode="drop", unique_indices=True, wrap_negative_indices=False
    )
  return rest.reshape(-1)[: leaf.size].reshape(leaf.shape)
