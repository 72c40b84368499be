"""The rows of each leaf: their owners, and the exchange of their updates."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp._src.codecs import dense, encoding, protocol
from gradcomp._src.codecs.protocol import Codec, LeafCodec
from gradcomp._src.codecs.sums.records import NOTHING, Leaf
from gradcomp._src.core.state import OwnedRows, is_rows
from gradcomp._src.exchange import layout as layouts
from gradcomp._src.exchange import lines
from gradcomp._src.exchange.collectives import in_turn
from gradcomp._src.exchange.plan import MADE_FOR_SHARDS, MessagePlan
from gradcomp._src.exchange.protocol import Message, gather_rows
from gradcomp._src.kernels.materialize import word_cutter
from gradcomp._src.mesh.axes import Axes
from gradcomp._src.mesh.study import noted

Rows = list[jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortRows(dense.Dense):
  """Sends float32 in short rows, so that each owner has one of a small leaf."""

  row_words: int = 1  # type: ignore[misc]


def share_rows(
  plan: MessagePlan, codec: LeafCodec, min_leaf_size: int | None
) -> "LeafRows":
  """Shares the rows of a plan; ``codec`` encodes updates of all but small leaves."""
  whole = [leaf._replace(addends=None, ranges=1) for leaf in plan.leaves]
  codecs = layouts.leaf_codecs(whole, codec, min_leaf_size=min_leaf_size)

  def short(codec: Codec, size: int) -> Codec:
    """Gives a small leaf rows, so that each worker can own one."""
    words = max(1, -(-size // plan.workers))
    small = codec.facts.plain and words < codec.row_words
    return ShortRows(row_words=words) if small else codec

  def shared(message: Message) -> Message:
    like = message.layout.like
    own = [short(message.layout.codec_of(k), x.size) for k, x in enumerate(like)]
    return message._replace(layout=layouts.arrange(like, own))

  messages = tuple(map(shared, plan.messages))
  return LeafRows(plan._replace(messages=messages), tuple(codecs))


class _Place(NamedTuple):
  """The rows of one leaf."""

  codec: Codec  # of the gradients
  rows: int  # without those that fill it up
  like: jax.ShapeDtypeStruct  # the whole leaf
  shape: tuple[int, ...]  # of a worker's rows, (share, *tile_shape)


@dataclasses.dataclass(frozen=True, eq=False)
class LeafRows:
  """The rows of each leaf, filled with zeros to a multiple of N; lists are by leaf."""

  # A row of elements is a decoded row of the gradients' codec. Worker i owns the rows
  # of each leaf from i * share on.
  plan: MessagePlan  # of the gradients
  codecs: tuple[Codec, ...]  # of the updates

  @property
  def axes(self) -> list[Axes]:
    """The axes that stack a worker's rows."""
    return list(map(self.plan.own_axes, range(len(self.plan.names))))

  @functools.cached_property
  def _places(self) -> list[_Place]:
    found: dict[int, _Place] = {}
    for leaves, layout, *_ in self.plan.messages:
      columns = leaves, layout.slots, layout.like
      for i, (group, start, stop), like in zip(*columns, strict=True):
        share, codec = -((start - stop) // self.plan.workers), layout.codecs[group]
        shape = share, *protocol.tile_shape(codec)
        found[i] = _Place(codec, stop - start, like, shape)
    return [found[i] for i in range(len(found))]

  def owned(self, leaves: Sequence[jax.Array]) -> Rows:
    """Returns this worker's rows, ``float32[share, *tile_shape]``, of whole leaves."""
    cut = lambda at, x: at.codec.split(x).reshape(-1, *at.shape[1:])
    return [lines.own_share(x, self.plan.group) for x in map(cut, self._places, leaves)]

  @functools.cached_property
  def elements(self) -> list[Any]:
    """Masks of the places of this worker's rows that hold elements, not padding."""
    worker, found = lax.axis_index(self.plan.group.axis_name), list[Any]()
    for codec, _, like, (share, *tile) in self._places:
      size = codec.tile_size
      found.append(np.True_)
      if like.size != self.plan.workers * share * size:
        row = lines.own_rows(share, worker).reshape(-1, *[1] * len(tile))
        whole, rest = divmod(like.size, size)
        count = jnp.where(row < whole, size, jnp.where(row == whole, rest, 0))
        found[-1] = np.arange(size).reshape(tile) < count
    return found

  def to_all(self, rows: Rows) -> tuple[list[jax.Array], Rows]:
    """All-gathers rows; returns the decoded leaves, and this worker's rows of them."""
    found: dict[int, jax.Array] = {}
    came: Sequence[jax.Array] = ()
    # Gradients of the last message arrive first, and so do its owners' differences.
    for message in reversed(self.plan.messages):
      parts = _joined({i: (self.codecs[i], rows[i]) for i in message.leaves})
      with jax.named_scope("gradcomp_encode"):
        encoded = [part.encoded() for part in parts]
      with jax.named_scope("gradcomp_all_gather"), noted(message):
        came, _ = gather_rows(message.layout, in_turn(encoded, came), self.plan.group)
      with jax.named_scope("gradcomp_decode"):
        for part, words in zip(parts, came, strict=True):
          found |= part.decoded(words)
    every = [found[i] for i in range(len(found))]
    with jax.named_scope("gradcomp_decode"):
      pairs = zip(self._places, every, strict=True)
      leaves = [at.codec.join(x[: at.rows], at.like) for at, x in pairs]
    return leaves, [lines.own_share(x, self.plan.group) for x in every]

  def as_state(self, like: Any, rows: Rows) -> Any:
    """Returns rows as ``OwnedRows`` in a tree like the parameters."""
    nodes = [OwnedRows({axes: x}) for axes, x in zip(self.axes, rows, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), nodes)

  def of_state(self, unsent: Any, like: Any) -> Rows:
    """Undoes :meth:`as_state`; ValueError for rows of others than this worker."""
    made: Any
    nodes, made = jax.tree.flatten(unsent, is_leaf=is_rows)
    got = [jax.tree.map(jnp.shape, tuple(x)) for x in nodes if is_rows(x)]
    pairs = zip(self.axes, self._places, strict=True)
    wanted = [({axes: place.shape},) for axes, place in pairs]
    if got != wanted or made != jax.tree.structure(like):
      raise ValueError(
        f"`state.unsent` must have one worker's rows of each leaf, of "
        f"{self.plan.workers} workers, {wanted}, got {got}; {MADE_FOR_SHARDS}"
      )
    return jax.tree.leaves(unsent)


class _Joined(NamedTuple):
  """The rows of leaves that a worker encodes together, by leaf."""

  codec: Codec
  leaves: dict[int, jax.Array]

  def encoded(self) -> jax.Array:
    """Returns the words of all leaves, each from a row on, ``uint32[rows, words]``."""
    flat = [self.codec.split(x.reshape(-1)).reshape(-1) for x in self.leaves.values()]
    return encoding.encode_leaf(self.codec, False, jnp.concatenate(flat), NOTHING).rows

  def decoded(self, words: jax.Array) -> Iterator[tuple[int, jax.Array]]:
    """Yields each leaf's rows of all owners, ``float32[N * share, ...]``."""
    start, cut = 0, word_cutter(words, 1)
    for i, like in self.leaves.items():
      stop = start - (-like.size // self.codec.tile_size)
      yield i, _decoded(cut(start, stop), self.codec, like.shape)
      start = stop


@functools.partial(jax.jit, static_argnums=(1, 2))  # leaves of a shape: traced once
def _decoded(words: jax.Array, codec: Codec, shape: tuple[int, ...]) -> jax.Array:
  """Decodes ``uint32[N, rows, words]`` to the rows of all owners, one leaf's."""
  like = jax.ShapeDtypeStruct(shape, jnp.float32)
  decode = lambda x: protocol.from_tiles(codec.decode_rows(x), like, codec)
  return jax.vmap(decode)(words).reshape(-1, *shape[1:])


def _joined(rows: dict[int, tuple[Codec, jax.Array]]) -> list[_Joined]:
  """Returns the rows of leaves by codecs, bound to a worker's rows as one flat leaf."""
  found: dict[tuple[Any, ...], _Joined] = {}
  for i, (codec, x) in rows.items():
    bound = codec.bind(Leaf((x.size,))).to_nearest()
    # A scale of the whole tensor is that of a leaf.
    alone = bound != codec.to_nearest() or codec.of_whole
    if bound.facts.plain and x.size % bound.row_words:
      bound = ShortRows()
    part = found.setdefault((bound, i if alone else None), _Joined(bound, {}))
    part.leaves[i] = x
  return list(found.values())
