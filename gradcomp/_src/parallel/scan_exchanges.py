"""The exchanges of a layer's gradient, stage by stage, and the source of shards."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs import protocol as codecs
from gradcomp._src.codecs.sums import records, tiles
from gradcomp._src.core import codec_memory, state, step
from gradcomp._src.core.compression import Compression
from gradcomp._src.core.feedback import ErrorFeedback, NoFeedback
from gradcomp._src.exchange import collectives, protocol
from gradcomp._src.exchange import plan as plans
from gradcomp._src.exchange import step as exchange_step
from gradcomp._src.kernels.common import threefry
from gradcomp._src.mesh import axes, place, trees, types
from gradcomp._src.parallel import options, transport
from gradcomp._src.parallel.scan_loop import Exchange, Source

Leaves = Sequence[jax.Array]
Kept = state.Kept | None  # the residual of a layer, if there is one

FIRST_OF_WHOLE = (
  "start with gradcomp.parallel.compress_in_scan(...).init(layers).residual of the "
  'same options, with feedback="error".'
)

# A message between two of its stages, without its leaves and what only encoding knows,
# and what the stage before has found.
UnderWay = tuple[protocol.Sending, Any]


def layer_options(
  axis_name: axes.AxisName, codec: Any, exchange: Any, *, keeps: bool
) -> Compression:
  """Returns the options of the exchange of a whole layer; an error for bad ones."""
  if not codecs.is_codec(codec):
    raise TypeError(
      f"`codec` must be a codec of gradcomp.codecs, got {codec!r}; "
      "gradcomp.codecs.Dense() sends float32."
    )
  if not keeps and (codec.facts.needs_feedback or codec.facts.drops):
    raise ValueError(
      "`codec` must send every element, and work without error feedback, where "
      f"`residual` is None, got {codec}; {FIRST_OF_WHOLE}"
    )
  if keeps:
    codecs.require_contraction("codec", codec, "`residual=None`")
  feedback = ErrorFeedback() if keeps else NoFeedback()
  made = Compression(codec, axis_name, exchange, feedback, message_bytes=None)
  if not made.exchange.sends:
    raise ValueError(
      "`exchange` must send gradients, or there is nothing to hide, got "
      f"{made.exchange.name!r}; use lax.scan, and gradcomp.compress after it."
    )
  return made


def refuse_repeats(facts: Any, codec: Any, layer: str, more: str) -> None:
  """Raises ValueError for a plan or a codec that may send a step once more."""
  if step.by_fallbacks(facts) != facts:
    raise ValueError(
      f"`codec` must send all numbers the first time, because a scan repeats no "
      f"{layer}, got {codec}; choose Dense(dtype=jnp.bfloat16){more}."
    )


def mean_exchange(options: Compression, layer: Any, *, is_sum: bool) -> Exchange:
  """The exchange of layers like this one, as ``compress`` has it; or of addends."""
  assert options.axis_name is not None
  names, size = options.axis_name, axes.require_size(options.axis_name)
  leaves = jax.tree.leaves(layer)
  dtypes = [x.dtype for x in leaves]
  others = [types.other_axes(x, names) for x in leaves]
  across = place.Place(names, size, is_sum, others, dtypes)
  plan = options.plan(layer, across)
  later = "or exchange the gradients of all layers after the loop, by gradcomp.compress"
  if codec_memory.first_stored(plan, jnp.zeros(2, jnp.uint32)) is not None:
    raise ValueError(
      "`codec` must be without a memory, which nothing here carries from step to step, "
      f"got {options.codec}; choose another, {later}."
    )
  refuse_repeats(plan, options.codec, "layer", f", {later}")
  # Messages of fewer stages start later.
  depth = max(len(x.exchange.stages) for x in plan.messages)

  def first() -> state.Kept:
    made = options.init(layer)
    return state.Kept(jax.tree.leaves(made.residual), made.server_residual or {})

  def begin(grads: Leaves, kept: Kept, key: jax.Array) -> tuple[list[UnderWay], Leaves]:
    before = state.CompressState(jnp.int32(0), key, *(kept or (None, None)))
    one = options.step(plan, before)
    begun: list[UnderWay] = []
    lost: dict[int, jax.Array] = {}
    for sending in exchange_step.sendings(one, step.correct(options, grads, before)):
      with sending.scope():
        own = exchange_step.encode(exchange_step.agree(sending))
        # In the units of samples, as the errors of sums that will join them.
        nothing = exchange_step.decode(own._replace(factor=1), protocol.Received(()))
      if one.keep:
        lost |= zip(sending.message.leaves, (x.unsent for x in nothing), strict=True)
      begun.append((own._replace(leaves=[], encoded={}), None))
    return begun[::-1], [lost[i] for i in sorted(lost)]

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

  def finish(messages: list[UnderWay], lost: Leaves, old: Kept) -> tuple[Leaves, Kept]:
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
    reduced, _ = step.as_updates(options, across, reduced)
    means = [x.mean for x in reduced]
    if old is None:
      return means, None
    before = state.CompressState(count, count, *old)
    after = step.keep(options, plan, means, before, reduced)
    owned = [received.residuals for _, received in messages]
    return means, state.Kept(after.residual, plans.as_stored(plan, owned))

  return Exchange(depth, first, begin, advance, finish)


def gathered_layers(
  wire: options.Wire, axis: int, inner: axes.AxisName | None
) -> Source:
  """The source of layers in shards; workers along ``inner`` keep their words."""

  def ask(given: Any, key: jax.Array) -> list[jax.Array]:
    send = lambda i, x: transport.gather_lines(x, wire, threefry.fold_key(key, i))
    return [send(i, x) for i, x in enumerate(jax.tree.leaves(trees.trainable(given)))]

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
    return types.mark_varying(jnp.zeros(shape, x.dtype), (), x)

  mine, others = trees.split(layer)
  return trees.combine(jax.tree.map(zeros, mine), others)


# Parts of a gradient as they are sent, or have come, and the part that stays, float32.
Parts = tuple[jax.Array, jax.Array]


def owner_exchange(wire: options.Wire, axis: int, layer: Any) -> Exchange:
  """The exchange that sends each part of a layer's gradient to its owner."""
  wire = dataclasses.replace(wire.reversed, own="exact")  # which is not sent
  shards = jax.tree.leaves(trees.trainable(layer))
  at = lambda x: options.checked_axis("axis", axis, x.ndim)

  def first() -> state.Kept:
    whole = zeros_of_whole(shards, axis, wire.size)
    return state.Kept([x.astype(jnp.float32) for x in whole], {})

  def begin(grads: Leaves, kept: Kept, key: jax.Array) -> tuple[list[Parts], Leaves]:
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
      begun.append((lines, lax.dynamic_index_in_dim(parts, worker)))
      if kept is not None:
        lost.append(transport.concat(transport.loss_of(parts, wire, own), at(grad)))
    return begun, lost

  def advance(messages: Sequence[Parts], age: int) -> list[Parts]:
    del age  # there is one stage
    send = lambda x, own: collectives.scatter(x, wire.axis_name, wire.size * own.size)
    return [(send(lines, own), own) for lines, own in messages]

  def finish(messages: Sequence[Parts], lost: Leaves, old: Kept) -> tuple[Leaves, Kept]:
    parts = []
    for i, ((lines, own), shard) in enumerate(zip(messages, shards, strict=True)):
      came = transport.arrived(lines, wire, own)
      total, before, unsent = tiles.sum_in_order(lambda part: part, came), None, None
      if old is not None:
        unsent = transport.split_parts(lost[i], at(total), wire.size)
        before = old.leaves[i]
      given = unsent, before, shard.dtype, wire, at(total)
      parts.append(transport.own_part(total, *given))
    sums, kept = map(list, zip(*parts, strict=True))
    return sums, None if old is None else state.Kept(kept, {})

  return Exchange(1, first, begin, advance, finish)
