"""Which leaf travels where: leaves to rows of a few matrices, and back."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp import sums
from gradcomp.codecs import (
  Codec,
  Dense,
  Leaf,
  encode_leaves,
  from_tiles,
  shared_stats,
  to_tiles,
)
from gradcomp.sums import RowDecoder

# Grubic 2018, section 3.2.2: small matrices stay in full precision, as long as more
# than 99 % of all parameters are quantized. Half of that share: 1 % in float32 would
# add 8 % to a 4-bit message.
_DENSE_SHARE = 0.005
_DENSE_SHARE_OF_SPARSE = 0.0001


class Slot(NamedTuple):
  """Where one leaf lies: rows ``[start, stop)`` of one codec's matrix."""

  group: int
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Layout:
  """The static plan of a message: one matrix of rows for each codec.

  Attributes:
    codecs: one for each matrix, in the order of their first leaf.
    slots: one for each leaf.
    like: shape and dtype of each leaf.
  """

  codecs: tuple[Codec, ...]
  slots: tuple[Slot, ...]
  like: tuple[jax.ShapeDtypeStruct, ...]

  @property
  def elements(self) -> int:
    """Elements of all leaves."""
    return sum(like.size for like in self.like)

  @property
  def rows(self) -> list[int]:
    """Rows of each matrix."""
    return [
      max(slot.stop for slot in self.slots if slot.group == group)
      for group in range(len(self.codecs))
    ]

  @property
  def nbytes(self) -> int:
    """Bytes of one payload's rows."""
    words = [codec.row_words for codec in self.codecs]
    return 4 * sum(r * w for r, w in zip(self.rows, words, strict=True))

  def stats(self, leaves: Sequence[jax.Array]) -> list[jax.Array | None]:
    """The statistics of each leaf whose codec shares them, None for others."""
    codecs = [self.codecs[slot.group] for slot in self.slots]
    return list(map(shared_stats, codecs, leaves))

  def row_stats(self, stats: Sequence[jax.Array | None]) -> list[jax.Array | None]:
    """The statistics of each matrix, a line for each row; None where there are none."""
    parts: list[list[jax.Array]] = [[] for _ in self.codecs]
    for stat, slot in zip(stats, self.slots, strict=True):
      if stat is not None:
        shape = (slot.stop - slot.start, stat.shape[1])
        parts[slot.group].append(jnp.broadcast_to(stat, shape))
    return [jnp.concatenate(lines) if lines else None for lines in parts]

  def encode(
    self,
    leaves: Sequence[jax.Array],
    keys: jax.Array | None,
    stats: Sequence[jax.Array | None],
    *,
    keep: bool = False,
  ) -> tuple[list[jax.Array], list[jax.Array | None]]:
    """The matrices of a list of leaves: ``uint32[rows, row_words]`` for each codec.

    Every leaf is encoded by itself and the rows are stacked: flattening the gradient
    in float32 first would cost five times as much.

    Args:
      leaves: arrays as in ``like``.
      keys: ``uint32[leaves, 2]``, or None if no codec needs one.
      stats: for each leaf what its codec encodes with: what workers share, or a memory;
        None for nothing.
      keep: whether to return what is not sent.

    Returns:
      The matrices, and of each leaf what is not sent, float32, where ``keep`` asks for
      it and the codec knows it without decoding; else None.
    """
    codecs = [self.codecs[slot.group] for slot in self.slots]
    encoded = encode_leaves(codecs, leaves, keys, stats, keep=keep)
    parts: list[list[jax.Array]] = [[] for _ in self.codecs]
    for slot, (rows, _) in zip(self.slots, encoded, strict=True):
      parts[slot.group].append(rows)
    return [jnp.concatenate(rows) for rows in parts], [rest for _, rest in encoded]

  def decode(self, decoders: Sequence[RowDecoder]) -> list[jax.Array]:
    """The leaves, in float32, from one decoder for each matrix.

    Rows are cut before they are decoded, so that each leaf is written once.
    """
    return [self.decode_leaf(i, decoders) for i in range(len(self.like))]

  def decode_leaf(
    self, number: int, decoders: Sequence[RowDecoder] | Mapping[int, RowDecoder]
  ) -> jax.Array:
    """One of them, from the decoder of its matrix."""
    group, start, stop = self.slots[number]
    with jax.named_scope("gradcomp_decode"):
      tiles = decoders[group](start, stop)
      return from_tiles(tiles, self.like[number], self.codecs[group])

  def tiles(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """The leaves as ``float32[rows, tile_size]`` for each codec, filled with zeros."""
    parts: list[list[jax.Array]] = [[] for _ in self.codecs]
    for leaf, slot in zip(leaves, self.slots, strict=True):
      parts[slot.group].append(to_tiles(leaf, self.codecs[slot.group]))
    return [jnp.concatenate(rows) for rows in parts]


def plan(
  leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
  codec: Codec,
  *,
  min_leaf_size: int | None = None,
  ranges: int = 1,
  addends: int | None = None,
) -> Layout:
  """Assigns a codec to each leaf: ``codec``, or ``Dense(float32)`` to small leaves.

  A leaf is small if it has fewer than ``min_leaf_size`` elements; by default, if it is
  among the smallest leaves that together hold less than 0.5 % of all elements. A leaf
  also stays dense where its payload would not be smaller (or would be larger, of a
  codec that adds in its own format).

  Example:
    >>> from gradcomp.codecs import QSGD
    >>> leaves = [jnp.zeros(512), jnp.zeros((512, 512))]
    >>> layout = plan(leaves, QSGD(bits=4))
    >>> [type(codec).__name__ for codec in layout.codecs], layout.rows
    (['Dense', 'QSGD'], [4, 64])
  """
  like = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
  if min_leaf_size is None:
    min_leaf_size = default_min_leaf_size([leaf.size for leaf in like], codec)
  codecs: dict[Codec, int] = {}  # each with the rows that it has so far
  slots = []
  for leaf in like:
    chosen = leaf_codec(leaf, codec, min_leaf_size, ranges, addends)
    start = codecs.setdefault(chosen, 0)
    codecs[chosen] += leaf_rows(chosen, leaf)
    slots.append(Slot(list(codecs).index(chosen), start, codecs[chosen]))
  return Layout(tuple(codecs), tuple(slots), like)


def leaf_codec(
  leaf: jax.Array | jax.ShapeDtypeStruct,
  codec: Codec,
  min_leaf_size: int,
  ranges: int = 1,
  addends: int | None = None,
) -> Codec:
  """The codec of one leaf, of which workers own ranges and add numbers."""
  bound = codec.bind(Leaf(leaf.shape, addends, ranges))
  words, dense = (leaf_rows(c, leaf) * c.row_words for c in (bound, Dense()))
  saves = words < dense or (words == dense and sums.of(bound).even_at_par)
  return bound if leaf.size >= min_leaf_size and saves else Dense()


def leaf_rows(codec: Codec, leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
  """The rows that a leaf fills."""
  return -(-leaf.size // codec.tile_size) if leaf.size else 0


def default_min_leaf_size(sizes: Sequence[int], codec: Codec | None = None) -> int:
  """The size from which leaves are compressed: all smaller ones hold less than 0.5 %.

  With a sparse codec, less than 0.01 %, or they would be most of what is sent; whatever
  the density, so that densities can follow one another.

  Example:
    >>> default_min_leaf_size([10, 64, 100_000, 50_000])
    50000
    >>> default_min_leaf_size([300, 300])
    300
  """
  drops = codec is not None and sums.of(codec).drops
  allowed = (_DENSE_SHARE_OF_SPARSE if drops else _DENSE_SHARE) * sum(sizes)
  passed = 0
  for size in sorted(sizes):
    passed += size
    if passed >= allowed:
      return size
  return 0
