"""The messages of a step: the leaves of each, their layout and exchange."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.tree_util import KeyPath, keystr

from gradcomp._src.codecs.protocol import Codec, LeafCodec, Round
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.codecs.sums.sum import sum_limit
from gradcomp._src.codecs.tiles import working_dtype
from gradcomp._src.exchange.assign import leaf_codecs, leaf_rows
from gradcomp._src.exchange.auto import Auto, Choice, choose, reencoding
from gradcomp._src.exchange.layout import Layout, arrange, plan_rows
from gradcomp._src.exchange.one_stage import AllReduce
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh.axes import Axes, AxisName, axis_names


class Message(NamedTuple):
  """The leaves that share the collectives of one exchange.

  Attributes:
    leaves: the numbers of the leaves in the flattened tree.
    layout: the place of each leaf in the rows.
    exchange: the exchange that sends them.
    others: the other axes, over which the leaves vary.
    reason: the reason for the exchange.
    round: the number of the round that sends the message.
    keeps: whether owners may keep residuals of it.
  """

  leaves: tuple[int, ...]
  layout: Layout
  exchange: Exchange
  others: tuple[str, ...]
  reason: str
  round: int = 0
  keeps: bool = True


class MessagePlan(NamedTuple):
  """The messages that one transformation sends in a step.

  Attributes:
    names: the name of each leaf, like "['layer']['kernel']".
    leaves: the shapes and paths to which codecs were bound.
    others: for each leaf, its other axes, over which it varies.
    codecs: the codec of each leaf.
    rules: the rule that chose each codec; "" without a policy.
    messages: the messages, round by round.
    axis_name: the axes of the workers, or None.
    workers: the number of workers N.
    feedback: whether workers keep residuals.
  """

  names: tuple[str, ...]
  leaves: tuple[Leaf, ...]
  others: tuple[tuple[str, ...], ...]
  codecs: tuple[Codec, ...]
  rules: tuple[str, ...]
  messages: tuple[Message, ...]
  axis_name: AxisName | None
  workers: int
  feedback: bool

  @property
  def sends(self) -> bool:
    """True if workers exchange anything."""
    return any(message.exchange.sends for message in self.messages)

  @property
  def of_leaves(self) -> bool:
    """True if each worker encodes its leaves before anything is added."""
    return all(message.exchange.of_leaves for message in self.messages)

  def own_axes(self, number: int) -> Axes:
    """Returns the axes that stack a worker's arrays of a leaf."""
    return own_axes(self.axis_name, self.others[number])


def own_axes(axis_name: AxisName | None, others: tuple[str, ...]) -> Axes:
  """Returns the axes that stack arrays which differ between workers."""
  return (*(() if axis_name is None else axis_names(axis_name)), *others)


class PlanOptions(NamedTuple):
  """The options of a transformation that decide its messages.

  Attributes:
    codec: the codec of the large leaves.
    exchange: the exchange that was asked for.
    min_leaf_size: the smallest size of a large leaf, or None for the default.
    message_bytes: the limit in bytes, or None for no limit.
    feedback: whether workers keep residuals.
  """

  codec: LeafCodec
  exchange: Auto | Exchange
  min_leaf_size: int | None = None
  message_bytes: int | None = None
  feedback: bool = False


def plan_messages(
  leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
  paths: Sequence[KeyPath],
  others: Sequence[tuple[str, ...]],
  options: PlanOptions,
  *,
  axis_name: AxisName | None,
  workers: int,
) -> MessagePlan:
  """Splits a list of leaves into messages.

  A round has one message, unless one of these rules makes more.

  - ``message_bytes`` limits the payload of a message. Consecutive leaves share one as
    long as they fit.
  - Leaves that vary over different ``others`` cannot share a message, which has one
    type.
  - Dense leaves have no integer codes, so that they cannot share a message with codes
    that ``psum`` adds.
  - Owners keep owner residuals of leaves, but not of the arrays that a codec averages
    in a leaf's place.
  - Leaves of float64 are only added plainly.

  ``paths`` are those of the leaves, and ``others`` the other axes of each, over which
  it varies. ValueError if sums of N workers' codes do not fit in 32 bits, or a rule of
  a policy matches no leaf.
  """
  codec, exchange, min_leaf_size, message_bytes, feedback = options
  like = [
    jax.ShapeDtypeStruct(leaf.shape, working_dtype(codec, leaf.dtype))
    for leaf in leaves
  ]
  facts = codec.facts
  sum_limit(facts.max_code, workers, codec)
  addends = workers if exchange.sends else None
  whole = [
    Leaf(leaf.shape, path=keystr(path, simple=True, separator="/"))
    for leaf, path in zip(leaves, paths, strict=True)
  ]
  codec.check_leaves(whole)
  decided = None
  if facts.drops:  # one exchange for all, before leaves are split into ranges
    layout = plan_rows(like, codec, min_leaf_size=min_leaf_size, places=whole)
    decided = choose(exchange, layout, workers)
    exchange = decided.exchange
  # If workers own shares, every leaf of a sparse codec has a range for each worker.
  ranges = workers if exchange.owners else 1
  bound = [leaf._replace(addends=addends, ranges=ranges) for leaf in whole]
  codecs = leaf_codecs(bound, codec, min_leaf_size=min_leaf_size)
  rounds = [c.rounds(x.shape) for c, x in zip(codecs, like, strict=True)]
  count = max(map(len, rounds), default=1)
  apart = facts.max_code > 0 and isinstance(exchange, AllReduce | Auto)
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
          number,
          kind.keeps,
        )
      )
  return MessagePlan(
    tuple(map(keystr, paths)),
    tuple(bound),
    tuple(others),
    tuple(codecs),
    tuple(codec.rule(leaf) for leaf in whole),
    tuple(messages),
    axis_name,
    workers,
    feedback,
  )


class _Kind(NamedTuple):
  """The properties that all leaves of a message share."""

  others: tuple[str, ...]
  plain: bool  # True for plain leaves that are added apart from codes
  wide: bool
  keeps: bool


def _pieces(
  parts: dict[int, jax.ShapeDtypeStruct],
  sent: dict[int, Round],
  others: Sequence[tuple[str, ...]],
  apart: bool,
  message_bytes: int | None,
) -> Iterator[tuple[_Kind, list[int]]]:
  """Yields the kind and the leaf numbers of each message of a round."""
  groups: dict[_Kind, list[list[int]]] = {}
  filled: dict[_Kind, int] = {}
  for i, part in parts.items():
    codec = sent[i].codec
    facts = codec.facts
    keeps = sent[i].of_leaf or facts.exact
    wide = part.dtype == np.float64
    kind = _Kind(others[i], apart and facts.plain, wide, keeps)
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
