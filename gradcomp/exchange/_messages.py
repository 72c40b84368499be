"""All messages of a step, and the residuals of their second stages."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp import sums
from gradcomp.exchange._average import Residuals, average
from gradcomp.exchange._collectives import Workers
from gradcomp.exchange._contribution import Keys
from gradcomp.exchange._notes import noted
from gradcomp.exchange._plan import Message
from gradcomp.exchange._selected import Thresholds, stack_axes
from gradcomp.workers import Axes, AxisName

# The second stages' residuals by the axes that stack them: ("data",), or ("data",
# "model") of leaves that are sharded over a model axis.
OwnerResiduals = dict[Axes, tuple[jax.Array, ...]]


class Exchanged(NamedTuple):
  """What :func:`average_messages` returns.

  Attributes:
    mean: of each leaf.
    unsent: what this worker did not send of each, in the units of the leaves; an empty
      list where nobody asked.
    owned: the new residuals of the second stage.
    sent: for each message this worker's own rows, or None.
  """

  mean: list[jax.Array]
  unsent: list[jax.Array]
  owned: OwnerResiduals | None
  sent: list[list[jax.Array] | None]


def owner_shapes(
  messages: Sequence[Message], workers: int, axis_name: AxisName
) -> dict[Axes, list[tuple[int, int]]]:
  """The shapes of what one worker keeps of the rows that it owns, where they lose."""
  result: dict[Axes, list[tuple[int, int]]] = {}
  for message in messages:
    shapes = [shape for shape in _shapes(message, workers) if shape is not None]
    if shapes:
      result.setdefault(stack_axes(axis_name, message), []).extend(shapes)
  return result


def average_messages(
  messages: Sequence[Message],
  leaves: Sequence[jax.Array],
  keys: jax.Array | None,
  workers: Workers | None,
  *,
  owned: OwnerResiduals | None,
  memory: jax.Array | None,
  thresholds: Sequence[Thresholds],
  keep: bool,
) -> Exchanged:
  """The mean of all workers' leaves, and what was lost.

  Args:
    messages: the plan, which holds every leaf once.
    leaves: float32 arrays.
    keys: ``uint32[leaves + codecs of all messages, 2]``, or None.
    workers: who exchanges; None to exchange nothing.
    owned: the residuals of the second stage, in :func:`owner_shapes`, or None.
    memory: of the codec that has one.
    thresholds: for each message those that its codecs use again.
    keep: whether to return what was not sent.
  """
  mean: dict[int, jax.Array] = {}
  unsent: dict[int, jax.Array] = {}
  waiting = {axes: list(arrays) for axes, arrays in (owned or {}).items()}
  kept: dict[Axes, list[jax.Array]] = {axes: [] for axes in waiting}
  sent: list[list[jax.Array] | None] = []
  stage = len(leaves)
  for message, again in zip(messages, thresholds, strict=True):
    stop = stage + len(message.layout.codecs)
    message_keys = None
    if keys is not None:
      message_keys = Keys(keys[jnp.array(message.leaves)], keys[stage:stop])
    stage = stop
    residuals: Residuals = [None] * len(message.layout.codecs)
    axes = () if workers is None else stack_axes(workers.axis_name, message)
    if owned is not None and workers is not None:
      shapes = _shapes(message, workers.size)
      residuals = [_take(waiting, axes, shape) for shape in shapes]
    with jax.named_scope(f"gradcomp_{message.exchange.name}"), noted(message):
      outcome = average(
        message,
        [leaves[i] for i in message.leaves],
        message_keys,
        workers,
        residuals=residuals,
        memory=memory,
        thresholds=again,
        keep=keep,
      )
    sent.append(outcome.sent)
    for i, number in enumerate(message.leaves):
      mean[number] = outcome.mean[i]
      if keep:
        assert outcome.unsent is not None
        unsent[number] = outcome.unsent[i]
    if axes in kept:
      kept[axes] += [x for x in outcome.residuals if x is not None]
  if owned is not None and workers is not None:
    _check_all_taken(waiting)
    owned = {axes: tuple(arrays) for axes, arrays in kept.items()}
  return Exchanged(_in_order(mean), _in_order(unsent), owned, sent)


def _in_order(arrays: dict[int, jax.Array]) -> list[jax.Array]:
  return [arrays[i] for i in sorted(arrays)]


def _shapes(message: Message, workers: int) -> list[tuple[int, int] | None]:
  """For each codec of a message, ``[share, tile_size]`` where a residual is kept."""
  layout = message.layout
  if not message.exchange.owners:
    return [None] * len(layout.codecs)
  return [
    (-(-rows // workers), codec.tile_size)
    if rows and not sums.of(codec).exact
    else None
    for codec, rows in zip(layout.codecs, layout.rows, strict=True)
  ]


def _take(
  waiting: dict[Axes, list[jax.Array]],
  axes: Axes,
  shape: tuple[int, int] | None,
) -> jax.Array | None:
  if shape is None:
    return None
  array = waiting[axes].pop(0) if waiting.get(axes) else None
  if array is None or array.shape != shape:
    got = "none" if array is None else array.shape
    raise ValueError(
      f"`state.owner_residual`[{axes!r}] must have an array of the shape {shape} here, "
      f"got {got}; make the state by optimizer.init with as many workers, inside the "
      "map or under jax.set_mesh(mesh), and pass it through with gradcomp.state_specs."
    )
  return array


def _check_all_taken(waiting: dict[Axes, list[jax.Array]]) -> None:
  for axes, arrays in waiting.items():
    if arrays:
      raise ValueError(
        f"`state.owner_residual`[{axes!r}] must have what the second stage keeps here, "
        f"got {len(arrays)} arrays too many; make the state by optimizer.init with "
        "this transformation and as many workers."
      )
