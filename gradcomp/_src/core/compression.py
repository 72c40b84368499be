"""The validated options of a transformation, and the parts of its steps."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from gradcomp._src.checks import one_of, see
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core import agreement
from gradcomp._src.core.codec_memory import first_stored
from gradcomp._src.core.feedback import Feedback
from gradcomp._src.core.first_state import check_own, check_residual_types
from gradcomp._src.core.planned_states import tell
from gradcomp._src.core.residual_storage import check_kind, is_stored, shaped
from gradcomp._src.core.residual_update import remainder
from gradcomp._src.core.state import (
  CompressState,
  Watched,
  check_state,
  residual_key,
)
from gradcomp._src.core.updates import as_updates, update_dtypes
from gradcomp._src.exchange.auto import Auto, check_exchange
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.exchange.messages import Exchanged, OwnerResiduals, owner_shapes
from gradcomp._src.exchange.notes import Options, note
from gradcomp._src.exchange.plan import MessagePlan, plan_messages
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.mesh.axes import Axes, AxisName, or_explained, require_size
from gradcomp._src.mesh.reduction import reduction
from gradcomp._src.mesh.types import other_axes
from gradcomp._src.mesh.unsharded_params import check_whole_arrays, check_whole_params

Dither = Literal["shared", "independent"]


class Across(NamedTuple):
  """The axes and dtypes of a step, as the types of gradients show them.

  Attributes:
    axes: the axes of the workers; None to exchange nothing.
    is_sum: whether gradients are addends of their sum.
    others: for each leaf, its other axes, over which it varies.
    dtypes: the dtype of the update of each leaf.
  """

  axes: AxisName | None
  is_sum: bool
  others: Sequence[tuple[str, ...]]
  dtypes: Sequence[np.dtype] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Compression:
  """The options of :func:`gradcomp.compress`, with short forms resolved to objects."""

  codec: LeafCodec
  axis_name: AxisName | None
  exchange: Auto | Exchange
  feedback: Feedback
  min_leaf_size: int | None
  message_bytes: int | None
  key: ArrayLike
  dither: Dither

  def __post_init__(self) -> None:
    one_of("dither", Dither, self.dither)
    check_exchange(self.exchange, self.codec, self.axis_name)
    drops = self.codec.sums.drops
    if self.feedback.moves and drops and not self.exchange.of_leaves:
      raise ValueError(
        f'`feedback` must not be "momentum" for a sparse codec in a '
        f'"{self.exchange.name}" exchange, where no worker knows what of its own '
        f'momentum a group has sent, got {self.codec}; use feedback="error", with '
        "momentum behind it."
      )

  @property
  def first(self) -> list[Callable[[tuple[int, ...]], Any]]:
    """Functions that make a leaf's first residual and momentum, if they are kept."""
    residual = [self.feedback.first] if self.feedback.keeps else []
    zeros = lambda shape: jnp.zeros(shape, jnp.float32)
    return residual + [zeros] * self.feedback.moves

  @property
  def _averaged(self) -> AxisName | None:
    return self.axis_name if self.exchange.sends else None

  def plan(
    self,
    leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
    paths: Sequence[KeyPath],
    across: Across,
    workers: Workers | None,
  ) -> MessagePlan:
    """Plans the messages of a step."""
    return plan_messages(
      leaves,
      paths,
      across.others,
      self.codec,
      axis_name=across.axes,
      exchange=self.exchange,
      workers=1 if workers is None else workers.size,
      min_leaf_size=self.min_leaf_size,
      message_bytes=self.message_bytes,
      feedback=self.feedback.keeps,
    )

  def check_init(self, params: Any) -> None:
    """Raises ValueError if values of parameters show that they are sharded."""
    if self._averaged:
      check_whole_arrays("params", params, self._averaged)

  def own_arrays(
    self,
    leaves: Sequence[jax.ShapeDtypeStruct],
    others: Sequence[tuple[str, ...]],
    workers: int | None,
    *,
    paths: Sequence[KeyPath],
  ) -> Callable[[jax.Array], dict[Axes, Any]]:
    """Returns a function of the seed that makes owner residuals and memories, by axes.

    If the number of workers is unknown, it makes shared memories only. ``update``
    raises an error if it needs more.
    """
    axes = or_explained(self.axis_name)
    known = 1 if axes is None else workers
    across = Across(axes, False, others)
    several = None if axes is None else Workers(axes, known or 1, 1 / (known or 1))
    plan = self.plan(leaves, paths, across, several)
    tell(plan)
    shapes = {} if known is None or axes is None else owner_shapes(plan)

    def make(seed: jax.Array) -> dict[Axes, Any]:
      shared, own = first_stored(plan, seed) or ({}, {})
      owned = {
        at: tuple(jnp.zeros(shape, jnp.float32) for shape in found)
        for at, found in shapes.items()
      }
      parts = (owned, shared, {} if known is None else own)
      places = dict.fromkeys(at for part in parts for at in part)
      return {at: tuple(part.get(at, ()) for part in parts) for at in places}

    return make

  def across(self, updates: Any, state: CompressState, params: Any) -> Across:
    """Validates the inputs of ``update``, and returns the axes and dtypes of the step.

    ValueError if they do not fit the options, or another process has others.
    """
    if self._averaged:
      check_whole_params(params, self._averaged)
    axes, is_sum = reduction(updates, self.axis_name, local=not self.exchange.sends)
    leaves = jax.tree.leaves(updates)
    needs = {
      "residual": self.feedback.keeps and bool(leaves),
      "velocity": self.feedback.moves and bool(leaves),
    }
    check_state(state, needs, f"feedback={self.feedback} and {self.codec}")
    if is_sum:
      check_residual_types(state.residual, updates, axes)
    if axes is not None and self.exchange.sends:
      told = self._told() | {"inspected": isinstance(state, Watched)}
      agreement.require_agreement("gradcomp.compress", told, updates, axes)
    made = ("codec", "feedback", "min_leaf_size")
    note(Options(tuple((name, getattr(self, name)) for name in made)))
    known = params if is_sum and self.exchange.sends else None
    others = [other_axes(leaf, axes) for leaf in leaves]
    return Across(axes, is_sum, others, update_dtypes(updates, known))

  def workers(
    self, across: Across, updates: Any, state: CompressState
  ) -> Workers | None:
    """Returns the workers that exchange, on a device; None to exchange nothing."""
    axes = across.axes
    count = 1 if axes is None else require_size(axes)
    check_own("residual", shaped(state.residual), updates, axes, count)
    if self.feedback.keeps:
      check_kind(state.residual, self.feedback.first)
    check_own("velocity", state.velocity, updates, axes, count)
    if axes is None:
      return None
    return Workers(axes, count, 1 if across.is_sum else 1 / count)

  def owned(self, plan: MessagePlan, state: CompressState) -> OwnerResiduals | None:
    """Returns the owner residuals, or None; ValueError if needed ones are missing."""
    if plan.axis_name is None or not owner_shapes(plan):
      return None
    if state.server_residual is None and self.feedback.keeps:
      raise ValueError(
        f"`state.server_residual` must be kept by the {plan.workers} workers of "
        f"{plan.axis_name!r}, whose second stage loses something; make the state by "
        "optimizer.init inside the map or under jax.set_mesh(mesh), or pass "
        "exchange=gradcomp.exchange.TwoShot(feedback=False)."
        f"{see('whose-second-stage-loses-something')}"
      )
    # Without feedback they may be None: the second stage then rounds as the first does.
    return state.server_residual

  def as_updates(
    self, treedef: Any, exchanged: Exchanged, across: Across, workers: Workers | None
  ) -> tuple[Any, Exchanged]:
    """Casts the means to updates, and adds the rounding errors to the unsent parts."""
    sums = across.is_sum and self.exchange.sends
    share = 1 / workers.size if workers is not None and sums else 1.0
    keeps = self.feedback.keeps
    leaves, waits = as_updates(exchanged, across.dtypes, keeps=keeps, share=share)
    return jax.tree.unflatten(treedef, leaves), waits

  def keep(
    self,
    plan: MessagePlan,
    state: CompressState,
    updates: Any,
    corrected: Sequence[jax.Array],
    mean: Any,
    exchanged: Exchanged,
  ) -> CompressState:
    """Returns the state after the step, with the new residuals."""
    unsent, means = exchanged.unsent, jax.tree.leaves(mean)
    counts = [state.count] * len(means)
    if state.residual is not None:
      # A residual that an earlier transformation left, see switch, is sent once.
      waits = self.feedback.waits if self.feedback.keeps else jnp.zeros_like
      lost = map(waits, unsent if self.feedback.keeps else corrected)
      old, treedef = jax.tree.flatten(state.residual, is_leaf=is_stored)
      key = lambda i: lambda: residual_key(state, plan, i)
      keys = map(key, range(len(means)))
      leaves = zip(lost, means, old, counts, keys, strict=True)
      written = [remainder(*leaf) for leaf in leaves]
      new, counts = [x for x, _ in written], [count for _, count in written]
      state = state._replace(residual=jax.tree.unflatten(treedef, new))
    if self.feedback.moves:
      velocity = self.feedback.keep(
        updates, state.velocity, means, unsent, exchanged.chosen, counts
      )
      state = state._replace(velocity=velocity)
    # Owners' residuals that only an earlier transformation kept stay: see switch.
    if exchanged.owned is not None:
      state = state._replace(server_residual=exchanged.owned)
    return state

  def _told(self) -> dict[str, Any]:
    """Returns the options that are not traced values."""
    names = [field.name for field in dataclasses.fields(self)]
    told = {name: getattr(self, name) for name in names if name != "axis_name"}
    return {x: y for x, y in told.items() if not isinstance(y, jax.core.Tracer)}


def paths_of(tree: Any) -> list[KeyPath]:
  """Returns the paths of a tree's leaves."""
  return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
