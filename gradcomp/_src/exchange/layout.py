"""The codec of each leaf, and the layout of a message: a matrix of rows a codec."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.encoding import JOINT_ENCODING_ELEMENTS
from gradcomp._src.codecs.protocol import Codec, LeafCodec, from_tiles
from gradcomp._src.codecs.sums.records import ArrayLike, Leaf
from gradcomp._src.codecs.sums.sum import RowDecoder, Sum
from gradcomp._src.kernels.materialize import LARGE, materialized, slice_at, unknown
from gradcomp._src.mesh.axes import automatic_axes

# Grubic 2018, section 3.2.2: small matrices stay in full precision, as long as more
# than 99 % of all parameters are quantized. Half of that 1 % is taken here, because 1 %
# in float32 would add 8 % to a 4-bit message. It would be most of a sparse one.
_DENSE_SHARE = 0.005
_DENSE_SHARE_OF_SPARSE = 0.0001


class Slot(NamedTuple):
  """The rows of one leaf: ``[start, stop)`` of the matrix number ``group``."""

  group: int
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Layout:
  """The places of a message's leaves in its matrices, one a codec, from shapes."""

  codecs: tuple[Codec, ...]  # in the order of their first leaves
  rows: tuple[int, ...]  # the number of rows in the matrix of each
  slots: tuple[Slot, ...]
  like: tuple[jax.ShapeDtypeStruct, ...]  # the shape and dtype of each leaf
  elements: int  # the number of elements in all leaves
  # Whether other arrays stand for leaves; owners keep nothing of these. The last of
  # them completes the elements of the leaves' mean, others none.
  replaced: bool
  completed: int

  # These are no fields: a step may replace the codecs by their fallbacks.
  @functools.cached_property
  def sums(self) -> list[Sum]:
    """The sum of each codec."""
    return [codec.sums for codec in self.codecs]

  @functools.cached_property
  def plain(self) -> bool:
    """True if all leaves can be added as they are."""
    return all(total.facts.plain for total in self.sums)

  @property
  def nbytes(self) -> int:
    """The bytes of all rows of one worker."""
    return 4 * sum(n * x.row_words for n, x in zip(self.rows, self.codecs, strict=True))

  def codec_of(self, number: int) -> Codec:
    """Returns the codec of a leaf."""
    return self.codecs[self.slots[number].group]

  def adjacent(self, rows: Mapping[int, jax.Array]) -> dict[int, list[jax.Array]]:
    """Lists the rows of leaves, by their numbers, for matrices, by theirs."""
    parts: dict[int, list[jax.Array]] = {}
    for i in sorted(rows):
      parts.setdefault(self.slots[i].group, []).append(rows[i])
    return parts

  def viewed(
    self,
    decoders: Callable[[], Mapping[int, RowDecoder]],
    words: Any = None,
    *,
    but: Collection[int] = (),
  ) -> dict[int, jax.Array]:
    """Decodes leaves of some matrices, in float32, in the shapes of :meth:`view`."""
    # One program for many small leaves compiles sooner than one for each, so that runs
    # of adjacent rows are decoded together. The rows of a large leaf are split off
    # before decoding, so that it is materialized once.
    sizes: dict[int, dict[int, int]] = {group: {} for group in range(len(self.codecs))}
    for i, slot in enumerate(self.slots):
      sizes[slot.group][i] = self.like[i].size
    full = lambda filled, size: filled + size > JOINT_ENCODING_ELEMENTS
    known, found = decoders(), {}
    with jax.named_scope("gradcomp_decode"):
      for group in sorted(known):
        for numbers in pieces(sizes[group], full):
          if set(numbers).issubset(but):
            continue
          slots = [self.slots[i] for i in numbers]
          tiles = known[group](slots[0].start, slots[-1].stop)
          counts = [slot.stop - slot.start for slot in slots]
          parts = cut(tiles, counts) if len(numbers) > 1 else [tiles]
          for i, own in zip(numbers, parts, strict=True):
            shape = jax.ShapeDtypeStruct(self.view(i), jnp.float32)
            found[i] = from_tiles(own, shape, self.codecs[group])
    return found

  def shares(
    self, decoders: Mapping[int, RowDecoder], rows: Sequence[jax.Array], workers: int
  ) -> list[jax.Array]:
    """Decodes a worker's own ``rows``: for each leaf ``float32[share, ...]``."""
    found: dict[int, jax.Array] = {}
    for group, words in enumerate(rows):
      decode = lambda _, i=group, n=words.shape[1]: decoders[i](0, n)
      with jax.named_scope("gradcomp_decode"):
        # Else a CPU would decode all rows for each leaf.
        tiles = materialized(decode, words)
        whole = self.codecs[group].unrotated(tiles).reshape(tiles.shape)
      own = {i: x for i, x in enumerate(self.slots) if x.group == group}
      counts = [-((x.start - x.stop) // workers) for x in own.values()]
      found |= zip(own, cut(whole, counts), strict=True)
    return [found[i] for i in range(len(self.slots))]

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
    """Returns the leaf numbers of rows; after the last row, the number of leaves."""
    # Rows are compared with the ends of leaves. A table of all rows would be as long as
    # the model, in the host's memory and in the program.
    own = [(i, slot.stop) for i, slot in enumerate(self.slots) if slot.group == group]
    numbers = [*(i for i, _ in own), len(self.slots)]
    ends = jnp.asarray([stop for _, stop in own], jnp.int32)
    steps = jnp.asarray(np.diff(numbers), jnp.int32)
    return numbers[0] + jnp.sum(jnp.where(row[..., None] >= ends, steps, 0), axis=-1)


def cut(x: jax.Array, counts: Sequence[int]) -> list[jax.Array]:
  """Cuts rows, one after the other, into parts with these counts."""
  # At places that XLA does not know, so that readers of parts of one shape have equal
  # programs, compiled once.
  starts = unknown([0, *itertools.accumulate(counts[:-1])], x)
  return [slice_at(x, *at) for at in zip(starts, counts, strict=True)]


def pieces(
  sizes: Mapping[int, int], full: Callable[[int, int], bool]
) -> list[list[int]]:
  """Cuts leaves, by their sizes, where ``full(sum so far, size of the next leaf)``."""
  found: list[list[int]] = []
  filled = 0
  for i, size in sizes.items():
    if not found or full(filled, size):
      found.append([])
      filled = 0
    found[-1].append(i)
    filled += size
  return found


def plan_rows(
  leaves: Sequence[ArrayLike],
  codec: LeafCodec,
  *,
  min_leaf_size: int | None = None,
  places: Sequence[Leaf] | None = None,
) -> Layout:
  """Lays out leaves, at ``places`` if a codec looks at paths; small ones stay dense."""
  places = places or [Leaf(leaf.shape) for leaf in leaves]
  return arrange(leaves, leaf_codecs(places, codec, min_leaf_size=min_leaf_size))


def arrange(
  leaves: Sequence[ArrayLike], codecs: Sequence[Codec], replaced: int | None = None
) -> Layout:
  """Lays out leaves, each with its own codec, or the arrays that stand for leaves."""
  like = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
  filled: dict[Codec, int] = {}  # the number of rows of each codec so far
  slots, elements = [], 0
  for leaf, codec in zip(like, codecs, strict=True):
    start = filled.setdefault(codec, 0)
    filled[codec] += rows_of(codec, leaf.size)
    slots.append(Slot(list(filled).index(codec), start, filled[codec]))
    elements += leaf.size
  return Layout(
    codecs=tuple(filled),
    rows=tuple(filled.values()),
    slots=tuple(slots),
    like=like,
    elements=elements,
    replaced=replaced is not None,
    completed=elements if replaced is None else replaced,
  )


def leaf_codecs(
  leaves: Sequence[Leaf], codec: LeafCodec, *, min_leaf_size: int | None = None
) -> list[Codec]:
  """Binds a codec to each leaf; small ones, or ones it cannot shrink, stay dense."""
  sizes = [leaf.size for leaf in leaves]
  least = [min_leaf_size or 0] * 2
  if min_leaf_size is None:
    least = [default_min_leaf_size(sizes, drops=drops) for drops in (False, True)]
  result, dense = [], Dense()
  for leaf, size in zip(leaves, sizes, strict=True):
    bound = codec.bind(leaf)
    facts = bound.facts
    words, plain = [rows_of(x, size) * x.row_words for x in (bound, dense)]
    saves = words < plain or (words == plain and facts.in_format)
    large = size >= least[facts.drops]
    result.append(bound if facts.own_units or (large and saves) else dense)
  return result


def rows_of(codec: Codec, size: int) -> int:
  """Returns the number of rows that a leaf of ``size`` elements fills."""
  return -(-size // codec.tile_size) if size else 0


def default_min_leaf_size(sizes: Sequence[int], *, drops: bool = False) -> int:
  """Returns the smallest size of a leaf that is compressed, for any density."""
  allowed = (_DENSE_SHARE_OF_SPARSE if drops else _DENSE_SHARE) * sum(sizes)
  ordered = sorted(sizes)
  ends = zip(ordered, itertools.accumulate(ordered), strict=True)
  return next((size for size, end in ends if end >= allowed), 0)
