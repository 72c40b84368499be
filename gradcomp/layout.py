"""Which leaf travels where: leaves of a tree to rows of a few matrices, and back."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp.codecs import Codec, Dense

# Grubic 2018, section 3.2.2: small matrices stay in full precision, as long as more
# than 99 % of all parameters are quantized. Half of that share: 1 % in float32 would
# add 8 % to a 4-bit message.
_DENSE_SHARE = 0.005

# More payloads than this are added in a loop, which bounds the compile time.
_UNROLLED = 16


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
    slots: one for each leaf of the flattened tree.
    like: shape and dtype of each leaf.
    treedef: the tree.
  """

  codecs: tuple[Codec, ...]
  slots: tuple[Slot, ...]
  like: tuple[jax.ShapeDtypeStruct, ...]
  treedef: Any

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
    """Bytes of one payload of the whole tree."""
    words = [codec.row_words for codec in self.codecs]
    return 4 * sum(r * w for r, w in zip(self.rows, words, strict=True))

  def encode(self, tree: Any, keys: jax.Array | None) -> list[jax.Array]:
    """The matrices of a tree: ``uint32[rows, row_words]`` for each codec.

    Every leaf is encoded by itself and the rows are stacked: flattening the gradient
    in float32 first would cost five times as much.

    Args:
      tree: arrays as in ``like``.
      keys: ``uint32[leaves, 2]``, or None if no codec needs one.
    """
    parts: list[list[jax.Array]] = [[] for _ in self.codecs]
    for i, (leaf, slot) in enumerate(
      zip(jax.tree.leaves(tree), self.slots, strict=True)
    ):
      key = None if keys is None else keys[i]
      parts[slot.group].append(_encode(self.codecs[slot.group], leaf, key))
    return [jnp.concatenate(rows) for rows in parts]

  def decode(self, matrices: Sequence[jax.Array]) -> Any:
    """The mean of K payloads, ``uint32[K, rows, row_words]`` each codec, as a tree.

    Leaves are float32, whatever dtype the gradient has.
    """
    leaves = []
    for like, slot in zip(self.like, self.slots, strict=True):
      rows = matrices[slot.group][:, slot.start : slot.stop]
      tiles = mean_of_rows(self.codecs[slot.group], rows)
      leaves.append(tiles.reshape(-1)[: like.size].reshape(like.shape))
    return jax.tree.unflatten(self.treedef, leaves)


@functools.partial(jax.jit, static_argnums=0)
def _encode(codec: Codec, leaf: jax.Array, key: jax.Array | None) -> jax.Array:
  """Jitted by itself, so that leaves of one shape are traced once."""
  return codec.encode(leaf, key=key).rows


def mean_of_rows(codec: Codec, rows: jax.Array) -> jax.Array:
  """Decodes K payloads and averages: ``uint32[K, rows, words]`` to float32 tiles.

  The sum runs over the payloads in order, written out, so that every worker, mode and
  device adds in the same order, and XLA fuses decoding and adding into one pass.
  """
  count = rows.shape[0]
  total = codec.decode_rows(rows[0])
  if count <= _UNROLLED:
    for payload in rows[1:]:
      total = total + codec.decode_rows(payload)
  else:
    total = jax.lax.fori_loop(
      1, count, lambda i, total: total + codec.decode_rows(rows[i]), total
    )
  return total if count == 1 else total * jnp.float32(1 / count)


def plan(tree: Any, codec: Codec, *, min_leaf_size: int | None = None) -> Layout:
  """Assigns a codec to each leaf: ``codec``, or ``Dense(float32)`` to small leaves.

  A leaf is small if it has fewer than ``min_leaf_size`` elements; by default, if it is
  among the smallest leaves that together hold less than 0.5 % of all elements. A leaf
  also stays dense where its payload would not be smaller.

  Args:
    tree: arrays or ``jax.ShapeDtypeStruct``.
    codec: for the large leaves.
    min_leaf_size: elements, or None for the default.

  Example:
    >>> from gradcomp.codecs import QSGD
    >>> tree = {"bias": jnp.zeros(512), "kernel": jnp.zeros((512, 512))}
    >>> layout = plan(tree, QSGD(bits=4))
    >>> [type(codec).__name__ for codec in layout.codecs], layout.rows
    (['Dense', 'QSGD'], [4, 64])
  """
  leaves, treedef = jax.tree.flatten(tree)
  like = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
  if min_leaf_size is None:
    min_leaf_size = default_min_leaf_size([leaf.size for leaf in like])
  codecs: dict[Codec, int] = {}  # each with the rows that it has so far
  slots = []
  for leaf in like:
    chosen: Codec = Dense()
    if leaf.size >= min_leaf_size and _words(codec, leaf) < _words(chosen, leaf):
      chosen = codec
    start = codecs.setdefault(chosen, 0)
    codecs[chosen] += _rows(chosen, leaf)
    slots.append(Slot(list(codecs).index(chosen), start, codecs[chosen]))
  return Layout(tuple(codecs), tuple(slots), like, treedef)


def _rows(codec: Codec, leaf: jax.ShapeDtypeStruct) -> int:
  return -(-leaf.size // codec.tile_size)


def _words(codec: Codec, leaf: jax.ShapeDtypeStruct) -> int:
  return _rows(codec, leaf) * codec.row_words


def default_min_leaf_size(sizes: Sequence[int]) -> int:
  """The size from which leaves are compressed: all smaller ones hold less than 0.5 %.

  Example:
    >>> default_min_leaf_size([10, 64, 100_000, 50_000])
    50000
    >>> default_min_leaf_size([300, 300])
    300
  """
  allowed = _DENSE_SHARE * sum(sizes)
  passed = 0
  for size in sorted(sizes):
    passed += size
    if passed >= allowed:
      return size
  return 0
