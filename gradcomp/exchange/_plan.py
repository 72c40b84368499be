"""The messages of a step: which leaves travel together, and how."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from gradcomp import sums
from gradcomp.codecs import (
  Codec,
  working_dtype,
)
from gradcomp.exchange._all_reduce import AllReduce
from gradcomp.exchange._choice import Auto, Choice, choose, reencoding
from gradcomp.exchange._exchange import Exchange
from gradcomp.layout import Layout, default_min_leaf_size, leaf_codec, leaf_rows, plan
from gradcomp.workers import AxisName


class Message(NamedTuple):
  """Leaves that share the collectives of one exchange.

  Attributes:
    leaves: their numbers in the flattened tree.
    layout: how they become rows.
    exchange: who sends which rows to whom.
    others: axes beside the data axis over which the leaves differ.
    reason: for the exchange.
    workers: N.
  """

  leaves: tuple[int, ...]
  layout: Layout
  exchange: Exchange
  others: tuple[str, ...]
  reason: str
  workers: int


class Plan(NamedTuple):
  """What one transformation sends in a step.

  Attributes:
    paths: the paths of its leaves.
    messages: the messages, with the numbers of those leaves.
    codec: of the large leaves.
    axis_name: the axes that it was given.
  """

  paths: tuple[str, ...]
  messages: tuple[Message, ...]
  codec: Codec
  axis_name: AxisName | None


def plan_messages(
  leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
  others: Sequence[tuple[str, ...]],
  codec: Codec,
  *,
  exchange: Auto | Exchange,
  workers: int,
  min_leaf_size: int | None,
  message_bytes: int | None,
) -> tuple[Message, ...]:
  """Cuts a list of leaves into messages.

  One message, unless

  - ``message_bytes`` asks for more: consecutive leaves share a message as long as its
    payload is not larger;
  - leaves differ over different ``others``: a message has one type;
  - codes are added by ``psum``: dense leaves have no integer codes;
  - leaves are float64, of which there is only a plain sum.

  Args:
    leaves: of the flattened tree.
    others: for each leaf, the axes beside the data axis over which it differs.
    codec: for the large leaves.
    exchange: the one that was asked for.
    workers: N.
    min_leaf_size: elements, or None for the default.
    message_bytes: bytes of a payload, or None for no limit.
  """
  leaves = [
    jax.ShapeDtypeStruct(leaf.shape, working_dtype(codec, leaf.dtype))
    for leaf in leaves
  ]
  total = sums.of(codec)
  total.check(workers)
  addends = workers if exchange.sends else None
  if min_leaf_size is None:
    min_leaf_size = default_min_leaf_size([leaf.size for leaf in leaves], codec)
  decided = None
  if total.drops:  # for all messages, before ranges are cut
    whole = plan(leaves, codec, min_leaf_size=min_leaf_size)
    decided = choose(exchange, whole, workers)
    exchange = decided.exchange
  # Where workers own ranges of rows, every leaf has a row for each of them.
  ranges = workers if exchange.owners else 1
  apart = not total.mixes and isinstance(exchange, AllReduce | Auto)
  groups: dict[tuple[tuple[str, ...], bool, bool], list[list[int]]] = {}
  filled: dict[tuple[tuple[str, ...], bool, bool], int] = {}
  for i, leaf in enumerate(leaves):
    chosen = leaf_codec(leaf, codec, min_leaf_size, ranges, addends)
    wide = leaf.dtype == np.float64
    group = (others[i], apart and sums.of(chosen).plain, wide)
    nbytes = leaf.dtype.itemsize * leaf_rows(chosen, leaf) * chosen.row_words
    pieces = groups.setdefault(group, [[]])
    size = filled.get(group, 0)
    if message_bytes is not None and pieces[-1] and size + nbytes > message_bytes:
      pieces.append([])
      size = 0
    pieces[-1].append(i)
    filled[group] = size + nbytes
  messages = []
  for (axes, dense, wide), pieces in groups.items():
    for piece in pieces:
      layout = plan(
        [leaves[i] for i in piece],
        codec,
        min_leaf_size=min_leaf_size,
        ranges=ranges,
        addends=addends,
      )
      picked = decided or (
        reencoding(exchange, layout, workers)
        if dense
        else choose(exchange, layout, workers)
      )
      if wide and exchange.sends:
        picked = Choice(AllReduce(), "float64 is added as it is")
      message = Message(
        tuple(piece), layout, picked.exchange, axes, picked.reason, workers
      )
      messages.append(message)
  return tuple(messages)
