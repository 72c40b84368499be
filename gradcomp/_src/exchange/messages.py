"""The exchange of all messages of a step, with the owner residuals."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.rounds import in_rounds
from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.codecs.tiles import tile_shape
from gradcomp._src.exchange.average import Outcome, Residuals, average, refit
from gradcomp._src.exchange.collectives import Workers, own_rows
from gradcomp._src.exchange.keys import Keys
from gradcomp._src.exchange.layout import Slot
from gradcomp._src.exchange.notes import note, noted
from gradcomp._src.exchange.plan import Message, MessagePlan, own_axes
from gradcomp._src.mesh.axes import Axes

# Owner residuals by the axes that stack them: ("data",), or ("data", "model") for
# leaves that are sharded over a model axis.
OwnerResiduals = dict[Axes, tuple[jax.Array, ...]]


class Exchanged(NamedTuple):
  """The result of :func:`average_leaves`.

  Attributes:
    mean: the mean of each leaf.
    unsent: the unsent part of each leaf, in the units of the leaf; an empty list
      without ``keep``.
    chosen: for each leaf, the flat positions of the elements that this worker sent;
      None if it sent all of them, or without ``mark``.
    owned: the new owner residuals, or None.
    memory: the new memory of each leaf.
    sent: decodes this worker's payload of each leaf, when it is called.
  """

  mean: list[jax.Array]
  unsent: list[jax.Array]
  chosen: list[jax.Array | None]
  owned: OwnerResiduals | None
  memory: list[Memory]
  sent: Callable[[], list[jax.Array]] = list


class OwnedMatrix(NamedTuple):
  """A matrix of rows with an owner residual of ``shape``, ``[share, *tile_shape]``.

  ``group`` is the number of the matrix, and of its codec, in the message.
  """

  message: Message
  group: int
  shape: tuple[int, ...]

  @property
  def codec(self) -> Codec:
    """The codec of its rows."""
    return self.message.layout.codecs[self.group]

  def leaves(self) -> Iterator[tuple[int, Slot, jax.ShapeDtypeStruct]]:
    """Yields the number, the rows and the shape of each leaf in the matrix."""
    layout = self.message.layout
    for leaf, slot, like in zip(
      self.message.leaves, layout.slots, layout.like, strict=True
    ):
      if slot.group == self.group:
        yield leaf, slot, like


def owned_matrices(plan: MessagePlan) -> dict[Axes, list[OwnedMatrix]]:
  """Lists the matrices with an owner residual, by mesh axes, in the state's order."""
  result: dict[Axes, list[OwnedMatrix]] = {}
  for message in plan.messages:
    for group, shape in enumerate(_shapes(plan, message)):
      if shape is not None:
        axes = own_axes(plan.axis_name, message.others)
        matrix = OwnedMatrix(message, group, shape)
        result.setdefault(axes, []).append(matrix)
  return result


def owner_shapes(plan: MessagePlan) -> dict[Axes, list[tuple[int, ...]]]:
  """Returns the shapes of a worker's owner residuals, by axes."""
  matrices = owned_matrices(plan)
  return {axes: [x.shape for x in found] for axes, found in matrices.items()}


def owned_leaves(plan: MessagePlan, worker: jax.Array) -> dict[Axes, list[jax.Array]]:
  """Returns the leaf number of each row of a worker's owner residuals, by axes.

  There is one array for each of :func:`owner_shapes`, ``int32[share]``. Rows that fill
  up the last shares have the number of leaves.
  """

  def numbers(matrix: OwnedMatrix) -> jax.Array:
    rows = own_rows(matrix.shape[0], worker)
    places = matrix.message.layout.leaf_of_row(matrix.group, rows)
    return jnp.asarray([*matrix.message.leaves, len(plan.names)])[places]

  matrices = owned_matrices(plan)
  return {axes: list(map(numbers, found)) for axes, found in matrices.items()}


def average_leaves(
  plan: MessagePlan,
  leaves: Sequence[jax.Array],
  keys: Keys,
  workers: Workers | None,
  *,
  owned: OwnerResiduals | None,
  memory: Sequence[Memory],
  step: jax.Array,
  keep: bool,
  mark: bool,
) -> Exchanged:
  """Averages leaves over all workers, message by message and round by round.

  Args:
    plan: the messages of the step.
    leaves: float32 arrays.
    keys: the keys of this worker and step.
    workers: the workers that exchange; None to exchange nothing.
    owned: the owner residuals, in the shapes of :func:`owner_shapes`, or None.
    memory: the memory of each leaf.
    step: the number of the step, ``int32[]``.
    keep: whether to return the unsent parts.
    mark: whether to return the positions of the sent elements.

  Raises:
    ValueError: the owner residuals do not have the shapes that the plan needs.
  """
  note(plan, step)
  memory = refit(plan, leaves, memory, step)
  waiting = {axes: list(arrays) for axes, arrays in (owned or {}).items()}
  kept: dict[Axes, list[jax.Array]] = {axes: [] for axes in waiting}
  stages = iter(keys.stages)

  def send(message: Message, arrays: dict[int, jax.Array]) -> Outcome:
    count = len(message.layout.codecs)
    residuals: Residuals = [None] * count
    axes = own_axes(plan.axis_name, message.others)
    if owned is not None:
      residuals = [_take(waiting, axes, shape) for shape in _shapes(plan, message)]
    with jax.named_scope(f"gradcomp_{message.exchange.name}"), noted(message):
      leaf_keys = [keys.leaves[i] for i in message.leaves]
      outcome = average(
        message,
        [arrays[i] for i in message.leaves],
        Keys(
          [key and key.in_round(message.round) for key in leaf_keys],
          [next(stages) for _ in range(count)],
        ),
        workers,
        residuals=residuals,
        memory=[memory[i] for i in message.leaves],
        step=step,
        keep=keep,
        mark=mark,
      )
    if axes in kept:
      kept[axes] += [x for x in outcome.residuals if x is not None]
    return outcome

  mean: dict[int, jax.Array] = {}
  unsent: dict[int, jax.Array] = {}
  chosen: dict[int, jax.Array | None] = {}
  own = {i: x.own for i, x in enumerate(memory)}
  outcomes: list[tuple[Message, Outcome]] = []
  talk = in_rounds(plan.codecs, leaves, [x.shared for x in memory])
  arrays = next(talk)
  for number in range(plan.rounds):
    for message in plan.messages:
      if message.round == number:
        outcome = send(message, arrays)
        outcomes.append((message, outcome))
        mean |= zip(message.leaves, outcome.mean, strict=True)
        chosen |= zip(message.leaves, outcome.chosen, strict=True)
        unsent |= zip(message.leaves, outcome.unsent or (), strict=keep)
        own |= zip(message.leaves, outcome.own or (), strict=outcome.own is not None)
    try:
      arrays = talk.send(mean)
    except StopIteration as end:
      restored, shared = end.value
  if plan.axis_name is not None and not plan.sends:
    shared = [x.shared for x in memory]  # or it would no longer be equal on all
  for i, leaf in restored.items():
    mean[i] = leaf
    if keep:
      unsent[i] = leaves[i] - _per_worker(leaf, workers)
  if owned is not None:
    _check_all_taken(waiting)
    owned = {axes: tuple(arrays) for axes, arrays in kept.items()}
  count = range(len(leaves))

  def sent() -> list[jax.Array]:
    found: dict[int, jax.Array] = {}
    for message, outcome in outcomes:
      found |= zip(message.leaves, outcome.sent(), strict=True)
    found |= {i: _per_worker(leaf, workers) for i, leaf in restored.items()}
    return [found[i] for i in count]

  return Exchanged(
    [mean[i] for i in count],
    [unsent[i] for i in count if keep],
    [chosen[i] for i in count],
    owned,
    [Memory(shared[i], own[i]) for i in count],
    sent,
  )


def _per_worker(mean: jax.Array, workers: Workers | None) -> jax.Array:
  """Returns each worker's part of a mean (all of it) or of a sum (an Nth)."""
  if workers is None or workers.scale != 1:
    return mean
  return mean / workers.size


def _shapes(plan: MessagePlan, message: Message) -> list[tuple[int, ...] | None]:
  """Returns the shape of each codec's owner residual; None for one without."""
  layout = message.layout
  exchange = message.exchange
  if not (exchange.owners and exchange.keeps and message.keeps):
    return [None] * len(layout.codecs)

  # Owners of exact sums keep none. If a codec rounds sums at random in any case, they
  # keep one only if workers keep residuals, too: else the errors would add up.
  def keeps(codec: Codec) -> bool:
    draws = codec.to_nearest().needs_key
    return not codec.facts.exact and (plan.feedback or not draws)

  return [
    (-(-rows // plan.workers), *tile_shape(codec)) if rows and keeps(codec) else None
    for codec, rows in zip(layout.codecs, layout.rows, strict=True)
  ]


def _take(
  waiting: dict[Axes, list[jax.Array]],
  axes: Axes,
  shape: tuple[int, ...] | None,
) -> jax.Array | None:
  if shape is None:
    return None
  array = waiting[axes].pop(0) if waiting.get(axes) else None
  if array is None or array.shape != shape:
    got = "none" if array is None else array.shape
    raise ValueError(
      f"`state.server_residual`[{axes!r}] must have an array of the shape {shape}, "
      f"got {got}; make the state by optimizer.init with as many workers, inside the "
      "map or under jax.set_mesh(mesh), and pass it through with gradcomp.state_specs."
    )
  return array


def _check_all_taken(waiting: dict[Axes, list[jax.Array]]) -> None:
  for axes, arrays in waiting.items():
    if arrays:
      raise ValueError(
        f"`state.server_residual`[{axes!r}] must have what the second stage keeps, "
        f"got {len(arrays)} arrays too many; make the state by optimizer.init with "
        "this transformation and as many workers."
      )
