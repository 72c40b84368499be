"""The rows of each leaf: their owners, and the exchange of their updates."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradcomp._src.codecs import dense, encoding, protocol
from gradcomp._src.codecs.protocol import Codec, LeafCodec
from gradcomp._src.codecs.sums.records import NOTHING, Leaf
from gradcomp._src.core.state import OwnedRows, is_rows
from gradcomp._src.exchange import layout as layouts
from gradcomp._src.exchange.collectives import in_turn, own_share
from gradcomp._src.exchange.plan import MADE_FOR_SHARDS, MessagePlan
from gradcomp._src.exchange.protocol import gather_rows
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
  messages = []
  for message in plan.messages:
    own, like = list[Codec](), message.layout.like
    for k, x in enumerate(like):
      of_leaf, words = message.layout.codec_of(k), max(1, -(-x.size // plan.workers))
      # A small leaf has short rows, so that each worker can own one.
      small = of_leaf.facts.plain and words < of_leaf.row_words
      own.append(ShortRows(row_words=words) if small else of_leaf)
    messages.append(message._replace(layout=layouts.arrange(like, own)))
  return LeafRows(plan._replace(messages=tuple(messages)), tuple(codecs))


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
  def _places(self) -> list[tuple[Codec, int, Any, tuple[int, ...]]]:
    """The codec of each gradient, its rows, the leaf, and the shape of a worker's."""
    found = {}
    for leaves, layout, *_ in self.plan.messages:
      columns = leaves, layout.slots, layout.like
      for i, (group, start, stop), like in zip(*columns, strict=True):
        share, codec = -((start - stop) // self.plan.workers), layout.codecs[group]
        shape = share, *protocol.tile_shape(codec)
        found[i] = codec, stop - start, like, shape
    return [found[i] for i in range(len(found))]

  def owned(self, leaves: Sequence[jax.Array]) -> Rows:
    """Returns this worker's rows, ``float32[share, *tile_shape]``, of whole leaves."""
    pairs = zip(self._places, leaves, strict=True)
    cut = [codec.split(x).reshape(-1, *own[1:]) for (codec, _, _, own), x in pairs]
    return [own_share(x, self.plan.group) for x in cut]

  @functools.cached_property
  def elements(self) -> list[Any]:
    """Masks of the places of this worker's rows that hold elements, not padding."""
    worker, found = lax.axis_index(self.plan.group.axis_name), list[Any]()
    for codec, _, like, (share, *tile) in self._places:
      size = codec.tile_size
      found.append(np.True_)
      if like.size != self.plan.workers * share * size:
        row = worker * share + lax.iota(jnp.int32, share)
        row = row.reshape(-1, *[1] * len(tile))
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
      parts: dict[Any, list[int]] = {}  # leaves that a worker encodes together
      for i in message.leaves:
        codec, size = self.codecs[i], rows[i].size
        bound = codec.bind(Leaf((size,))).to_nearest()  # to the rows, as one flat leaf
        # A scale of the whole tensor is that of a leaf.
        alone = bound != codec.to_nearest() or codec.of_whole
        if bound.facts.plain and size % bound.row_words:
          bound = ShortRows()
        parts.setdefault((bound, i if alone else None), []).append(i)
      columns = [(codec, own) for (codec, _), own in parts.items()]
      with jax.named_scope("gradcomp_encode"):
        encoded = []
        for codec, own in columns:  # each leaf from a row on
          flat = [codec.split(rows[i].reshape(-1)).reshape(-1) for i in own]
          together = encoding.encode_leaf(codec, False, jnp.concatenate(flat), NOTHING)
          encoded.append(together.rows)
      with jax.named_scope("gradcomp_all_gather"), noted(message):
        came, _ = gather_rows(message.layout, in_turn(encoded, came), self.plan.group)
      with jax.named_scope("gradcomp_decode"):
        for (codec, own), words in zip(columns, came, strict=True):
          start, cut = 0, word_cutter(words, 1)
          for i in own:
            stop = start - (-rows[i].size // codec.tile_size)
            found[i] = _decoded(cut(start, stop), codec, rows[i].shape)
            start = stop
    every = [found[i] for i in range(len(found))]
    with jax.named_scope("gradcomp_decode"):
      pairs = zip(self._places, every, strict=True)
      leaves = [codec.join(x[:n], like) for (codec, n, like, _), x in pairs]
    return leaves, [own_share(x, self.plan.group) for x in every]

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
    wanted = [({axes: shape},) for axes, (_, _, _, shape) in pairs]
    if got != wanted or made != jax.tree.structure(like):
      raise ValueError(
        f"`state.unsent` must have one worker's rows of each leaf, of "
        f"{self.plan.workers} workers, {wanted}, got {got}; {MADE_FOR_SHARDS}"
      )
    return jax.tree.leaves(unsent)


@functools.partial(jax.jit, static_argnums=(1, 2))  # leaves of a shape: traced once
def _decoded(words: jax.Array, codec: Codec, shape: tuple[int, ...]) -> jax.Array:
  """Decodes ``uint32[N, rows, words]`` to the rows of all owners, one leaf's."""
  like = jax.ShapeDtypeStruct(shape, jnp.float32)
  decode = lambda x: protocol.from_tiles(codec.decode_rows(x), like, codec)
  return jax.vmap(decode)(words).reshape(-1, *shape[1:])
