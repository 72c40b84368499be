"""The exchange of a layer's gradient, as ``compress`` has it, stage by stage."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.core import residual_update, state, step
from gradcomp._src.core.compression import Compression, paths_of
from gradcomp._src.exchange import averaging, collectives, owners, protocol
from gradcomp._src.exchange import step as exchange_step
from gradcomp._src.mesh import axes, place, types
from gradcomp._src.parallel import scan_checks
from gradcomp._src.parallel.scan_loop import Exchange

Leaves = list[jax.Array]


class UnderWay(NamedTuple):
  """A message between two of its stages."""

  sending: exchange_step.Sending  # without its leaves
  own: protocol.Outgoing  # without what only encoding knows
  found: Any  # by the stage before the next one


def mean_exchange(options: Compression, layer: Any, *, is_sum: bool) -> Exchange:
  """Plans the exchange of layers like this one, with gradients that may be addends."""
  assert options.axis_name is not None
  names, size = options.axis_name, axes.require_size(options.axis_name)
  leaves = jax.tree.leaves(layer)
  workers = collectives.Workers(names, size, 1 if is_sum else 1 / size)
  dtypes = [x.dtype for x in leaves]
  others = [types.other_axes(x, names) for x in leaves]
  across = place.Place(names, is_sum, others, dtypes)
  plan = options.plan(leaves, paths_of(layer), across, workers)
  scan_checks.check_plan(plan, options.codec)
  # Messages of fewer stages start later.
  depth = max(len(protocol.stages_of(x.exchange)) for x in plan.messages)

  def first() -> state.Kept:
    zeros = lambda shape: jnp.zeros(shape, jnp.float32)
    own = enumerate(zeros(x.shape or (1,)) for x in plan.leaves)
    return state.Kept(
      [types.mark_varying(x, plan.own_axes(i)) for i, x in own],
      {
        names: types.mark_varying(tuple(map(zeros, shapes)), names)
        for names, shapes in owners.owner_shapes(plan).items()
      },
    )

  def begin(
    grads: Leaves, kept: state.Kept | None, key: jax.Array
  ) -> tuple[list[UnderWay], Leaves]:
    count = jnp.zeros([], jnp.int32)
    own_state = state.CompressState(count, key, *(kept or (None, None)))
    one = options.step(plan, workers, own_state)
    begun: dict[int, UnderWay] = {}
    lost: dict[int, jax.Array] = {}
    for sending in averaging.Averaging(one, step.correct(options, grads, own_state)):
      with sending.scope():
        own = exchange_step.encode(sending, exchange_step.agree(sending))
        nothing = exchange_step.decode(sending, own, protocol.Received(()))
      lost |= zip(sending.message.leaves, nothing.unsent, strict=one.keep)
      rest = sending._replace(leaves=[], step=one._replace(keep=False))
      number = plan.messages.index(sending.message)
      begun[number] = UnderWay(rest, own._replace(encoded={}), None)
    return _in_order(begun), _in_order(lost)

  def advance(messages: list[UnderWay], age: int) -> list[UnderWay]:
    result = []
    for message in messages:
      sending, own, found = message
      stages = protocol.stages_of(sending.exchange)
      number = age - depth + len(stages)
      if number >= 0:
        with sending.scope():
          found = stages[number](own, sending.workers or workers, found)
      result.append(message._replace(found=found))
    return result

  def finish(
    messages: list[UnderWay], lost: Leaves, old: state.Kept | None
  ) -> tuple[Leaves, state.Kept | None]:
    means: dict[int, jax.Array] = {}
    kept: dict[int, Any] = {}
    of_owners: owners.OwnerResiduals = {}
    share, count = options.error_share(across), jnp.zeros([], jnp.int32)
    for message in messages:
      numbers = message.sending.message.leaves
      with message.sending.scope():
        reduced = exchange_step.decode(*message)
        unsent = [] if old is None else _with_sums(lost, *message)
      reduced = reduced._replace(unsent=unsent, own=[None] * len(unsent))
      given = [dtypes[i] for i in numbers]
      updates, _ = step.as_updates(given, share, reduced)
      means |= zip(numbers, updates.mean, strict=True)
      for names, arrays in (reduced.owned or {}).items():
        of_owners[names] = (*of_owners.get(names, ()), *arrays)
      if old is not None:
        for i, error, mean in zip(numbers, updates.unsent, updates.mean, strict=True):
          # Of float32, which needs no random numbers.
          rest = old.leaves[i], count, lambda: count, None
          kept[i] = residual_update.remainder(error, mean, *rest)[0]
    new_kept = None if old is None else state.Kept(_in_order(kept), of_owners)
    return _in_order(means), new_kept

  return Exchange(depth, first, begin, advance, finish)


def _in_order(found: dict[int, Any]) -> list[Any]:
  return [found[i] for i in sorted(found)]


def _with_sums(
  lost: Leaves,
  sending: exchange_step.Sending,
  own: protocol.Outgoing,
  received: protocol.Received,
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
