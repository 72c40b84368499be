"""Top-k: sends the elements of largest magnitude, with positions of 16 bits."""

import dataclasses
import functools
import math
import sys
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from gradcomp._src import checks
from gradcomp._src.codecs import protocol, sparse
from gradcomp._src.codecs.sparse import Quantize, Selection
from gradcomp._src.codecs.sums.records import Context, Encoded, Leaf, Memory
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.codecs.sums.tiles import OF_BLOCKS, Entries
from gradcomp._src.floats.dtypes import fitted, limit_of
from gradcomp._src.kernels import materialize
from gradcomp._src.kernels.common import sparse as sparse_rows
from gradcomp._src.kernels.common.scales import sum_by_halves
from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.selection import COPIED, RowView, select

_SMALL = 1 << 15  # Fang 2018, sections 2.1 and 3.1: 128 KB of float32
# From this size on up to twice the needed elements are sent, which is no large message.
_LARGE = 1 << 20


# Of rows: their words; int32 positions, the row's size in slots that are not used; the
# decoded values there; the values there less these; and the residual of a copied row.
_Entries = tuple[Array, Array, Array, Array, Array | None]


class Selected(NamedTuple):
  """The codec state of a selection: the threshold and the count of each row."""

  threshold: Array  # float32[rows], the smallest magnitude of the last search
  used: Array  # int32[rows], the entries sent in this step


def _mean(values: Array, used: Array) -> Array:
  """Returns the mean of the used values, added in one order in every mode."""
  count = jnp.maximum(used.sum(dtype=jnp.int32), 1).astype(jnp.float32)
  # A power of two first, so that no sum overflows. No compiler changes such products,
  # because they are exact.
  scale = 2.0 ** -values.size.bit_length()
  return sum_by_halves(values * np.float32(scale)) / count * np.float32(1 / scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(sparse.SparseRows):
  r"""Sends the ``k = ceil(density * n)`` elements of largest magnitude of each leaf.

  .. math:: Q(v)_i = v_i \text{ if } |v_i| \ge t, \quad 0 \text{ otherwise}

  where :math:`t` is the threshold that the selection finds:

  ==============  ==================================================================
  ``selection``   the elements that are sent
  ==============  ==================================================================
  ``exact``       the k largest, by sorting: ``jax.lax.top_k``. k slots
  ``trimmed``     the k largest of those that reach a threshold. k slots
  ``threshold``   all that reach a threshold which k to ``slack * k`` elements reach
  ``sampled``     the same, with the threshold of up to ``search_every`` steps before
  ``auto``        ``exact`` below 128 KB of float32, ``trimmed`` below 4 MB, else
                  ``threshold``
  ==============  ==================================================================

  Bisection finds the threshold on a sample of the leaf, and one pass over the leaf
  confirms it, unless the sample misled the search. (The paper reads the leaf for each
  step of bisection; it sends the same elements.) Where equal elements allow no such
  threshold, the larger ones are sent, and enough equal ones to make k. A ``sampled``
  threshold that more elements reach than there are slots is searched anew: no element
  is left out because of its place.

  A payload has a position of 16 bits and a value for each of ``slots`` entries, and 4
  bytes for each block of 65,536 elements (32,768 with ``"mean"``). The codec is biased:
  without feedback, unsent elements are lost. Non-finite elements are the largest of
  all, and are sent as they are; with a quantizer they spoil the mean.

  Attributes:
    density: the share of the elements to send, k / n, above 0 and at most 1; 1 for the
      dense exchange. Default: 0.001.
    selection: the way to select: ``"auto"``, ``"exact"``, ``"trimmed"``,
      ``"threshold"`` or ``"sampled"``, see :class:`gradcomp.codecs.TopK`. Default:
      ``"auto"``.
    quantize: ``"asq"`` sends one mean in place of the values: positive and negative
      elements take turns from step to step. ``"mean"`` (Strom) sends both signs, with a
      mean each. None sends the values. Keep the output layer out of quantization, by
      ``optax.partition``. Default: None.
    dtype: the type of values on the wire: ``float32``, ``bfloat16`` or ``float16``. The
      residual keeps the rounding error, and the excess over the largest number.
      ``hierarchical``, which sends sums, refuses ``float16``. Default: ``float32``.
    slack: slots for each of the k elements in ``threshold`` and ``sampled``, from 1 to
      2. A smaller number lets more samples mislead, each of which costs a pass.
      Default: 2.0.
    search_every: steps that use one ``sampled`` threshold, 1 or more. Default: 5.
    range_size: n, the consecutive elements of a row, from 1 to 2**30. None for whole
      leaves, for an Nth where workers own ranges, and for 2, 4, 8, ... times as many
      parts where these are longer. Default: None.
    implementation: the code that counts and marks elements, except with ``exact``; see
      :class:`gradcomp.codecs.Codec`. Default: None.

  Raises:
    ValueError: a hyperparameter is outside these, or a quantizer goes with ``sampled``
      or a 16-bit ``dtype``.

  Example:
    >>> codec = TopK(density=0.25)
    >>> x = jnp.array([1.0, -5.0, 0.5, 2.0])
    >>> codec.roundtrip(x)
    Array([ 0., -5.,  0.,  0.], dtype=float32)

  References:
    Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_, 2018, sections 2.1 and
    2.2; Strom, `Scalable distributed DNN training
    <https://www.isca-archive.org/interspeech_2015/strom15_interspeech.html>`_, 2015
  """

  density: float = checks.field(0.001, sparse.DENSITY)
  selection: Selection = checks.field("auto", checks.choice(Selection))
  quantize: Quantize | None = checks.field(None, checks.choice(Quantize, none=True))
  dtype: DTypeLike = checks.field(jnp.float32, checks.FLOAT_DTYPE)
  slack: float = checks.field(2.0, checks.number("a number from 1 to 2", 1, 2))
  search_every: int = checks.field(5, checks.STEPS)
  range_size: int | None = checks.field(None, sparse.RANGE)
  implementation: dispatch.Implementation | None = checks.field(None, dispatch.RULE)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.quantize is not None and self.selection == "sampled":
      raise ValueError(
        f'`selection` must not be "sampled" with quantize={self.quantize!r}: the '
        'threshold of one step does not suit the next one; take "threshold".'
      )
    if self.quantize is not None and self.dtype != jnp.float32:
      raise ValueError(
        f"`dtype` must be float32 with quantize={self.quantize!r}, which sends means "
        f"alone, got {self.dtype}."
      )

  @property
  def contraction(self) -> float:
    return self.density

  @property
  def sums(self) -> Sum:
    why = ""
    if self.dtype == jnp.float16:
      why = "float16 values, got {codec}: sums of groups may exceed the largest one; "
      why += "use dtype=jnp.bfloat16."
    elif self.selection == "sampled":
      why = "a codec that uses thresholds again, got {codec}: sums of groups have "
      why += 'other thresholds; use selection="auto".'
    return Entries(self, facts=OF_BLOCKS.refusing({"grouped": why} if why else {}))

  @property
  def papers(self) -> tuple[str, ...]:
    means = ("strom2015scalable",) if self.quantize == "mean" else ()
    return ("stich2018memory", "fang2018redsync", *means)

  @property
  def largest(self) -> float | None:
    return limit_of(self.dtype)

  @property
  def slots(self) -> int:
    sent = sparse.sent_of(self.density, self.tile_size)
    few = self.method in ("exact", "trimmed")
    return sent if few else min(self.tile_size, int(self.slack * sent))

  @property
  def method(self) -> Selection:
    """The selection of a row of this size, which is never ``"auto"``."""
    if self.selection != "auto":
      return self.selection
    if self.tile_size < _SMALL:
      return "exact"
    return "trimmed" if self.tile_size < _LARGE else "threshold"

  @property
  def row_words(self) -> int:
    halves = sparse_rows.half_words(self.slots)
    values = self.slots if np.dtype(self.dtype).itemsize == 4 else halves
    means = {None: values, "asq": 1, "mean": 2}
    return self._blocks + halves + means[self.quantize]

  def init(self, leaf: Leaf, key: Array) -> Memory:
    rows = -(-leaf.size // self.tile_size) if leaf.size else 0
    none = jnp.zeros(rows, jnp.float32)
    return Memory(own=Selected(none, jnp.zeros(rows, jnp.int32)))

  def used_entries(self, memory: Memory) -> Array | None:
    return memory.own.used if memory.own else None

  def encode_leaf(self, x: Array, context: Context, *, keep: bool = False) -> Encoded:
    return self.encode_several([x], [context], None)[0]

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    matrices, given = [tiles.reshape(-1, self.tile_size)], [self._given(context)]
    return self._encode(matrices, given)[0]

  def joins(self, shape: tuple[int, ...]) -> tuple[Hashable, int]:
    """Lets one program encode all leaves of a size, where they lie."""
    return math.prod(shape), sys.maxsize

  def encode_several(
    self, leaves: Sequence[Array], contexts: Sequence[Context], after: Array | None
  ) -> list[Encoded]:
    matrices = [protocol.to_tiles(leaf, self) for leaf in leaves]
    given = [self._given(context) for context in contexts]
    size, count = leaves[0].size, len(matrices[0])
    every = self._encode(matrices, given, copied=size <= COPIED)
    # Of all leaves at once: leaf by leaf, there would be several programs for each.
    words, positions, sent, *_ = every
    used = positions < self.tile_size
    smallest = jnp.where(used, jnp.abs(sent), jnp.inf).min(axis=1, initial=jnp.inf)
    threshold = jnp.where(jnp.isfinite(smallest), smallest, 0.0)
    selected, chosen = Selected(threshold, self.used(words)), None
    if size < sparse_rows.COUNTED:
      row = jnp.tile(jnp.arange(count, dtype=jnp.int32), len(leaves))
      start, nonzero = self.tile_size * row, used & (sent != 0)
      chosen = jnp.where(nonzero, start[:, None] + positions, size)
    starts = materialize.unknown([i * count for i in range(len(leaves))], words)
    result = []
    for at, leaf, matrix, old in zip(starts, leaves, matrices, given, strict=True):
      own, kept, places = jax.tree.map(
        lambda x, at=at: materialize.slice_at(x, at, count), (every, selected, chosen)
      )
      rest = _rest(leaf, matrix, own, len(leaves) > 1)
      entries = () if places is None else (places.reshape(-1), own[3].reshape(-1))
      if self.selection == "sampled" and old is not None:
        kept = kept._replace(threshold=jnp.where(old > 0, old, kept.threshold))
      result.append(Encoded(own[0], rest, kept, *entries))
    return result

  def _encode(
    self,
    matrices: Sequence[Array],
    given: Sequence[Array | None],
    *,
    copied: bool = False,
  ) -> _Entries:
    """Encodes rows of matrices of one shape; ``copied`` ones share a program of XLA."""
    count = matrices[0].shape[0]
    total = count * len(matrices)
    if not total:
      empty = jnp.zeros((0, self.slots), jnp.float32)
      words = jnp.zeros((0, self.row_words), jnp.uint32)
      rest = jnp.zeros((0, self.tile_size), jnp.float32)
      return words, empty.astype(jnp.int32), empty, empty, rest
    lines = [jnp.broadcast_to(x, (count,)) for x in given if x is not None]
    every = jnp.concatenate(lines) if lines else None
    views = [matrices[0].reshape(-1)] if total == 1 else matrices

    def encode(number: Array) -> _Entries:
      row = RowView(views, number)
      if copied:
        row = row.copied()
      positions = self.select(row, None if every is None else every[number])
      values = row.at(positions)
      words, sent = self.pack(positions, values)
      unsent, rest = values - sent, None
      if copied:
        place = row.read(lambda x: x).at[positions]
        rest = place.set(unsent, mode="drop", unique_indices=True)
      return words, positions, sent, unsent, rest

    if total == 1:
      return jax.tree.map(lambda x: x[None], encode(jnp.int32(0)))
    return jax.lax.map(encode, jnp.arange(total, dtype=jnp.int32))

  def _given(self, context: Context) -> Array | None:
    """Returns the thresholds to try first, the sign to send in this step, or None."""
    step, memory = context.step, context.memory
    if self.quantize == "asq":
      if step is None:
        return None
      return jnp.where(step % 2 == 0, 1.0, -1.0).astype(jnp.float32)
    sampled = self.selection == "sampled"
    if not sampled or step is None or memory is None or memory.own is None:
      return None
    if not memory.own:
      raise ValueError(
        f"`memory` must hold the thresholds of the last search of {self}, got none; "
        "make the state by optimizer.init."
      )
    # Zeros have a threshold searched anew.
    return jnp.where(step % self.search_every != 0, memory.own.threshold, 0.0)

  def select(self, x: RowView, given: Array | None) -> Array:
    """Returns positions, ``int32[slots]``, by a threshold, a sign, or None."""
    sign, sent = None, sparse.sent_of(self.density, x.size)
    if self.quantize == "asq":
      sign = jnp.float32(1) if given is None else given
    return select(
      x,
      self.method,
      (sent, min(x.size, 2 * sent) if self.method == "trimmed" else self.slots),
      sign=sign,
      first=given if self.selection == "sampled" else None,
      implementation=self.implementation,
    )

  def pack(self, positions: Array, values: Array) -> tuple[Array, Array]:
    """Packs positions and values of slots; returns words and decoded values."""
    used = positions < self.tile_size
    code = jnp.where(used, positions % self._block, 0).astype(jnp.uint32)
    # Where the sign bit is set, also of zeros and NaN.
    negative = jax.lax.bitcast_convert_type(values, jnp.uint32) >> 31 == 1
    if self.quantize == "mean":
      code = code | (negative.astype(jnp.uint32) * self._block)
    if self.quantize is None:
      numbers = fitted(values, self.dtype)
      sent = numbers.astype(jnp.float32)
    else:
      groups = [used] if self.quantize == "asq" else [used & ~negative, used & negative]
      means = [_mean(jnp.where(own, values, 0.0), own) for own in groups]
      numbers = jnp.stack(means)
      sent = jnp.where(used, jnp.where(negative, means[-1], means[0]), 0.0)
    if numbers.dtype == jnp.float32:
      tail = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    else:
      halves = jax.lax.bitcast_convert_type(numbers, jnp.uint16)
      tail = sparse_rows.pack_halves(halves.astype(jnp.uint32))
    ends = sparse_rows.block_ends(positions, self.tile_size, self._block)
    return jnp.concatenate([ends, sparse_rows.pack_halves(code), tail]), sent

  def entries(self, rows: Array) -> tuple[Array, Array]:
    flat = jax.vmap(self._unpack)(rows.reshape(-1, self.row_words))
    positions, values = (x.reshape(*rows.shape[:-1], self.slots) for x in flat)
    return positions, values

  def _unpack(self, row: Array) -> tuple[Array, Array]:
    """Unpacks ``uint32[words]`` to ``int32`` positions and ``float32`` values."""
    ends, rest = row[: self._blocks], row[self._blocks :]
    half = sparse_rows.half_words(self.slots)
    code = sparse_rows.unpack_halves(rest[:half], self.slots)
    used = jnp.arange(self.slots, dtype=jnp.int32) < ends[-1].astype(jnp.int32)
    within = (code % self._block).astype(jnp.int32)
    positions = sparse_rows.slot_blocks(ends, self.slots) * self._block + within
    if self.quantize is None and np.dtype(self.dtype).itemsize == 2:
      narrow = sparse_rows.unpack_halves(rest[half:], self.slots).astype(jnp.uint16)
      values = jax.lax.bitcast_convert_type(narrow, self.dtype).astype(jnp.float32)
    else:
      values = jax.lax.bitcast_convert_type(rest[half:], jnp.float32)
    if self.quantize:
      values = jnp.where(code >= self._block, values[-1], values[0])
    return jnp.where(used, positions, self.tile_size), jnp.where(used, values, 0.0)

  def used(self, rows: Array) -> Array:
    """Counts the entries of each row, ``uint32[..., words]``: ``int32[...]``."""
    return rows[..., self._blocks - 1].astype(jnp.int32)

  @property
  def _block(self) -> int:
    """The elements of a block; with ``"mean"``, one of 16 bits is the sign."""
    return sparse_rows.BLOCK // 2 if self.quantize == "mean" else sparse_rows.BLOCK

  @property
  def _blocks(self) -> int:
    return -(-self.tile_size // self._block)


@functools.partial(jax.jit, static_argnums=3)  # leaves of a shape: traced once
def _rest(leaf: Array, matrix: Array, own: _Entries, together: bool) -> Array:
  """Returns the residual of a leaf, from the unsent values of its entries."""
  _, positions, _, lost, rest = own
  if rest is None:
    place: tuple[Array, ...] = (positions,)
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
