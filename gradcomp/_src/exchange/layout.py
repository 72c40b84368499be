"""The layout of a message: its leaves as rows of a few matrices, one a codec."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.encoding import (
  JOINT_ENCODING_ELEMENTS,
  Encoded,
  encode_leaves,
  to_agree,
)
from gradcomp._src.codecs.protocol import Codec, LeafCodec
from gradcomp._src.codecs.rounds import rounds_of
from gradcomp._src.codecs.sums.records import Context, Leaf
from gradcomp._src.codecs.sums.sum import RowDecoder
from gradcomp._src.codecs.tiles import from_tiles, tile_shape, to_tiles, view_shape
from gradcomp._src.exchange.assign import leaf_codecs, leaf_rows
from gradcomp._src.kernels.materialize import LARGE, packed
from gradcomp._src.mesh.axes import automatic_axes


class Slot(NamedTuple):
  """The rows of one leaf: ``[start, stop)`` of the matrix number ``group``."""

  group: int
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Layout:
  """The places of a message's leaves in its matrices, one matrix a codec.

  It is static: it depends on shapes, and not on values. Codecs are in the order of
  their first leaves, and ``like`` has the shape and dtype of each leaf.
  """

  codecs: tuple[Codec, ...]
  slots: tuple[Slot, ...]
  like: tuple[jax.ShapeDtypeStruct, ...]

  @property
  def elements(self) -> int:
    """The number of elements in all leaves."""
    return sum(like.size for like in self.like)

  @property
  def rows(self) -> list[int]:
    """The number of rows in each matrix."""
    return [
      max(slot.stop for slot in self.slots if slot.group == group)
      for group in range(len(self.codecs))
    ]

  @property
  def nbytes(self) -> int:
    """The bytes of all rows of one worker."""
    words = [codec.row_words for codec in self.codecs]
    return 4 * sum(r * w for r, w in zip(self.rows, words, strict=True))

  def to_agree(self, leaves: Sequence[jax.Array]) -> list[jax.Array | None]:
    """Returns each leaf's statistics for all workers to agree on; None without any."""
    codecs = [self.codecs[slot.group] for slot in self.slots]
    return list(map(to_agree, codecs, leaves))

  def agreed_rows(self, agreed: Sequence[jax.Array | None]) -> list[jax.Array | None]:
    """Returns the statistics of each matrix, a line a row; None without any."""
    parts: list[list[jax.Array]] = [[] for _ in self.codecs]
    for stat, slot in zip(agreed, self.slots, strict=True):
      if stat is not None:
        shape = (slot.stop - slot.start, stat.shape[1])
        parts[slot.group].append(jnp.broadcast_to(stat, shape))
    return [jnp.concatenate(lines) if lines else None for lines in parts]

  def encode(
    self,
    leaves: Sequence[jax.Array],
    keys: Sequence[jax.Array | None],
    contexts: Sequence[Context],
    *,
    keep: bool = False,
  ) -> tuple[list[jax.Array], list[Encoded]]:
    """Encodes leaves to one matrix, ``uint32[rows, row_words]``, for each codec.

    Keys are ``uint32[2]``, or None for a codec without random numbers. The encoded form
    of each leaf is returned too, with its unsent part if ``keep``.
    """
    codecs = [self.codecs[slot.group] for slot in self.slots]
    # Every leaf is encoded by itself, and then the rows are stacked. Flattening the
    # gradient in float32 first would cost five times as much.
    encoded = encode_leaves(codecs, leaves, keys, contexts, keep=keep)
    parts: list[list[jax.Array]] = [[] for _ in self.codecs]
    for slot, codec, leaf in zip(self.slots, codecs, encoded, strict=True):
      # XLA would fuse encoders into the concatenation, and that into each slice of it
      # that is sent. Scales behind the codes of a row are concatenated there already.
      planes, rest = divmod(codec.tile_size, codec.row_words)
      codes_alone = planes > 1 and not rest
      parts[slot.group].append(packed(leaf.rows) if codes_alone else leaf.rows)
    return [jnp.concatenate(rows) for rows in parts], encoded

  def decode(self, decoders: Sequence[RowDecoder]) -> list[jax.Array]:
    """Returns the leaves, in float32, from the decoder of each matrix."""
    return self.shaped(self.viewed(decoders))

  def shaped(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Reshapes leaves from :meth:`viewed` to their own shapes."""
    return [x.reshape(y.shape) for x, y in zip(leaves, self.like, strict=True)]

  def viewed(self, decoders: Sequence[RowDecoder]) -> list[jax.Array]:
    """Decodes the leaves, in float32, in the shapes of :meth:`view`."""
    leaves: dict[int, jax.Array] = {}
    for numbers in self._runs():
      leaves |= self._decode_run(numbers, decoders)
    return [leaves[i] for i in range(len(self.like))]

  def decode_leaf(self, number: int, decoders: Mapping[int, RowDecoder]) -> jax.Array:
    """Returns the leaf of this number, in float32, from the decoder of its matrix."""
    return self._decode_run([number], decoders)[number]

  def _decode_run(
    self,
    numbers: Sequence[int],
    decoders: Sequence[RowDecoder] | Mapping[int, RowDecoder],
  ) -> dict[int, jax.Array]:
    group, first, _ = self.slots[numbers[0]]
    with jax.named_scope("gradcomp_decode"):
      tiles = decoders[group](first, self.slots[numbers[-1]].stop)
      leaves = {}
      for i in numbers:
        _, start, stop = self.slots[i]
        own = tiles[start - first : stop - first]
        like = jax.ShapeDtypeStruct(self.view(i), jnp.float32)
        leaves[i] = from_tiles(own, like, self.codecs[group])
      return leaves

  def view(self, number: int) -> tuple[int, ...]:
    """Returns the shape in which a CPU traverses a large leaf fastest; else its own."""
    group, start, stop = self.slots[number]
    like = self.like[number]
    # JAX may shard leaves over Auto axes: XLA would place a reshaped one anew, and
    # residuals would leave a step in another sharding.
    if like.size < LARGE or automatic_axes():
      return like.shape
    return view_shape(stop - start, like, self.codecs[group])

  def leaf_of_row(self, group: int, row: jax.Array) -> jax.Array:
    """Returns the leaf number of rows of a matrix, ``int32``, in the shape of ``row``.

    Behind the last row it is the number of leaves.
    """
    # Rows are compared with the ends of leaves. A table of all rows would be as long as
    # the model, in the host's memory and in the program.
    own = [(i, slot.stop) for i, slot in enumerate(self.slots) if slot.group == group]
    numbers = [*(i for i, _ in own), len(self.slots)]
    ends = jnp.asarray([stop for _, stop in own], jnp.int32)
    steps = jnp.asarray(np.diff(numbers), jnp.int32)
    return numbers[0] + jnp.sum(jnp.where(row[..., None] >= ends, steps, 0), axis=-1)

  def _runs(self) -> list[list[int]]:
    """Returns the numbers of leaves in runs of adjacent rows, decoded together."""
    # One program for many small leaves compiles sooner than one for each. The rows of a
    # large leaf are split off before decoding, so that it is materialized once.
    runs: dict[int, list[list[int]]] = {}
    filled: dict[int, int] = {}
    for i, (slot, like) in enumerate(zip(self.slots, self.like, strict=True)):
      own = runs.setdefault(slot.group, [])
      filled[slot.group] = filled.get(slot.group, 0) + like.size
      if not own or filled[slot.group] > JOINT_ENCODING_ELEMENTS:
        own.append([])
        filled[slot.group] = like.size
      own[-1].append(i)
    return list(itertools.chain.from_iterable(runs.values()))

  def tiles(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Splits leaves into tiles, ``float32[rows, *tile_shape]`` for each codec.

    Zeros fill the last tile of a leaf.
    """
    parts: list[list[jax.Array]] = [[] for _ in self.codecs]
    for leaf, slot in zip(leaves, self.slots, strict=True):
      codec = self.codecs[slot.group]
      tiles = to_tiles(leaf, codec)
      parts[slot.group].append(tiles.reshape(-1, *tile_shape(codec)))
    return [jnp.concatenate(rows) for rows in parts]


def plan_rows(
  leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
  codec: Codec,
  *,
  min_leaf_size: int | None = None,
) -> Layout:
  """Lays out leaves for one codec. Small leaves stay dense: see :func:`leaf_codecs`.

  Example:
    >>> from gradcomp.codecs import QSGD
    >>> leaves = [jnp.zeros(512), jnp.zeros((512, 512))]
    >>> layout = plan_rows(leaves, QSGD(bits=4))
    >>> [type(codec).__name__ for codec in layout.codecs], layout.rows
    (['Dense', 'QSGD'], [4, 64])
  """
  places = [Leaf(leaf.shape) for leaf in leaves]
  codecs = leaf_codecs(places, codec, min_leaf_size=min_leaf_size)
  return arrange_last(leaves, codecs)


def arrange_last(
  leaves: Sequence[jax.Array | jax.ShapeDtypeStruct], codecs: Sequence[LeafCodec]
) -> Layout:
  """Lays out leaves for the codecs of the last round of each leaf."""
  rounds = [rounds_of(x, leaf.shape) for x, leaf in zip(codecs, leaves, strict=True)]
  return arrange(leaves, [x[-1].codec for x in rounds])


def arrange(
  leaves: Sequence[jax.Array | jax.ShapeDtypeStruct], codecs: Sequence[Codec]
) -> Layout:
  """Lays out leaves, each with its own codec.

  Example:
    >>> dense = gradcomp.codecs.Dense()
    >>> arrange([jnp.zeros(512), jnp.zeros(100)], [dense, dense]).slots
    (Slot(group=0, start=0, stop=4), Slot(group=0, start=4, stop=5))
  """
  like = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
  filled: dict[Codec, int] = {}  # the number of rows of each codec so far
  slots = []
  for leaf, codec in zip(like, codecs, strict=True):
    start = filled.setdefault(codec, 0)
    filled[codec] += leaf_rows(codec, leaf)
    slots.append(Slot(list(filled).index(codec), start, filled[codec]))
  return Layout(tuple(filled), tuple(slots), like)
