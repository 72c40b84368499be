"""Which leaf travels where: leaves to rows of a few matrices, and back."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp import sums
from gradcomp.codecs import (
  Codec,
  Dense,
  Encoded,
  Leaf,
  LeafCodec,
  encode_leaves,
  from_tiles,
  rounds_of,
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
    keys: Sequence[jax.Array | None],
    stats: Sequence[jax.Array | None],
    *,
    keep: bool = False,
  ) -> tuple[list[jax.Array], list[Encoded]]:
    """The matrices of a list of leaves: ``uint32[rows, row_words]`` for each codec.

    Every leaf is encoded by itself and the rows are stacked: flattening the gradient
    in float32 first would cost five times as much.

    Args:
      leaves: arrays as in ``like``.
      keys: for each leaf ``uint32[2]``, or None if its codec needs none.
      stats: for each leaf what its codec encodes with: what workers share, or what is
        remembered; None for nothing.
      keep: whether to return what is not sent.

    Returns:
      The matrices, and what became of each leaf.
    """
    codecs = [self.codecs[slot.group] for slot in self.slots]
    encoded = encode_leaves(codecs, leaves, keys, stats, keep=keep)
    parts: list[list[jax.Array]] = [[] for _ in self.codecs]
    for slot, leaf in zip(self.slots, encoded, strict=True):
      parts[slot.group].append(leaf.rows)
    return [jnp.concatenate(rows) for rows in parts], encoded

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
) -> Layout:
  """Lays out leaves by a codec: see :func:`leaf_codecs`.

  Example:
    >>> from gradcomp.codecs import QSGD
    >>> leaves = [jnp.zeros(512), jnp.zeros((512, 512))]
    >>> layout = plan(leaves, QSGD(bits=4))
    >>> [type(codec).__name__ for codec in layout.codecs], layout.rows
    (['Dense', 'QSGD'], [4, 64])
  """
  places = [Leaf(leaf.shape) for leaf in leaves]
  codecs = leaf_codecs(places, codec, min_leaf_size=min_leaf_size)
  rounds = [
    rounds_of(x, leaf.shape)[-1] for x, leaf in zip(codecs, leaves, strict=True)
  ]
  return arrange(leaves, [x.codec for x in rounds])


def arrange(
  leaves: Sequence[jax.Array | jax.ShapeDtypeStruct], codecs: Sequence[Codec]
) -> Layout:
  """Lays out leaves, of which each has a codec.

  Example:
    >>> dense = gradcomp.codecs.Dense()
    >>> arrange([jnp.zeros(512), jnp.zeros(100)], [dense, dense]).slots
    (Slot(group=0, start=0, stop=4), Slot(group=0, start=4, stop=5))
  """
  like = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
  filled: dict[Codec, int] = {}  # the rows that each codec has so far
  slots = []
  for leaf, codec in zip(like, codecs, strict=True):
    start = filled.setdefault(codec, 0)
    filled[codec] += leaf_rows(codec, leaf)
    slots.append(Slot(list(filled).index(codec), start, filled[codec]))
  return Layout(tuple(filled), tuple(slots), like)


def leaf_codecs(
  leaves: Sequence[Leaf], codec: LeafCodec, *, min_leaf_size: int | None = None
) -> list[LeafCodec]:
  """Binds a codec to each leaf; small leaves get ``Dense(float32)``.

  A leaf is small if it has fewer than ``min_leaf_size`` elements; by default, if it is
  among the smallest leaves that together hold less than 0.5 % of all elements, or 0.01
  % with a sparse codec. A leaf also stays dense where its payload would not be smaller
  (or would be larger, of a codec that adds in its own format).

  Example:
    >>> leaves = [Leaf((512,)), Leaf((512, 512))]
    >>> [type(x).__name__ for x in leaf_codecs(leaves, gradcomp.codecs.OneBit())]
    ['Dense', 'OneBit']
  """
  sizes = [leaf.size for leaf in leaves]
  least = {
    drops: default_min_leaf_size(sizes, drops=drops)
    if min_leaf_size is None
    else min_leaf_size
    for drops in (False, True)
  }
  result = []
  for leaf in leaves:
    bound = codec.bind(leaf)
    total = sums.of(bound)
    rounds = rounds_of(bound, leaf.shape)
    words = sum(_words(x.codec, math.prod(x.shape)) for x in rounds)
    dense = _words(Dense(), leaf.size)
    saves = words < dense or (words == dense and total.even_at_par)
    large = leaf.size >= least[total.drops]
    result.append(bound if large and saves else Dense())
  return result


def leaf_rows(codec: Codec, leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
  """The rows that a leaf fills."""
  return -(-leaf.size // codec.tile_size) if leaf.size else 0


def _words(codec: Codec, size: int) -> int:
  """Returns the words of the rows that so many elements fill."""
  return -(-size // codec.tile_size) * codec.row_words if size else 0


def default_min_leaf_size(sizes: Sequence[int], *, drops: bool = False) -> int:
  """The size from which leaves are compressed: all smaller ones hold less than 0.5 %.

  With a sparse codec, less than 0.01 %, or they would be most of what is sent; whatever
  the density, so that densities can follow one another.

  Example:
    >>> default_min_leaf_size([10, 64, 100_000, 50_000])
    50000
    >>> default_min_leaf_size([300, 300])
    300
  """
  allowed = (_DENSE_SHARE_OF_SPARSE if drops else _DENSE_SHARE) * sum(sizes)
  passed = 0
  for size in sorted(sizes):
    passed += size
    if passed >= allowed:
      return size
  return 0
