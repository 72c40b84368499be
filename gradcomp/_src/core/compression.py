"""The validated options of a transformation, and the parts of its steps."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from gradcomp._src.checks import one_of, see
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.core import agreement
from gradcomp._src.core.codec_memory import as_stored, first_stored, recall
from gradcomp._src.core.feedback import Feedback
from gradcomp._src.core.first_state import (
  check_own,
  check_residual_types,
  first_state,
)
from gradcomp._src.core.residual_storage import check_kind, shaped
from gradcomp._src.core.state import (
  CompressState,
  check_state,
  measures,
  seed_words,
  step_keys,
)
from gradcomp._src.exchange.auto import Auto, check_exchange
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.exchange.owners import OwnerResiduals, owner_shapes
from gradcomp._src.exchange.plan import MessagePlan, PlanOptions, plan_messages
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.exchange.step import Step
from gradcomp._src.floats.dtypes import addend_dtype
from gradcomp._src.mesh.axes import Axes, AxisName, require_size
from gradcomp._src.mesh.reduction import reduction
from gradcomp._src.mesh.study import FIRST, Options, Planned, note, studied_axes
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
    drops = self.codec.facts.drops
    if self.feedback.moves and drops and not self.exchange.of_leaves:
      raise ValueError(
        f'`feedback` must not be "momentum" for a sparse codec in a '
        f'"{self.exchange.name}" exchange, where no worker knows what of its own '
        f'momentum a group has sent, got {self.codec}; use feedback="error", with '
        "momentum behind it."
      )

  @property
  def _firsts(self) -> list[Callable[[tuple[int, ...]], Any]]:
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
    options = PlanOptions(
      self.codec,
      self.exchange,
      self.min_leaf_size,
      self.message_bytes,
      self.feedback.keeps,
    )
    count = 1 if workers is None else workers.size
    others, axes = across.others, across.axes
    return plan_messages(leaves, paths, others, options, axis_name=axes, workers=count)

  def init(self, params: Any) -> CompressState:
    """Creates the state; ValueError if parameters are sharded over the workers."""
    if self._averaged:
      check_whole_arrays("params", params, self._averaged)
    own = functools.partial(self._own_arrays, paths_of(params))
    seed, axes = seed_words(self.key), studied_axes(self.axis_name)
    trees, kept = first_state(params, axes, self._firsts, own, seed)
    residual, velocity, *_ = (*trees, None, None)
    owned, *memory = ({at: x[i] for at, x in kept.items() if x[i]} for i in range(3))
    (count,) = note(FIRST, jnp.zeros([], jnp.int32))
    return CompressState(
      count,
      seed,
      residual,
      owned or None,
      as_stored(params, Memory(*memory)),
      velocity,
    )

  def _own_arrays(
    self,
    paths: Sequence[KeyPath],
    leaves: Sequence[jax.ShapeDtypeStruct],
    others: Sequence[tuple[str, ...]],
    workers: int | None,
  ) -> Callable[[jax.Array], dict[Axes, Any]]:
    """Returns a function of the seed that makes owner residuals and memories, by axes.

    If the number of workers is unknown, it makes shared memories only. ``update``
    raises an error if it needs more.
    """
    axes = studied_axes(self.axis_name)
    known = 1 if axes is None else workers
    across = Across(axes, False, others)
    several = None if axes is None else Workers(axes, known or 1, 1 / (known or 1))
    plan = self.plan(leaves, paths, across, several)
    note(Planned(plan))
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
      told = self._told() | {"inspected": measures(state) is not None}
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

  def step(
    self, plan: MessagePlan, workers: Workers | None, state: CompressState
  ) -> Step:
    """Returns the facts of a step; ValueError if the state does not have its arrays."""
    return Step(
      plan,
      workers,
      *step_keys(state, plan, shared=self.dither == "shared"),
      recall(plan, state.memory),
      self._owned(plan, state),
      state.count,
      keep=self.feedback.keeps or measures(state) is not None,
      mark=self.feedback.moves,
      watch=measures(state) is not None,
    )

  def error_share(self, across: Across, workers: Workers | None) -> float | None:
    """Returns the part that a worker keeps of the errors of casting means to updates.

    It is 1, or 1/N of a sum; None if workers keep no residuals.
    """
    if not self.feedback.keeps:
      return None
    sums = across.is_sum and self.exchange.sends
    return 1 / workers.size if workers is not None and sums else 1.0

  def _owned(self, plan: MessagePlan, state: CompressState) -> OwnerResiduals | None:
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

  def _told(self) -> dict[str, Any]:
    """Returns the options that are not traced values."""
    names = [field.name for field in dataclasses.fields(self)]
    told = {name: getattr(self, name) for name in names if name != "axis_name"}
    return {x: y for x, y in told.items() if not isinstance(y, jax.core.Tracer)}


def paths_of(tree: Any) -> list[KeyPath]:
  """Returns the paths of a tree's leaves."""
  return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def update_dtypes(updates: Any, params: Any) -> list[np.dtype]:
  """Returns the dtype of each leaf's update: its gradient's, or its parameter's.

  It is the parameter's where gradients are addends of a sum, and wider, because the
  parameter's dtype does not hold 1/N of a gradient. ``params`` are None if they are not
  known, or gradients are no addends.

  Example:
    >>> update_dtypes(jnp.ones(2), jnp.ones(2, jnp.float16))
    [dtype('float16')]
  """

  def of(gradient: jax.Array, param: Any) -> np.dtype:
    narrow = jnp.result_type(param)
    return narrow if gradient.dtype == addend_dtype(narrow) else gradient.dtype

  if params is None:
    return [gradient.dtype for gradient in jax.tree.leaves(updates)]
  return jax.tree.leaves(jax.tree.map(of, updates, params))
