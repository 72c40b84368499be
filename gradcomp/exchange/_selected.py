"""What a worker remembers of its own selections: thresholds, and how much was sent."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp.codecs import Codec, SelectingCodec
from gradcomp.exchange._plan import Message
from gradcomp.layout import leaf_rows
from gradcomp.workers import Axes, AxisName, axis_names, mark_varying


class Selected(NamedTuple):
  """Of the rows of all leaves that a worker selected from, in the order of messages."""

  threshold: jax.Array  # float32[rows]: the smallest magnitude sent at the last search
  used: jax.Array  # int32[rows]: entries sent in this step


# By the axes that stack the workers' own, as in OwnerResiduals.
Selections = dict[Axes, Selected]

Thresholds = list[jax.Array | None]  # for each leaf of a message


def selected_rows(
  codec: Codec, messages: Sequence[Message], axis_name: AxisName | None
) -> dict[Axes, int]:
  """The rows that one worker selects from, by the axes over which they differ."""
  return {
    axes: rows.stop
    for _, _, axes, rows in _places(codec, messages, axis_name)
    if rows.stop
  }


def recall(
  codec: Codec,
  selections: Selections | None,
  messages: Sequence[Message],
  step: jax.Array,
  axis_name: AxisName | None,
) -> list[Thresholds]:
  """The thresholds to use again, for each leaf of each message.

  ``float32[rows]``, zeros in steps that search anew; None for leaves without.
  """
  result: list[Thresholds] = [[None] * len(message.leaves) for message in messages]
  if not isinstance(codec, SelectingCodec) or not codec.reuses:
    return result
  again = step % codec.interval != 0
  for number, leaf, axes, rows in _places(codec, messages, axis_name):
    old = _thresholds(selections, axes)
    if old.shape[0] < rows.stop:
      raise ValueError(
        f"`state.selection`[{axes!r}] must have a threshold for each of at least "
        f"{rows.stop} rows, got {old.shape[0]}; give axis_name=, and make the state "
        "by optimizer.init with as many workers, inside the map or under "
        "jax.set_mesh(mesh), and pass it through with gradcomp.state_specs."
      )
    if _selects(messages[number], leaf):
      _, first, last = messages[number].layout.slots[leaf]
      own = old[rows.start : rows.start + last - first]
      result[number][leaf] = jnp.where(again, own, 0.0)
  return result


def remember(
  codec: Codec,
  selections: Selections | None,
  messages: Sequence[Message],
  again: Sequence[Thresholds],
  sent: Sequence[list[jax.Array] | None],
  axis_name: AxisName | None,
) -> Selections | None:
  """The selections of this step; those of the last of what does not select.

  Args:
    codec: of the large leaves.
    selections: of the last step; None to remember nothing.
    messages: the plan.
    again: what :func:`recall` gave.
    sent: this worker's own rows for each message and codec.
    axis_name: the axes of the workers.
  """
  if selections is None:
    return None
  parts: dict[Axes, list[Selected]] = {}
  for message, thresholds, matrices in zip(messages, again, sent, strict=True):
    if rows := _rows(codec, message):
      own = parts.setdefault(stack_axes(axis_name, message), [])
      own.append(_selected(message, rows, thresholds, matrices))
  made = {
    axes: Selected(*map(jnp.concatenate, zip(*own, strict=True)))
    for axes, own in parts.items()
  }
  if axis_name is not None:  # dense leaves' are constants, and are typed as such
    made = {axes: mark_varying(own, axes) for axes, own in made.items()}
  return {axes: made.get(axes, old) for axes, old in selections.items()}


def used_entries(
  codec: Codec,
  selections: Selections | None,
  axis_name: AxisName | None,
  messages: Sequence[Message],
) -> dict[int, float]:
  """Entries that a worker sent of each leaf, by its number: the mean over workers.

  Of a state that holds numbers, not of one inside a transformed function.
  """
  totals = selected_rows(codec, messages, axis_name)
  result = {}
  for number, leaf, axes, rows in _places(codec, messages, axis_name):
    found = (selections or {}).get(axes)
    if found is None or isinstance(found.used, jax.core.Tracer):
      continue
    message, total = messages[number], totals[axes]
    if found.used.size != total * (message.workers if axis_name is not None else 1):
      raise ValueError(
        f"`opt_state` must be that of {message.workers} workers with {total} rows "
        f"each, got {found.used.size} rows."
      )
    used = np.asarray(found.used).reshape(-1, total).mean(axis=0)
    result[message.leaves[leaf]] = float(used[rows].sum())
  return result


def stack_axes(axis_name: AxisName | None, message: Message) -> Axes:
  """Returns the axes over which workers' own arrays of a message are stacked."""
  names = () if axis_name is None else axis_names(axis_name)
  return (*names, *message.others)


def _selected(
  message: Message,
  rows: Sequence[int],
  again: Thresholds,
  matrices: list[jax.Array] | None,
) -> Selected:
  """Of the rows that are remembered of each leaf of a message.

  Read from its matrices at once and then put in order: leaf by leaf, there would be
  several programs for each.
  """
  layout = message.layout
  found: list[Selected] = []
  first: dict[int, int] = {}  # row of a group among those that are found
  total = 0
  for group, codec in enumerate(layout.codecs):
    if matrices is not None and isinstance(codec, SelectingCodec):
      words = matrices[group]
      found.append(Selected(codec.thresholds(words), codec.used(words)))
      first[group] = total
      total += words.shape[0]
  sizes = [like.size for like in layout.like]  # all of a dense leaf is sent
  constants = np.array([*sizes, 0], np.int32)
  found.append(
    Selected(jnp.zeros(constants.shape, jnp.float32), jnp.asarray(constants))
  )
  place: list[int] = []
  for leaf, ((group, start, stop), count) in enumerate(
    zip(layout.slots, rows, strict=True)
  ):
    own = list(range(start, stop)) if group in first else [total + leaf][:count]
    place += [first.get(group, 0) + row for row in own]
    place += [total + len(sizes)] * (count - len(own))
  every = Selected(*map(jnp.concatenate, zip(*found, strict=True)))
  threshold, used = (x[np.array(place, np.int32)] for x in every)
  if any(old is not None for old in again):
    parts = [
      jnp.zeros(count, jnp.float32)
      if old is None
      else jnp.pad(old, (0, count - old.size))
      for old, count in zip(again, rows, strict=True)
    ]
    old = jnp.concatenate(parts)
    threshold = jnp.where(old > 0, old, threshold)
  return Selected(threshold, used)


def _places(
  codec: Codec, messages: Sequence[Message], axis_name: AxisName | None
) -> Iterator[tuple[int, int, Axes, slice]]:
  """Where what is remembered of a leaf lies: the numbers of its message and of it in
  the message, the axes that stack the array, and its rows there."""
  taken: dict[Axes, int] = {}
  for number, message in enumerate(messages):
    axes = stack_axes(axis_name, message)
    for leaf, count in enumerate(_rows(codec, message)):
      start = taken.get(axes, 0)
      taken[axes] = start + count
      yield number, leaf, axes, slice(start, start + count)


def _rows(codec: Codec, message: Message) -> list[int]:
  """For each leaf of a message the most rows that there are to select from.

  Which leaves are dense, and whether they are cut into ranges, depends on the density;
  how much is remembered does not, so that densities can follow one another.
  """
  if not isinstance(codec, SelectingCodec) or not message.exchange.of_leaves:
    return []  # which selects from sums of groups
  return [
    leaf_rows(codec.ranged(like.size, message.workers), like)
    for like in message.layout.like
  ]


def _selects(message: Message, leaf: int) -> bool:
  codec = message.layout.codecs[message.layout.slots[leaf].group]
  return isinstance(codec, SelectingCodec)


def _thresholds(selections: Selections | None, axes: Axes) -> jax.Array:
  found = (selections or {}).get(axes)
  return jnp.zeros(0, jnp.float32) if found is None else found.threshold
