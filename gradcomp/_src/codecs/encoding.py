"""Encodes the leaves of a message, each by its codec, or several small ones at once."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import NOTHING, Context, Encoded
from gradcomp._src.kernels.materialize import pick, slice_at, unknown
from gradcomp._src.mesh.study import platform

# Leaves of one shape with at most _SMALL_LEAF_ELEMENTS elements are encoded together,
# in groups of at most JOINT_ENCODING_ELEMENTS elements. A compiler takes a quarter of
# the time then. Larger leaves would be copied to no avail.
_SMALL_LEAF_ELEMENTS, JOINT_ENCODING_ELEMENTS = 2**17, 2**19
_ALIKE = 3  # large leaves of one shape, from which on a loop encodes them


@functools.partial(jax.jit, static_argnums=(0, 1))
def encode_leaf(codec: Codec, keep: bool, leaf: Array, context: Context) -> Encoded:
  """Encodes a leaf, with the residual if asked; jitted, to trace each shape once."""
  return codec.encode_leaf(leaf, context, keep=keep)


def _after(last: Array | None, leaf: Array) -> Array:
  """Returns a leaf that XLA cannot read before the rows ``last`` are encoded."""
  if last is None:
    return leaf
  # XLA would otherwise stack the leaves of all groups first, and hold a second
  # gradient. It drops an optimization barrier before it schedules. So the bits of the
  # leaf are joined with zeros that XLA does not know to be zeros: no word has 64 bits.
  zero = jax.lax.population_count(last[0, 0]) >> 6
  bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
  return jax.lax.bitcast_convert_type(bits | zero.astype(bits.dtype), leaf.dtype)


@functools.partial(jax.jit, static_argnums=0)
def _encode_several(
  codec: Codec, given: Sequence[tuple[Array, Context]]
) -> list[Array]:
  """Returns the rows of leaves of one shape, encoded by one vmapped program."""
  stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *given)
  # Without residuals: XLA would hold one array of residuals for each group before it
  # slices them into leaves.
  rows = jax.vmap(functools.partial(encode_leaf, codec, False))(*stacked).rows
  # Split along the first axis, they are put together again without a copy.
  return jnp.split(rows.reshape(-1, codec.row_words), len(given))


@jax.jit
def _entry(stacked: Any, place: Array) -> Any:
  return jax.tree.map(lambda x: slice_at(x, place, 1)[0], stacked)


def _in_loop(
  function: Callable[[Array, Context], Any],
  leaves: Sequence[Array],
  contexts: Sequence[Context],
) -> list[Any]:
  """Returns ``function(leaf, context)`` of large leaves of one shape, one by one."""
  # XLA inlines an encoder for each leaf, of 360 instructions for QSGD, which take more
  # than half of an update's compile time. A round copies its leaf. Results are cut at
  # places that XLA does not know, so that equal cuts are compiled once.
  stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *contexts)

  def one(given: tuple[Array, Context]) -> Any:
    return function(pick(lambda x: x, given[0], leaves), given[1])

  every = jax.lax.map(one, (jnp.arange(len(leaves)), stacked))
  places = unknown(range(len(leaves)), leaves[0])
  return [_entry(every, place) for place in places]


class Group(NamedTuple):
  """The leaves that one program encodes, by number."""

  codec: Codec
  leaves: list[int]
  in_turn: bool  # whether it encodes them in a loop


def grouped(
  codecs: Sequence[Codec], leaves: Sequence[Array], contexts: Sequence[Context]
) -> list[Group]:
  """Returns the groups of leaves that one program encodes."""
  alike: dict[Any, list[int]] = {}
  for i, (codec, leaf) in enumerate(zip(codecs, leaves, strict=True)):
    # A large leaf, which a CPU may encode in a loop with others.
    large = leaf.size > _SMALL_LEAF_ELEMENTS and platform() == "cpu"
    whole = large and not any(jax.typeof(leaf).sharding.spec)
    remembers = jax.tree.leaves(contexts[i].memory)
    in_turn = whole and not remembers and not codec.facts.drops
    small = 0 < leaf.size <= _SMALL_LEAF_ELEMENTS
    alone = leaf.shape, JOINT_ENCODING_ELEMENTS // leaf.size if small else 1
    turns = jax.typeof(leaf), len(leaves)
    shared = turns if in_turn else codec.joins(leaf.shape) or alone
    key = codec, leaf.dtype, jax.tree.structure(contexts[i]), in_turn, *shared
    alike.setdefault(key, []).append(i)
  groups = []
  for (codec, *_, in_turn, _, most), own in alike.items():
    count = 1 if in_turn and len(own) < _ALIKE else most
    cuts = range(0, len(own), count)
    groups += [Group(codec, own[at : at + count], in_turn) for at in cuts]
  return groups


def statistics_of(
  groups: Sequence[Group], leaves: Sequence[Array]
) -> tuple[list[Array | None], list[Any]]:
  """Returns each leaf's ``statistics`` by its codec, and the rest of its measures."""
  agreed: list[Array | None] = [None] * len(leaves)
  measured: list[Any] = [None] * len(leaves)
  for codec, numbers, in_turn in groups:
    own = [leaves[i] for i in numbers]
    measure = lambda leaf, _, codec=codec: codec.statistics(leaf)
    shared = in_turn and jax.eval_shape(codec.agree, own[0]) is not None
    found = (_in_loop if shared else map)(measure, own, [NOTHING] * len(own))
    for i, given in zip(numbers, found, strict=True):
      agreed[i], measured[i] = given
  return agreed, measured


def encode_leaves(
  groups: Sequence[Group],
  leaves: Sequence[Array],
  contexts: Sequence[Context],
  *,
  keep: bool,
) -> dict[int, Encoded]:
  """Encodes the leaves of groups, with the residual if asked and computed."""
  encoded: dict[int, Encoded] = {}
  last = None
  for codec, numbers, in_turn in groups:
    own = [leaves[i] for i in numbers], [contexts[i] for i in numbers]
    several: Iterable[Encoded] | None
    if len(numbers) == 1:
      encoded[numbers[0]] = encode_leaf(codec, keep, *own[0], *own[1])
      continue
    if in_turn:
      several = _in_loop(functools.partial(encode_leaf, codec, False), *own)
    elif (several := codec.encode_several(*own, last)) is None:
      given = [(_after(last, x), y) for x, y in zip(*own, strict=True)]
      several = map(Encoded, _encode_several(codec, given))
    encoded |= zip(numbers, several, strict=True)
    if leaves[numbers[0]].size and not in_turn:
      last = encoded[numbers[0]].rows
  return dict(sorted(encoded.items()))
