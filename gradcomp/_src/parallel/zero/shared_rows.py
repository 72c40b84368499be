"""The rows of all parameters: their owners, and the exchange of their updates."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from gradcomp._src.codecs.protocol import Codec, LeafCodec
from gradcomp._src.codecs.sums.records import NOTHING, Leaf
from gradcomp._src.codecs.tiles import from_tiles, tile_shape
from gradcomp._src.core.state import OwnedRows, is_rows
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.exchange.in_turn import in_turn
from gradcomp._src.exchange.layout import Layout, Slot, leaf_codecs
from gradcomp._src.exchange.owners import MADE_FOR_SHARDS
from gradcomp._src.exchange.plan import Message, MessagePlan, own_axes
from gradcomp._src.exchange.shares import gather_rows, own_rows, own_share
from gradcomp._src.mesh.axes import Axes
from gradcomp._src.mesh.specs import sharded_axes, stacked_over
from gradcomp._src.mesh.study import noted
from gradcomp._src.mesh.types import mark_varying, typed_spec


@dataclasses.dataclass(frozen=True, eq=False)
class SharedRows:
  """The rows of all parameters; each worker owns an Nth of them.

  A row of elements is a row of the gradients' codec, decoded. Rows with the same two
  codecs, of leaves of one kind, are one matrix. Worker i owns its rows from
  ``i * share`` on.
  """

  plan: MessagePlan  # of the gradients
  codecs: tuple[tuple[Codec, ...], ...]  # of updates, a matrix of each message
  workers: Workers

  def owned(self, leaves: Sequence[jax.Array]) -> OwnedRows:
    """Returns this worker's rows of float32 leaves."""
    matrices = (_matrices(message, leaves) for message in self.plan.messages)
    return self.by_axes([[own_share(x, self.workers) for x in own] for own in matrices])

  def by_axes(self, arrays: Sequence[Sequence[jax.Array]]) -> OwnedRows:
    """Groups the arrays of messages by the axes that stack them."""
    result: dict[Axes, list[jax.Array]] = {}
    for message, own in zip(self.plan.messages, arrays, strict=True):
      result.setdefault(self._axes(message), []).extend(own)
    return OwnedRows({axes: tuple(own) for axes, own in result.items()})

  def first_leaves(self) -> OwnedRows:
    """Returns the number of the first leaf in each matrix."""

    def first(message: Message, group: int) -> Any:
      pairs = zip(message.leaves, message.layout.slots, strict=True)
      return next(i for i, slot in pairs if slot.group == group)

    return self._of_matrices(first)

  def elements(self) -> OwnedRows:
    """Masks the places of this worker's rows that hold elements, not padding."""

    def used(message: Message, group: int) -> jax.Array:
      codec = message.layout.codecs[group]
      shape = tile_shape(codec)
      places = jnp.arange(codec.tile_size).reshape(shape)
      counts = _counts(message.layout, group, self._own_rows(message.layout, group))
      return places < counts.reshape(-1, *[1] * len(shape))

    return self._of_matrices(used)

  def numbers(self) -> OwnedRows:
    """Returns the leaf of each of this worker's rows; the number of leaves if none."""

    def of_rows(message: Message, group: int) -> jax.Array:
      rows = self._own_rows(message.layout, group)
      numbers = jnp.asarray([*message.leaves, len(self.plan.names)], jnp.int32)
      return numbers[message.layout.leaf_of_row(group, rows)]

    return self._of_matrices(of_rows)

  def to_all(self, rows: OwnedRows) -> tuple[list[jax.Array], OwnedRows]:
    """All-gathers rows; returns the decoded leaves, and this worker's rows of them."""
    leaves: dict[int, jax.Array] = {}
    shares = []
    came: Sequence[jax.Array] = ()
    # Gradients of the last message arrive first, and so do its owners' differences.
    for message, codecs, own in reversed(self._of_messages(rows)):
      flat = [x.reshape(-1) for x in own]
      bound = [_bound(codec, x.size) for codec, x in zip(codecs, flat, strict=True)]
      with jax.named_scope("gradcomp_encode"):
        pairs = zip(bound, flat, strict=True)
        encoded = [x.encode_leaf(y, NOTHING, keep=False).rows for x, y in pairs]
      with jax.named_scope("gradcomp_all_gather"), noted(message):
        came = gather_rows(message.layout, in_turn(encoded, came), self.workers)
      with jax.named_scope("gradcomp_decode"):
        matrices = list(map(_decoded, bound, came, own))
        leaves |= _leaves(message, matrices)
        shares.append([own_share(x, self.workers) for x in matrices])
    return [leaves[i] for i in range(len(self.plan.leaves))], self.by_axes(shares[::-1])

  def check(self, rows: Any) -> None:
    """Raises ValueError for rows in other shapes than this worker's."""
    expected: dict[Axes, list[tuple[int, ...]]] = {}
    for message in self.plan.messages:
      layout = message.layout
      expected.setdefault(self._axes(message), []).extend(
        (-(-count // self.workers.size), *tile_shape(codec))
        for count, codec in zip(layout.rows, layout.codecs, strict=True)
      )
    got = {axes: [x.shape for x in own] for axes, own in rows.arrays.items()}
    if got != expected:
      raise ValueError(
        f"`state.unsent` must have the rows that one of {self.workers.size} workers "
        f"owns, {expected}, got {got}; keep message_bytes and masks as they were, and "
        f"{MADE_FOR_SHARDS}"
      )

  def _of_messages(
    self, rows: OwnedRows
  ) -> list[tuple[Message, tuple[Codec, ...], list[jax.Array]]]:
    """Returns each message, with the codecs of its updates and this worker's rows."""
    waiting = {axes: iter(arrays) for axes, arrays in rows.arrays.items()}
    pairs = zip(self.plan.messages, self.codecs, strict=True)
    own = lambda message, codecs: [next(waiting[self._axes(message)]) for _ in codecs]
    return [(message, codecs, own(message, codecs)) for message, codecs in pairs]

  def _of_matrices(self, function: Callable[[Message, int], Any]) -> OwnedRows:
    """Calls a function for each matrix of each message, by its number."""
    found = []
    for message in self.plan.messages:
      groups = range(len(message.layout.codecs))
      found.append([function(message, group) for group in groups])
    return self.by_axes(found)

  def _own_rows(self, layout: Layout, group: int) -> jax.Array:
    """Returns the numbers of this worker's rows of a matrix."""
    share = -(-layout.rows[group] // self.workers.size)
    return own_rows(share, lax.axis_index(self.workers.axis_name))

  def _axes(self, message: Message) -> Axes:
    return own_axes(self.plan.axis_name, message.others)


def _counts(layout: Layout, group: int, row: jax.Array) -> jax.Array:
  """Returns the number of elements in each row of a matrix, by the rows' numbers."""
  # Only the last row of a leaf may hold fewer than a tile, and rows behind all leaves
  # hold none. A table of all rows would be as long as the model.
  size = layout.codecs[group].tile_size
  last, missing = [], []
  for slot, like in zip(layout.slots, layout.like, strict=True):
    if slot.group == group and slot.stop > slot.start:
      last.append(slot.stop - 1)
      missing.append((slot.stop - slot.start) * size - like.size)
  ends, lacks = jnp.asarray(last, jnp.int32), jnp.asarray(missing, jnp.int32)
  lacking = jnp.sum(jnp.where(row[:, None] == ends, lacks, 0), axis=-1)
  return jnp.where(row < layout.rows[group], size - lacking, 0)


def share_rows(
  plan: MessagePlan,
  codec: LeafCodec,
  min_leaf_size: int | None,
  workers: Workers,
  kinds: Sequence[int],
) -> SharedRows:
  """Lays out the rows of the parameters by the messages of their gradients.

  ``codec`` encodes updates, but small leaves stay dense. A matrix has one of ``kinds``.
  """
  whole = [leaf._replace(addends=None, ranges=1) for leaf in plan.leaves]
  chosen = leaf_codecs(whole, codec, min_leaf_size=min_leaf_size)
  pairs = [_paired(message, chosen, kinds) for message in plan.messages]
  laid_out = zip(plan.messages, pairs, strict=True)
  messages = tuple(message._replace(layout=layout) for message, (layout, _) in laid_out)
  codecs = tuple(codecs for _, codecs in pairs)
  return SharedRows(plan._replace(messages=messages), codecs, workers)


def _paired(
  message: Message, chosen: Sequence[Codec], kinds: Sequence[int]
) -> tuple[Layout, tuple[Codec, ...]]:
  """Returns a layout with a matrix for each pair and kind, and the second codecs."""
  layout = message.layout
  filled: dict[tuple[Codec, Codec, int], int] = {}
  slots = []
  for i, slot in zip(message.leaves, layout.slots, strict=True):
    pair = layout.codecs[slot.group], chosen[i], kinds[i]
    start = filled.setdefault(pair, 0)
    filled[pair] += slot.stop - slot.start
    slots.append(Slot(list(filled).index(pair), start, filled[pair]))
  codecs = tuple(first for first, _, _ in filled)
  return Layout(codecs, tuple(slots), layout.like), tuple(x for _, x, _ in filled)


def _bound(codec: Codec, size: int) -> Codec:
  """Binds a codec to a worker's rows as one flat leaf, rounding to nearest."""
  return codec.bind(Leaf((size,))).to_nearest()


def _decoded(codec: Codec, words: jax.Array, like: jax.Array) -> jax.Array:
  """Decodes the rows of all owners, ``float32[N * share, ...]``."""
  decode = lambda rows: from_tiles(codec.decode_rows(rows), like, codec)
  return jax.vmap(decode)(words).reshape(-1, *like.shape[1:])


def _matrices(message: Message, leaves: Sequence[jax.Array]) -> list[jax.Array]:
  """Splits leaves into rows, ``float32[rows, *tile_shape]`` for each codec."""
  layout, rows = message.layout, {}
  for place, i in enumerate(message.leaves):
    codec = layout.codec_of(place)
    rows[place] = codec.split(leaves[i]).reshape(-1, *tile_shape(codec))
  found = layout.stack(rows)
  return [found[group] for group in range(len(layout.codecs))]


def _leaves(message: Message, matrices: Sequence[jax.Array]) -> dict[int, jax.Array]:
  """Joins rows to leaves: the inverse of :func:`_matrices`."""
  layout, found = message.layout, {}
  for i, slot, like in zip(message.leaves, layout.slots, layout.like, strict=True):
    rows = matrices[slot.group][slot.start : slot.stop]
    found[i] = layout.codecs[slot.group].join(rows, like)
  return found


Others = Sequence[tuple[str, ...]]


def on_mesh(
  first_rows: Callable[[Any, Others], tuple[OwnedRows, Any]],
  tree: Any,
  others: Others,
  names: tuple[str, ...],
) -> tuple[OwnedRows, Any]:
  """Calls ``first_rows(tree, others)`` on all devices of the mesh: global arrays.

  ``others`` are each leaf's other axes, over which it varies.
  """
  specs = jax.tree.map(typed_spec, tree)
  cut = frozenset().union(*(sharded_axes(typed_spec(x)) for x in jax.tree.leaves(tree)))
  inside = cut.union(names)

  def spec(node: Any) -> Any:
    if not is_rows(node):
      return PartitionSpec()
    specs_of: Any = lambda axes, own: (stacked_over(axes, inside),) * len(own)
    return OwnedRows({k: specs_of(k, own) for k, own in node.arrays.items()})

  def mapped(function: Any, out_specs: Any) -> Any:
    return jax.shard_map(
      lambda tree: function(first_rows(tree, others)),
      in_specs=(specs,),
      out_specs=out_specs,
      axis_names=set(inside),
      check_vma=False,
    )

  found: list[Any] = []

  def probe(rows: Any) -> jax.Array:
    found.append(jax.tree.map(spec, rows, is_leaf=is_rows))
    return jnp.zeros([])

  jax.eval_shape(mapped(probe, PartitionSpec()), tree)
  return jax.jit(mapped(lambda rows: rows, found[0]))(tree)


def per_worker(tree: Any) -> Any:
  """Types rows, even zeros, as varying over the workers."""
  marked = lambda rows: {axes: mark_varying(own, axes) for axes, own in rows.items()}
  mark = lambda node: OwnedRows(marked(node.arrays)) if is_rows(node) else node
  return jax.tree.map(mark, tree, is_leaf=is_rows)
