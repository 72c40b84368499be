"""The layout of a message: its leaves as rows of a few matrices, one a codec."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.joint import JOINT_ENCODING_ELEMENTS
from gradcomp._src.codecs.protocol import Codec, LeafCodec
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.codecs.sums.sum import RowDecoder, Sum
from gradcomp._src.codecs.tiles import elements, from_tiles, tile_shape, to_tiles
from gradcomp._src.exchange.assign import leaf_codecs, leaf_rows
from gradcomp._src.kernels.materialize import LARGE, materialized
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

  @property
  def sums(self) -> list[Sum]:
    """The sum of each codec."""
    return [codec.sums for codec in self.codecs]

  @property
  def plain(self) -> bool:
    """True if all leaves can be added as they are."""
    return all(codec.facts.plain for codec in self.codecs)

  def codec_of(self, number: int) -> Codec:
    """Returns the codec of a leaf."""
    return self.codecs[self.slots[number].group]

  def stack(self, rows: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
    """Concatenates the rows of leaves, by their numbers, to matrices, by theirs."""
    return {i: jnp.concatenate(own) for i, own in self.adjacent(rows).items()}

  def adjacent(self, rows: Mapping[int, jax.Array]) -> dict[int, list[jax.Array]]:
    """Lists the rows of leaves, by their numbers, for matrices, by theirs."""
    parts: dict[int, list[jax.Array]] = {}
    for i in sorted(rows):
      parts.setdefault(self.slots[i].group, []).append(rows[i])
    return parts

  def tiles(self, number: int, leaf: jax.Array) -> jax.Array:
    """Splits a leaf into tiles, ``float32[rows, *tile_shape]``, filled with zeros."""
    codec = self.codec_of(number)
    return to_tiles(leaf, codec).reshape(-1, *tile_shape(codec))

  def means(
    self, decoders: Callable[[], Mapping[int, RowDecoder]], received: jax.Array
  ) -> list[jax.Array]:
    """Decodes the leaves, in float32, from all workers' ``received`` words."""

    def decode(_: jax.Array) -> dict[int, jax.Array]:
      return self._decode(self._runs(), decoders())

    tiled = any(self.view(i) != x.shape for i, x in enumerate(self.like))
    # A residual and every state of an optimizer read large leaves, so a CPU
    # materializes them.
    large = tiled and self.elements >= LARGE
    found = materialized(decode, received) if large else decode(received)
    return self._shaped(found)

  def decode(self, decoders: Mapping[int, RowDecoder]) -> list[jax.Array]:
    """Decodes all leaves, in float32, from the decoder of each matrix."""
    return self._shaped(self.viewed(decoders))

  def _shaped(self, leaves: Mapping[int, jax.Array]) -> list[jax.Array]:
    return [leaves[i].reshape(like.shape) for i, like in enumerate(self.like)]

  def viewed(self, decoders: Mapping[int, RowDecoder]) -> dict[int, jax.Array]:
    """Decodes the leaves of some matrices, in float32, in the shapes of :meth:`view`.

    ``decoders`` and the leaves are by their numbers.
    """
    runs = [x for x in self._runs() if self.slots[x[0]].group in decoders]
    return self._decode(runs, decoders)

  def decode_leaf(self, number: int, decoders: Mapping[int, RowDecoder]) -> jax.Array:
    """Returns the leaf of this number, in float32, from the decoder of its matrix."""
    return self._decode([[number]], decoders)[number]

  def shares(
    self, decoders: Mapping[int, RowDecoder], rows: Sequence[jax.Array]
  ) -> list[jax.Array]:
    """Decodes this worker's own rows of each matrix, ``float32[share, *tile_shape]``.

    ``rows`` are the words of all workers, ``uint32[N, share, words]``.
    """
    with jax.named_scope("gradcomp_decode"):
      tiles = [decoders[i](0, x.shape[1]) for i, x in enumerate(rows)]
      return list(map(elements, tiles, self.codecs))

  def _decode(
    self, runs: Sequence[Sequence[int]], decoders: Mapping[int, RowDecoder]
  ) -> dict[int, jax.Array]:
    """Decodes runs of leaves with adjacent rows, each run at once."""
    leaves = {}
    with jax.named_scope("gradcomp_decode"):
      for numbers in runs:
        group, first, _ = self.slots[numbers[0]]
        tiles = decoders[group](first, self.slots[numbers[-1]].stop)
        for i in numbers:
          _, start, stop = self.slots[i]
          own = jax.lax.slice_in_dim(tiles, start - first, stop - first)
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
    return self.codecs[group].view_shape(stop - start, like)

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


def plan_rows(
  leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
  codec: LeafCodec,
  *,
  min_leaf_size: int | None = None,
  places: Sequence[Leaf] | None = None,
) -> Layout:
  """Lays out leaves for the last rounds of a codec. Small leaves stay dense.

  ``places`` are their shapes and paths, where the codec of a leaf depends on its path.

  Example:
    >>> from gradcomp.codecs import QSGD
    >>> leaves = [jnp.zeros(512), jnp.zeros((512, 512))]
    >>> layout = plan_rows(leaves, QSGD(bits=4))
    >>> [type(codec).__name__ for codec in layout.codecs], layout.rows
    (['Dense', 'QSGD'], [4, 64])
  """
  places = places or [Leaf(leaf.shape) for leaf in leaves]
  codecs = leaf_codecs(places, codec, min_leaf_size=min_leaf_size)
  rounds = [x.rounds(leaf.shape) for x, leaf in zip(codecs, leaves, strict=True)]
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
