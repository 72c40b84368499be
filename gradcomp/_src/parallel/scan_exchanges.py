"""The exchanges of a layer's gradient, stage by stage, and the source of shards."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs.sums import records, tiles
from gradcomp._src.core import state, step
from gradcomp._src.core.compression import Compression, paths_of
from gradcomp._src.exchange import collectives, protocol
from gradcomp._src.exchange import plan as plans
from gradcomp._src.exchange import step as exchange_step
from gradcomp._src.floats.dtypes import fitted
from gradcomp._src.kernels.common import threefry
from gradcomp._src.mesh import axes, place, trees, types
from gradcomp._src.parallel import options, scan_checks, transport
from gradcomp._src.parallel.scan_loop import Exchange, Source, like

Leaves = Sequence[jax.Array]


# A message between two of its stages, without its leaves and what only encoding knows,
# and what the stage before has found.
UnderWay = tuple[protocol.Sending, Any]


def mean_exchange(options: Compression, layer: Any, *, is_sum: bool) -> Exchange:
  """The exchange of layers like this one, as ``compress`` has it.

  Gradients may be addends of a sum.
  """
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
  depth = max(len(x.exchange.stages) for x in plan.messages)

  def first() -> state.Kept:
    zeros = lambda shape: jnp.zeros(shape, jnp.float32)
    own = enumerate(zeros(x.shape or (1,)) for x in plan.leaves)
    return state.Kept(
      [types.mark_varying(x, plan.own_axes(i)) for i, x in own],
      {
        names: types.mark_varying(tuple(map(zeros, shapes)), names)
        for names, shapes in plans.owner_shapes(plan).items()
      },
    )

  def begin(
    grads: Leaves, kept: state.Kept | None, key: jax.Array
  ) -> tuple[list[UnderWay], Leaves]:
    before = state.CompressState(jnp.int32(0), key, *(kept or (None, None)))
    one = options.step(plan, workers, before)
    begun: dict[int, UnderWay] = {}
    lost: dict[int, jax.Array] = {}
    corrected = step.correct(options, grads, before)
    for sending in exchange_step.sendings(one, corrected):
      with sending.scope():
        own = exchange_step.encode(exchange_step.agree(sending))
        # In the units of samples, as the errors of sums that will join them.
        nothing = exchange_step.decode(own._replace(factor=1), protocol.Received(()))
      if one.keep:
        lost |= zip(sending.message.leaves, (x.unsent for x in nothing), strict=True)
      number = plan.messages.index(sending.message)
      begun[number] = own._replace(leaves=[], encoded={}), None
    return [begun[i] for i in sorted(begun)], [lost[i] for i in sorted(lost)]

  def advance(messages: list[UnderWay], age: int) -> list[UnderWay]:
    result = []
    for sending, found in messages:
      stages = sending.exchange.stages
      number = age - depth + len(stages)
      if number >= 0:
        with sending.scope():
          found = stages[number](sending, found)
      result.append((sending, found))
    return result

  def finish(
    messages: list[UnderWay], lost: Leaves, old: state.Kept | None
  ) -> tuple[Leaves, state.Kept | None]:
    found: dict[int, exchange_step.Reduced] = {}
    count = no_error = jnp.zeros([], jnp.int32)
    for sending, received in messages:
      numbers = sending.message.leaves
      errors = [lost[i] if lost else no_error for i in numbers]
      known = {i: records.Encoded(x, unsent=x) for i, x in enumerate(errors)}
      with sending.scope():
        given = sending._replace(leaves=errors, encoded=known)
        parts = exchange_step.decode(given, received)
      # Nothing can be computed anew from gradients that are gone.
      found |= zip(numbers, (x._replace(own=None) for x in parts), strict=True)
    reduced = [found[i] for i in range(len(leaves))]
    reduced, _ = step.as_updates(dtypes, options.error_share(across), reduced)
    means = [x.mean for x in reduced]
    if old is None:
      return means, None
    before = state.CompressState(count, count, *old)
    after = step.keep(options, plan, means, means, before, reduced)
    owned = [received.residuals for _, received in messages]
    return means, state.Kept(after.residual, plans.as_stored(plan, owned))

  return Exchange(depth, first, begin, advance, finish)


def gathered_layers(
  wire: options.Wire, axis: int, inner: axes.AxisName | None
) -> Source:
  """The source of layers in shards; workers along ``inner`` keep a layer's words.

  So the backward pass asks nobody else; None keeps none, and asks all.
  """

  def ask(given: Any, key: jax.Array) -> list[jax.Array]:
    leaves = jax.tree.leaves(trees.trainable(given))
    send = lambda i, x: transport.gather_lines(x, wire, threefry.fold_key(key, i))
    return [send(i, x) for i, x in enumerate(leaves)]

  def keep(asked: Leaves) -> Leaves | None:
    if inner is None:
      return None
    count, worker = axes.require_size(inner), lax.axis_index(inner)
    shares = [x.reshape(count, -1, *x.shape[1:]) for x in asked]
    return [lax.dynamic_index_in_dim(x, worker, keepdims=False) for x in shares]

  def again(given: Any, kept: Leaves | None, key: jax.Array) -> Leaves:
    if inner is None or kept is None:
      return ask(given, key)
    result = []
    for share, shard in zip(kept, jax.tree.leaves(trees.trainable(given)), strict=True):
      name = collectives.as_floats(len(share) * shard.size, inner)
      shares = collectives.gather(share, inner, name, axis=1)
      result.append(shares.reshape(-1, *share.shape[1:]))
    return result

  def layer(given: Any, asked: Leaves) -> Any:
    mine, others = trees.split(given)
    shards, treedef = jax.tree.flatten(mine)
    at = lambda x: options.checked_axis("axis", axis, x.ndim)
    pairs = zip(asked, shards, strict=True)
    whole = [transport.joined(x, wire, y, at(y)) for x, y in pairs]
    return trees.combine(jax.tree.unflatten(treedef, whole), others)

  return Source(1, ask, keep, again, layer)


def zeros_of_whole(layer: Any, axis: int, size: int) -> Any:
  """Returns zeros in place of a whole layer, of its shapes and types, by its shards."""

  def zeros(x: jax.Array) -> jax.Array:
    at = options.checked_axis("axis", axis, x.ndim)
    shape = *x.shape[:at], x.shape[at] * size, *x.shape[at + 1 :]
    return like(jnp.zeros(shape, x.dtype), x)

  mine, others = trees.split(layer)
  return trees.combine(jax.tree.map(zeros, mine), others)


class Parts(NamedTuple):
  """The parts of a gradient on their way to the owners."""

  lines: jax.Array  # as they are sent, or have come
  own: jax.Array  # the part that stays, float32


def owner_exchange(wire: options.Wire, axis: int, layer: Any) -> Exchange:
  """The exchange that sends each part of a layer's gradient to its owner."""
  wire = dataclasses.replace(wire.reversed, own="exact")  # which is not sent
  shards = jax.tree.leaves(trees.trainable(layer))
  at = lambda x: options.checked_axis("axis", axis, x.ndim)

  def first() -> state.Kept:
    whole = zeros_of_whole(shards, axis, wire.size)
    return state.Kept([x.astype(jnp.float32) for x in whole], {})

  def begin(
    grads: Leaves, kept: state.Kept | None, key: jax.Array
  ) -> tuple[list[Parts], list[jax.Array]]:
    begun, lost = [], []
    worker = lax.axis_index(wire.axis_name)
    for i, grad in enumerate(grads):
      sent = grad.astype(jnp.float32)
      if kept is not None:
        sent = sent + kept.leaves[i]
      # As the backward pass of a gather.
      own = options.folded(threefry.fold_key(key, i), 1)
      parts = transport.split_parts(sent, at(grad), wire.size)
      lines = transport.to_lines(parts, wire, own)
      begun.append(Parts(lines, lax.dynamic_index_in_dim(parts, worker)))
      if kept is not None:
        lost.append(transport.concat(transport.loss_of(parts, wire, own), at(grad)))
    return begun, lost

  def advance(messages: Sequence[Parts], age: int) -> list[Parts]:
    del age  # there is one stage
    send = lambda x: collectives.scatter(
      x.lines, wire.axis_name, wire.size * x.own.size
    )
    return [x._replace(lines=send(x)) for x in messages]

  def finish(
    messages: Sequence[Parts], lost: Leaves, old: state.Kept | None
  ) -> tuple[list[jax.Array], state.Kept | None]:
    sums, kept = [], []
    for i, ((lines, own), shard) in enumerate(zip(messages, shards, strict=True)):
      came = transport.arrived(lines, wire, own)
      total = tiles.sum_in_order(lambda part: part, came)
      if old is None:
        sums.append(fitted(total, shard.dtype))
        continue
      unsent = transport.split_parts(lost[i], at(total), wire.size)
      given = unsent, old.leaves[i], shard.dtype, wire, at(total)
      narrow, new = transport.narrowed_parts(total, *given)
      sums.append(narrow)
      kept.append(new)
    return sums, None if old is None else state.Kept(kept, {})

  return Exchange(1, first, begin, advance, finish)
