"""The plan of a step: its messages with their leaves, and the residuals of owners."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.tree_util import KeyPath

from gradcomp._src.codecs.protocol import Codec, Part, tile_shape
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.exchange import layout as layouts
from gradcomp._src.exchange import protocol
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.mesh.axes import Axes, AxisName, axis_names

# Owner residuals by the axes that stack them: ("data",), or ("data", "model") for
# leaves that are sharded over a model axis.
OwnerResiduals = dict[Axes, tuple[jax.Array, ...]]

MessageBytes = int | Literal["auto"] | None

_NUMBER = re.compile("[0-9]+")

# Beside its bytes a message takes two collectives, and the kernels of its codecs: 20 to
# 50 us on a GPU. 4 MiB take 340 us at 100 Gbit/s. They are 8 M elements
# at 4 bits; PyTorch's DDP sends 6.6 M at once, 25 MB.
_LEAST = 4 * 2**20
# Each of N owners receives a share, which starts anew. That takes about 10 us, like
# 128 KiB at 100 Gbit/s.
_LEAST_SHARE = 128 * 2**10
# All messages but the last can travel under the backward pass. More of them would hide
# another 16th at most, but each takes its time to trace and to compile.
_MOST = 16

MADE_FOR_SHARDS = (
  "make the state by optimizer.init with this transformation and as many workers, "
  "inside the map or under jax.set_mesh(mesh), or for shards of a model by "
  "gradcomp.init_state(..., param_specs=) with the specs of the gradients; and pass it "
  "through with gradcomp.state_specs."
)


class MessagePlan(NamedTuple):
  """The messages that one transformation sends in a step."""

  names: tuple[str, ...]  # the name of each leaf, like "['layer']['kernel']"
  leaves: tuple[Leaf, ...]  # the shapes and paths to which codecs were bound
  others: tuple[tuple[str, ...], ...]  # other axes over which each leaf varies
  codecs: tuple[Codec, ...]  # the codec of each leaf
  rules: tuple[str, ...]  # the rule that chose each codec; "" without a policy
  messages: tuple[protocol.Message, ...]  # the messages, by averages
  axis_name: AxisName | None  # the axes of the workers, or None
  workers: int  # their number N
  is_sum: bool  # whether they take the sum of their leaves, in place of the mean
  feedback: bool  # whether workers keep residuals

  @property
  def sends(self) -> bool:
    """True if workers exchange anything."""
    return any(message.exchange.sends for message in self.messages)

  @property
  def group(self) -> Workers:
    """The workers that exchange."""
    scale = 1 if self.is_sum else 1 / self.workers
    return Workers(self.axis_name or (), self.workers, scale)

  def own_axes(self, number: int) -> Axes:
    """Returns the axes that stack a worker's arrays of a leaf."""
    return own_axes(self.axis_name, self.others[number])


def own_axes(axis_name: AxisName | None, others: tuple[str, ...]) -> Axes:
  """Returns the axes that stack arrays which differ between workers."""
  return (*(() if axis_name is None else axis_names(axis_name)), *others)


# What all leaves of a message share: the number of their average in a step, the other
# axes over which they vary, and whether they are plain ones that are added apart from
# codes, and of float64.
Kind = tuple[int, tuple[str, ...], bool, bool]


def kinds_of(
  codecs: Sequence[Codec],
  like: Sequence[jax.ShapeDtypeStruct],
  others: Sequence[tuple[str, ...]],
  apart: bool,
) -> dict[Kind, dict[int, tuple[Part, int]]]:
  """Returns the arrays of each kind with their bytes, by the numbers of leaves."""
  kinds: dict[Kind, dict[int, tuple[Part, int]]] = {}
  for i, (codec, leaf) in enumerate(zip(codecs, like, strict=True)):
    for turn, part in enumerate(codec.parts(leaf)):
      array, own, _ = part
      kind = turn, others[i], apart and own.facts.plain, array.dtype == np.float64
      words = layouts.rows_of(own, array.size) * own.row_words
      kinds.setdefault(kind, {})[i] = part, array.dtype.itemsize * words
  return dict(sorted(kinds.items(), key=lambda kind: kind[0][0]))  # by averages


class OwnedMatrix(NamedTuple):
  """The matrix ``group`` of a message, with an owner residual of ``shape``."""

  number: int  # of the message
  message: protocol.Message
  group: int
  shape: tuple[int, ...]

  @property
  def codec(self) -> Codec:
    """The codec of its rows."""
    return self.message.layout.codecs[self.group]

  def leaves(self) -> Iterator[tuple[int, layouts.Slot, jax.ShapeDtypeStruct]]:
    """Returns the number, the rows and the shape of each leaf in the matrix."""
    leaves, layout = self.message.leaves, self.message.layout
    every = zip(leaves, layout.slots, layout.like, strict=True)
    return (leaf for leaf in every if leaf[1].group == self.group)


def owned_matrices(plan: MessagePlan) -> dict[Axes, list[OwnedMatrix]]:
  """Lists the matrices with an owner residual, by mesh axes, in the state's order."""
  result: dict[Axes, list[OwnedMatrix]] = {}
  for number, message in enumerate(plan.messages):
    layout, exchange = message.layout, message.exchange
    if not (exchange.owners and exchange.feedback) or layout.replaced:
      continue
    axes = own_axes(plan.axis_name, message.others)
    for group, (rows, codec) in enumerate(zip(layout.rows, layout.codecs, strict=True)):
      # Owners of exact sums keep none. If a codec rounds sums at random in any case,
      # they keep one only if workers keep residuals, too: else the errors would add up.
      keeps = plan.feedback or not codec.to_nearest().needs_key
      if rows and keeps and not codec.facts.exact:
        shape = -(-rows // plan.workers), *tile_shape(codec)
        found = OwnedMatrix(number, message, group, shape)
        result.setdefault(axes, []).append(found)
  return result


def owner_shapes(plan: MessagePlan) -> dict[Axes, list[tuple[int, ...]]]:
  """Returns the shapes of a worker's owner residuals, by axes."""
  matrices = owned_matrices(plan)
  return {axes: [x.shape for x in found] for axes, found in matrices.items()}


def owner_residuals(
  plan: MessagePlan, stored: OwnerResiduals | None
) -> dict[tuple[int, int], jax.Array]:
  """Returns the owner residuals by message and codec; ValueError for other shapes."""
  if stored is None:
    return {}
  matrices = owned_matrices(plan)
  for axes in {**matrices, **stored}:
    need = [x.shape for x in matrices.get(axes, [])]
    got = [x.shape for x in stored.get(axes, ())]
    if got != need:
      raise ValueError(
        f"`state.server_residual`[{axes!r}] must have arrays of the shapes {need} "
        f"for the second stage, got {got or 'none'}; {MADE_FOR_SHARDS}"
      )
  return {
    (x.number, x.group): array
    for axes, own in matrices.items()
    for x, array in zip(own, stored[axes], strict=True)
  }


def as_stored(
  plan: MessagePlan, residuals: Sequence[Sequence[jax.Array | None]]
) -> OwnerResiduals:
  """Returns each codec's owner residual, by message, as a state keeps them."""
  of: Any = lambda x: residuals[x.number][x.group]
  return {axes: tuple(map(of, own)) for axes, own in owned_matrices(plan).items()}


def automatic_bytes(payload: int, workers: int) -> int:
  """Returns the largest of 4 MiB, 128 KiB a worker, and a 16th of the payload."""
  return max(_LEAST, _LEAST_SHARE * workers, -(-payload // _MOST))


def cut(
  message_bytes: MessageBytes,
  sizes: Mapping[int, int],
  paths: Sequence[KeyPath],
  workers: int,
) -> list[list[int]]:
  """Cuts leaves, by their numbers and bytes, into messages: the numbers in each."""
  if message_bytes is None:
    return [list(sizes)]
  if message_bytes != "auto":  # a leaf that is larger has a message of its own
    return layouts.pieces(sizes, lambda filled, size: filled + size > message_bytes)
  payload = sum(sizes.values())
  least = automatic_bytes(payload, workers)
  if payload <= least:
    return [list(sizes)]
  own = {i: sizes[i] for i in _last_first(paths) if i in sizes}
  pieces = layouts.pieces(own, lambda filled, _: filled >= least)
  # The backward pass of less than a quarter is too short for a message to hide in.
  if len(pieces) > 1 and 4 * sum(sizes[i] for i in pieces[-1]) < least:
    pieces[-2:] = [pieces[-2] + pieces[-1]]
  return [sorted(piece) for piece in reversed(pieces)]


def _last_first(paths: Sequence[KeyPath]) -> list[int]:
  """Orders leaves by the backward pass, as far as a tree shows it: the last first."""
  # Names that differ in numbers have the order of these: "layer_10" is after "layer_9".

  def name(step: Any) -> str:
    found = getattr(step, "key", getattr(step, "name", None))
    return found if isinstance(found, str) else ""

  kind = lambda step: _NUMBER.sub("0", name(step)) or step  # without its numbers
  first: dict[Any, int] = {}  # the first leaf below each node, and each kind of name
  for i, path in enumerate(paths):
    for depth, step in enumerate(path):
      first.setdefault(path[: depth + 1], i)
      first.setdefault((path[:depth], kind(step)), i)

  def rank(i: int) -> list[tuple[int, list[int], int]]:
    path, steps = paths[i], []
    for depth, step in enumerate(path):
      group, own = first[path[:depth], kind(step)], first[path[: depth + 1]]
      steps.append((group, [int(x) for x in _NUMBER.findall(name(step))], own))
    return steps

  return sorted(range(len(paths)), key=rank, reverse=True)
