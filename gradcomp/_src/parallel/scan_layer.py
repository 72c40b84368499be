"""The exchange of one layer's gradient, stage by stage."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from gradcomp._src.core.codec_memory import first_stored
from gradcomp._src.core.compression import Across, Compression, paths_of
from gradcomp._src.core.residual_update import remainder
from gradcomp._src.core.state import CompressState
from gradcomp._src.core.step import as_updates, correct
from gradcomp._src.exchange.averaging import Averaging
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.exchange.owners import OwnerResiduals, owner_shapes
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.exchange.protocol import Outgoing, Received, stages_of
from gradcomp._src.exchange.step import (
  Leaves,
  Sending,
  agree,
  decode,
  encode,
)
from gradcomp._src.mesh.axes import require_size
from gradcomp._src.mesh.types import mark_varying, other_axes


class Kept(NamedTuple):
  """The rounding errors of a layer on one worker, or of all layers stacked."""

  leaves: Leaves  # the residual of each leaf, float32, of at least one axis
  owners: OwnerResiduals


class GradientExchange(Protocol):
  """The exchange of one layer's gradient.

  Attributes:
    depth: the number of its stages.
  """

  @property
  def depth(self) -> int: ...

  def begin(
    self, grads: Leaves, kept: Kept | None, key: jax.Array
  ) -> tuple[Any, Leaves]:
    """Encodes a gradient: its messages, and each leaf's rounding error, if kept."""

  def advance(self, messages: Any, age: int) -> Any:
    """Runs stage ``age``, from 0 on."""

  def finish(
    self, messages: Any, lost: Leaves, old: Kept | None
  ) -> tuple[Leaves, Kept | None]:
    """Returns the results, and the worker's residual, behind the last stage."""


class UnderWay(NamedTuple):
  """A message between two of its stages."""

  sending: Sending  # without its leaves
  own: Outgoing  # without what only encoding knows
  found: Any  # by the stage before the next one


def layer_exchange(
  options: Compression, layer: Any, *, is_sum: bool = False
) -> "LayerExchange":
  """Plans the exchange of layers like this one; ValueError for codecs with a memory.

  With ``is_sum`` the gradients of the workers are addends, in place of samples.
  """
  axes = options.axis_name
  assert axes is not None
  size, leaves = require_size(axes), jax.tree.leaves(layer)
  workers = Workers(axes, size, 1 if is_sum else 1 / size)
  dtypes = [x.dtype for x in leaves]
  across = Across(axes, is_sum, [other_axes(x, axes) for x in leaves], dtypes)
  plan = options.plan(leaves, paths_of(layer), across, workers)
  if first_stored(plan, jnp.zeros(2, jnp.uint32)) is not None or _has_rounds(plan):
    raise ValueError(
      "`codec` must be without a memory, which nothing here carries from step to step, "
      f"got {options.codec}; choose another, or exchange the gradients of all layers "
      "behind the loop, by gradcomp.compress."
    )
  if plan.again is not None:
    raise ValueError(
      "`codec` must send any numbers at once, because a scan sends no layer again, got "
      f"{options.codec}; choose Dense(dtype=jnp.bfloat16), or exchange the gradients "
      "of all layers behind the loop, by gradcomp.compress."
    )
  return LayerExchange(options, workers, plan, across)


def _has_rounds(plan: MessagePlan) -> bool:
  return any(not codec.facts.of_leaf for codec in plan.codecs)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerExchange:
  """The exchange of layers of the same shapes, each in messages of its own."""

  options: Compression
  workers: Workers
  plan: MessagePlan
  across: Across

  @property
  def depth(self) -> int:
    """The number of stages of a layer. Messages of fewer stages start later."""
    return max(len(stages_of(x.exchange)) for x in self.plan.messages)

  def first(self) -> Kept:
    """Returns zeros, in the shapes of a worker's residual of a layer."""
    zeros = lambda shape: jnp.zeros(shape, jnp.float32)
    leaves = [zeros(x.shape or (1,)) for x in self.plan.leaves]
    own = zip(leaves, map(self.plan.own_axes, range(len(leaves))), strict=True)
    owners = owner_shapes(self.plan).items()
    return Kept(
      [mark_varying(x, axes) for x, axes in own],
      {axes: mark_varying(tuple(map(zeros, own)), axes) for axes, own in owners},
    )

  def begin(
    self, grads: Leaves, kept: Kept | None, key: jax.Array
  ) -> tuple[list[UnderWay], Leaves]:
    count = jnp.zeros([], jnp.int32)
    state = CompressState(count, key, *(kept or (None, None)))
    step = self.options.step(self.plan, self.workers, state)
    leaves = correct(self.options, grads, state)
    begun: dict[int, UnderWay] = {}
    lost: dict[int, jax.Array] = {}
    for sending in Averaging(step, leaves):
      with sending.scope():
        own = encode(sending, agree(sending))
        nothing = decode(sending, own, Received(()))
      lost |= zip(sending.message.leaves, nothing.unsent, strict=step.keep)
      rest = sending._replace(leaves=[], step=step._replace(keep=False))
      number = self.plan.messages.index(sending.message)
      begun[number] = UnderWay(rest, own._replace(encoded={}), None)
    return [begun[i] for i in sorted(begun)], [lost[i] for i in sorted(lost)]

  def advance(self, messages: Sequence[UnderWay], age: int) -> list[UnderWay]:
    return [x._replace(found=self._stage(x, age)) for x in messages]

  def _stage(self, message: UnderWay, age: int) -> Any:
    sending, own, found = message
    stages = stages_of(sending.exchange)
    number = age - self.depth + len(stages)
    if number < 0:
      return None
    with sending.scope():
      return stages[number](own, sending.workers or self.workers, found)

  def finish(
    self, messages: Sequence[UnderWay], lost: Leaves, old: Kept | None
  ) -> tuple[Leaves, Kept | None]:
    means: dict[int, jax.Array] = {}
    kept: dict[int, jax.Array] = {}
    owners: OwnerResiduals = {}
    share = self.options.error_share(self.across, self.workers)
    for sending, own, received in messages:
      numbers = sending.message.leaves
      with sending.scope():
        reduced = decode(sending, own, received)
        unsent = [] if old is None else _with_sums(lost, sending, own, received)
      reduced = reduced._replace(unsent=unsent, own=[None] * len(unsent))
      dtypes = [self.across.dtypes[i] for i in numbers]
      updates, _ = as_updates(dtypes, share, reduced)
      means |= zip(numbers, updates.mean, strict=True)
      for axes, arrays in (reduced.owned or {}).items():
        owners[axes] = (*owners.get(axes, ()), *arrays)
      if old is not None:
        before = [old.leaves[i] for i in numbers]
        new = map(_kept, updates.unsent, updates.mean, before)
        kept |= zip(numbers, new, strict=True)
    ordered = lambda found: [found[i] for i in sorted(found)]
    return ordered(means), None if old is None else Kept(ordered(kept), owners)


def _with_sums(
  lost: Leaves, sending: Sending, own: Outgoing, received: Received
) -> Leaves:
  """Adds the errors of this worker's sums to the errors of its encodings."""
  result = []
  for i, number in enumerate(sending.message.leaves):
    errors = lost[number]
    if own.layout.slots[i].group in received.lost:
      more = own.layout.decode_leaf(i, received.lost)
      (more,) = sending.as_given([more.reshape(errors.shape)])
      errors = errors + more
    result.append(errors)
  return result


def _kept(unsent: jax.Array, mean: jax.Array, old: jax.Array) -> Any:
  """Returns the new residual of a leaf; float32 needs no random numbers."""
  count = jnp.zeros([], jnp.int32)
  return remainder(unsent, mean, old, count, lambda: count, None)[0]
