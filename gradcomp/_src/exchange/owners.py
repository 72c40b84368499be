"""Owner residuals: their shapes by plan, and their places in the optimizer state."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.tiles import tile_shape
from gradcomp._src.exchange.layout import Slot
from gradcomp._src.exchange.plan import Message, MessagePlan, own_axes
from gradcomp._src.exchange.shares import own_rows
from gradcomp._src.mesh.axes import Axes

# Owner residuals by the axes that stack them: ("data",), or ("data", "model") for
# leaves that are sharded over a model axis.
OwnerResiduals = dict[Axes, tuple[jax.Array, ...]]

MADE_FOR_SHARDS = (
  "make the state by optimizer.init with this transformation and as many workers, "
  "inside the map or under jax.set_mesh(mesh), or for shards of a model by "
  "gradcomp.init_state(..., param_specs=) with the specs of the gradients; and pass it "
  "through with gradcomp.state_specs."
)


class OwnedMatrix(NamedTuple):
  """The matrix number ``group`` of a message, with an owner residual of ``shape``."""

  message: Message
  group: int
  shape: tuple[int, ...]

  @property
  def codec(self) -> Codec:
    """The codec of its rows."""
    return self.message.layout.codecs[self.group]

  def leaves(self) -> Iterator[tuple[int, Slot, jax.ShapeDtypeStruct]]:
    """Returns the number, the rows and the shape of each leaf in the matrix."""
    leaves, layout = self.message.leaves, self.message.layout
    every = zip(leaves, layout.slots, layout.like, strict=True)
    return (leaf for leaf in every if leaf[1].group == self.group)


def owned_matrices(plan: MessagePlan) -> dict[Axes, list[OwnedMatrix]]:
  """Lists the matrices with an owner residual, by mesh axes, in the state's order."""
  result: dict[Axes, list[OwnedMatrix]] = {}
  for message in plan.messages:
    for group, shape in enumerate(_shapes(plan, message)):
      if shape is not None:
        axes = own_axes(plan.axis_name, message.others)
        result.setdefault(axes, []).append(OwnedMatrix(message, group, shape))
  return result


def owner_shapes(plan: MessagePlan) -> dict[Axes, list[tuple[int, ...]]]:
  """Returns the shapes of a worker's owner residuals, by axes."""
  matrices = owned_matrices(plan)
  return {axes: [x.shape for x in found] for axes, found in matrices.items()}


def owned_leaves(plan: MessagePlan, worker: jax.Array) -> dict[Axes, list[jax.Array]]:
  """Returns the leaf number of each row of a worker's owner residuals, by axes."""

  def numbers(matrix: OwnedMatrix) -> jax.Array:
    rows = own_rows(matrix.shape[0], worker)
    places = matrix.message.layout.leaf_of_row(matrix.group, rows)
    # Rows that fill up the last shares have the number of leaves.
    return jnp.asarray([*matrix.message.leaves, len(plan.names)])[places]

  matrices = owned_matrices(plan)
  return {axes: list(map(numbers, found)) for axes, found in matrices.items()}


def owner_residuals(
  plan: MessagePlan, stored: OwnerResiduals | None
) -> list[list[jax.Array | None]]:
  """Returns each codec's owner residual, or None, by message; checks shapes."""
  if stored is None:
    return [[None] * len(message.layout.codecs) for message in plan.messages]
  waiting = {axes: list(arrays) for axes, arrays in stored.items()}
  result = []
  for message in plan.messages:
    axes = own_axes(plan.axis_name, message.others)
    result.append([_take(waiting, axes, shape) for shape in _shapes(plan, message)])
  for axes, arrays in waiting.items():
    if arrays:
      raise ValueError(
        f"`state.server_residual`[{axes!r}] must have what the second stage keeps, "
        f"got {len(arrays)} arrays too many; make the state by optimizer.init with "
        "this transformation and as many workers."
      )
  return result


def _shapes(plan: MessagePlan, message: Message) -> list[tuple[int, ...] | None]:
  """Returns the shape of each codec's owner residual; None for one without."""
  layout, exchange = message.layout, message.exchange
  if not (exchange.owners and exchange.keeps and layout.replaced is None):
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
  waiting: dict[Axes, list[jax.Array]], axes: Axes, shape: tuple[int, ...] | None
) -> jax.Array | None:
  if shape is None:
    return None
  array = waiting[axes].pop(0) if waiting.get(axes) else None
  if array is None or array.shape != shape:
    got = "none" if array is None else array.shape
    raise ValueError(
      f"`state.server_residual`[{axes!r}] must have an array of the shape {shape}, "
      f"got {got}; {MADE_FOR_SHARDS}"
    )
  return array
