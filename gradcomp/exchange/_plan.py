"""The messages of a step: which leaves travel together, and how."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.tree_util import KeyPath, keystr

from gradcomp import sums
from gradcomp.codecs import (
  Leaf,
  LeafCodec,
  Round,
  check_leaves,
  rounds_of,
  rule_of,
  working_dtype,
)
from gradcomp.exchange._all_reduce import AllReduce
from gradcomp.exchange._choice import Auto, Choice, choose, reencoding
from gradcomp.exchange._exchange import Exchange
from gradcomp.layout import Layout, arrange, leaf_codecs, leaf_rows
from gradcomp.workers import Axes, AxisName, axis_names


class Message(NamedTuple):
  """Leaves that share the collectives of one exchange.

  Attributes:
    leaves: their numbers in the flattened tree.
    layout: how they become rows.
    exchange: who sends which rows to whom.
    others: axes beside the data axis over which the leaves differ.
    reason: for the exchange.
    workers: N.
    round: the number of the round in which it is sent.
    keeps: whether owners may keep what their encodings of means lost.
  """

  leaves: tuple[int, ...]
  layout: Layout
  exchange: Exchange
  others: tuple[str, ...]
  reason: str
  workers: int
  round: int = 0
  keeps: bool = True


class Plan(NamedTuple):
  """What one transformation sends in a step.

  Attributes:
    names: of the leaves, like "['layer']['kernel']".
    leaves: what codecs were bound to.
    others: for each leaf, the axes beside the data axis over which it differs.
    codecs: the codec of each leaf.
    rules: why each leaf gets it; "" where all get the same.
    messages: the messages, round by round.
    axis_name: the axes of the workers, or None.
    workers: N.
  """

  names: tuple[str, ...]
  leaves: tuple[Leaf, ...]
  others: tuple[tuple[str, ...], ...]
  codecs: tuple[LeafCodec, ...]
  rules: tuple[str, ...]
  messages: tuple[Message, ...]
  axis_name: AxisName | None
  workers: int

  @property
  def rounds(self) -> int:
    """How many messages follow one another, at most."""
    return 1 + max((message.round for message in self.messages), default=0)

  @property
  def sends(self) -> bool:
    """Whether workers exchange anything."""
    return any(message.exchange.sends for message in self.messages)

  @property
  def of_leaves(self) -> bool:
    """Whether what is encoded first are the leaves of one worker, and not sums."""
    return all(message.exchange.of_leaves for message in self.messages)

  def own_axes(self, number: int) -> Axes:
    """Returns the axes that stack what each worker keeps of a leaf."""
    return own_axes(self.axis_name, self.others[number])


def own_axes(axis_name: AxisName | None, others: tuple[str, ...]) -> Axes:
  """Returns the axes over which workers' own arrays are stacked."""
  return (*(() if axis_name is None else axis_names(axis_name)), *others)


def plan_messages(
  leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
  paths: Sequence[KeyPath],
  others: Sequence[tuple[str, ...]],
  codec: LeafCodec,
  *,
  axis_name: AxisName | None,
  exchange: Auto | Exchange,
  workers: int,
  min_leaf_size: int | None,
  message_bytes: int | None,
) -> Plan:
  """Cuts a list of leaves into messages.

  One message a round, unless

  - ``message_bytes`` asks for more: consecutive leaves share a message as long as its
    payload is not larger;
  - leaves differ over different ``others``: a message has one type;
  - codes are added by ``psum``: dense leaves have no integer codes;
  - what an owner's encoding loses of other arrays than leaves is not for the next step;
  - leaves are float64, of which there is only a plain sum.

  Args:
    leaves: of the flattened tree.
    paths: their paths.
    others: for each leaf, the axes beside the data axis over which it differs.
    codec: for the large leaves.
    axis_name: the axes of the workers, or None.
    exchange: the one that was asked for.
    workers: N.
    min_leaf_size: elements, or None for the default.
    message_bytes: bytes of a payload, or None for no limit.
  """
  like = [
    jax.ShapeDtypeStruct(leaf.shape, working_dtype(codec, leaf.dtype))
    for leaf in leaves
  ]
  total = sums.facts(codec)
  total.check(workers)
  addends = workers if exchange.sends else None
  whole = [
    Leaf(leaf.shape, path=keystr(path, simple=True, separator="/"))
    for leaf, path in zip(leaves, paths, strict=True)
  ]
  check_leaves(codec, whole)
  decided = None
  if total.drops:  # for all messages, before ranges are cut
    codecs = leaf_codecs(whole, codec, min_leaf_size=min_leaf_size)
    last = [rounds_of(c, x.shape)[-1] for c, x in zip(codecs, like, strict=True)]
    decided = choose(exchange, arrange(like, [x.codec for x in last]), workers)
    exchange = decided.exchange
  # Where workers own ranges of rows, every leaf has a row for each of them.
  ranges = workers if exchange.owners else 1
  bound = [leaf._replace(addends=addends, ranges=ranges) for leaf in whole]
  codecs = leaf_codecs(bound, codec, min_leaf_size=min_leaf_size)
  rounds = [rounds_of(c, x.shape) for c, x in zip(codecs, like, strict=True)]
  count = max(map(len, rounds), default=1)
  apart = not total.mixes and isinstance(exchange, AllReduce | Auto)
  messages = []
  for number in range(count):
    sent = {
      i: x[number - count] for i, x in enumerate(rounds) if len(x) >= count - number
    }
    parts = {i: jax.ShapeDtypeStruct(x.shape, like[i].dtype) for i, x in sent.items()}
    for kind, piece in _pieces(parts, sent, others, apart, message_bytes):
      layout = arrange([parts[i] for i in piece], [sent[i].codec for i in piece])
      picked = decided or (
        reencoding(exchange, layout, workers)
        if kind.plain
        else choose(exchange, layout, workers)
      )
      if kind.wide and exchange.sends:
        picked = Choice(AllReduce(), "float64 is added as it is")
      messages.append(
        Message(
          tuple(piece),
          layout,
          picked.exchange,
          kind.others,
          picked.reason,
          workers,
          number,
          kind.keeps,
        )
      )
  return Plan(
    tuple(map(keystr, paths)),
    tuple(bound),
    tuple(others),
    tuple(codecs),
    tuple(rule_of(codec, leaf) for leaf in whole),
    tuple(messages),
    axis_name,
    workers,
  )


class _Kind(NamedTuple):
  """What leaves of one message have in common."""

  others: tuple[str, ...]
  plain: bool  # and added apart from codes
  wide: bool
  keeps: bool


def _pieces(
  parts: dict[int, jax.ShapeDtypeStruct],
  sent: dict[int, Round],
  others: Sequence[tuple[str, ...]],
  apart: bool,
  message_bytes: int | None,
) -> Iterator[tuple[_Kind, list[int]]]:
  """Yields the numbers of the leaves of each message of a round."""
  groups: dict[_Kind, list[list[int]]] = {}
  filled: dict[_Kind, int] = {}
  for i, part in parts.items():
    codec = sent[i].codec
    total = sums.of(codec)
    keeps = sent[i].of_leaf or total.exact
    wide = part.dtype == np.float64
    kind = _Kind(others[i], apart and total.plain, wide, keeps)
    nbytes = part.dtype.itemsize * leaf_rows(codec, part) * codec.row_words
    pieces = groups.setdefault(kind, [[]])
    size = filled.get(kind, 0)
    if message_bytes is not None and pieces[-1] and size + nbytes > message_bytes:
      pieces.append([])
      size = 0
    pieces[-1].append(i)
    filled[kind] = size + nbytes
  for kind, pieces in groups.items():
    yield from ((kind, piece) for piece in pieces)
