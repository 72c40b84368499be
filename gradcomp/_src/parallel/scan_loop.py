"""The loop over layers. Its backward pass exchanges gradients while it computes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.codecs import protocol as codecs
from gradcomp._src.codecs.sums import records, tiles
from gradcomp._src.core import state as states
from gradcomp._src.core import transform
from gradcomp._src.core.compression import Compression
from gradcomp._src.core.feedback import ErrorFeedback, NoFeedback
from gradcomp._src.exchange import collectives, protocol
from gradcomp._src.exchange import plan as plans
from gradcomp._src.exchange import step as exchange_step
from gradcomp._src.kernels.common import dithers
from gradcomp._src.mesh import axes, shard_maps, trees, types
from gradcomp._src.parallel import wires

Leaves = Sequence[jax.Array]
Kept = states.Kept | None  # the residual of a layer, if there is one

FIRST_OF_WHOLE = (
  "start with gradcomp.parallel.compress_in_scan(...).init(layers).residual of the "
  'same options, with feedback="error".'
)


class Given(NamedTuple):
  """The arrays that a scan takes beside the carry, or their cotangents so far."""

  closed: Any  # over which the body closes
  layers: Any
  kept: Kept  # the residual of all layers, stacked
  key: Any  # uint32[2]; a cotangent is None
  whole: Any = None  # what is read in place of layers; a cotangent is None

  @property
  def read(self) -> Any:
    return self.layers if self.whole is None else self.whole


class Source(NamedTuple):
  """Hands a worker its layers, one after the other; ``parts`` come from others."""

  ahead: int  # 1: parts are asked for while the layer before computes; else 0
  ask: Callable[..., Any]  # (given, key) -> parts, still encoded, or None
  keep: Callable[..., Any]  # (parts) -> the share of them kept for the backward pass
  again: Callable[..., Any]  # (given, share, key) -> parts, in the backward pass
  layer: Callable[..., Any]  # (given, parts) -> layer, typed as differing by worker


class Exchange(NamedTuple):
  """Exchanges the gradient of one layer, in ``depth`` stages."""

  depth: int
  first: Callable[[], states.Kept]  # () -> the first residual of a layer: zeros
  begin: Callable[..., Any]  # (grads, kept, key) -> messages, each leaf's error
  advance: Callable[..., Any]  # (messages, age) -> messages, after stage age
  finish: Callable[..., Any]  # (messages, errors, kept) -> results, new kept


def whole_layers(axis_name: Any) -> Source:
  """The source of layers that each worker has."""
  nothing = lambda *_: None
  # Typed so, or JAX adds up the gradients of all workers.
  layer = lambda given, _: types.mark_varying(given, axis_name)
  return Source(0, nothing, nothing, nothing, layer)


def layer_scan(  # noqa: C901, PLR0915 - closures over one loop
  body: Callable[..., tuple[Any, Any]],
  policy: Callable[..., bool] | None,
  axis_name: axes.AxisName,
  source: Source,
  exchange: Exchange,
  length: int,
) -> Callable[[Any, Given], tuple[Any, Any]]:
  """Returns a scan ``(carry, given)`` of ``body(closed, carry, layer)``, no closure."""

  def walk(run: Any, carry: Any, given: Given) -> tuple[Any, Any, Any]:
    """Runs all layers; returns results, all that ``run`` saves, and the last parts."""
    ask = lambda i: source.ask(_at(given.read, i), _key(given, i))

    def step(state: Any, i: Any, last: bool = False) -> Any:
      carry, asked = state
      more = asked if last else ask(i + 1)
      layer = source.layer(_at(given.read, i), asked)
      (carry, y), beside = run(given.closed, carry, layer)
      return (carry, more), (y, beside, None if last else source.keep(asked))

    inside = length - source.ahead
    numbers = jnp.arange(inside, dtype=jnp.int32)
    state, (ys, beside, kept) = lax.scan(step, (carry, ask(0)), numbers)
    behind = []
    for i in range(inside, length):
      state, (y, own, _) = step(state, i, last=True)
      ys = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), ys, y)
      behind.append(own)
    carry, asked = state
    return (carry, ys), (beside, kept, behind), asked

  def linearized(closed: Any, carry: Any, layer: Any) -> tuple[Any, Any]:
    """Returns the outputs of a layer, and the pull of its cotangents."""
    # Of the arrays that the backward pass has, the pull holds only the places.
    floats, others = trees.split((closed, carry, layer))
    of_floats = lambda floats: trees.split(body(*trees.combine(floats, others)))
    saved = jax.checkpoint(of_floats, policy=policy, prevent_cse=False)
    result, pull, rest = jax.vjp(saved, floats, has_aux=True)
    leaves, treedef = jax.tree.flatten(pull)
    known = jax.tree.leaves((closed, layer))
    places = [next((i for i, y in enumerate(known) if x is y), None) for x in leaves]
    own = [x if at is None else None for x, at in zip(leaves, places, strict=True)]

    def again(own: Any, known: Sequence[jax.Array], cotangent: Any) -> Any:
      pairs = zip(own, places, strict=True)
      whole = [x if at is None else known[at] for x, at in pairs]
      return jax.tree.unflatten(treedef, whole)(cotangent)[0]

    return trees.combine(result, rest), jax.tree_util.Partial(again, own)

  def forward(carry: Any, given: Given) -> tuple[Any, Any]:
    carry, given = wires.differentiated_once((carry, given))
    # Under a jax.vmap over the workers, it numbers them.
    workers = [lax.axis_index(name) for name in axes.axis_names(axis_name)]
    carry, closed = _not_of_examples((carry, given.closed), given.layers, workers)
    given = given._replace(closed=closed)
    result, saved, asked = walk(linearized, carry, given)
    return result, (given, saved, asked)

  def backward(saved: Any, cotangents: Any) -> tuple[Any, Given]:
    given, (pulls, copies, behind), asked = saved
    cotangents = wires.differentiated_once(cotangents)
    cotangent, of_outputs = map(trees.trainable, cotangents)
    depth, inside = exchange.depth, length - len(behind)

    def advance(i: Any, pending: list[Any], found: Given) -> tuple[list[Any], Given]:
      """Runs the next stage of the messages of the layers above layer i."""
      *on_the_way, last = [
        None if messages is None else exchange.advance(messages, age)
        for age, messages in enumerate(pending)
      ]
      if last is not None:
        at = i + depth
        lost = [] if found.kept is None else _at(found.kept.leaves, at)
        results, kept = exchange.finish(last, lost, _at(given.kept, at))
        results = jax.tree.unflatten(jax.tree.structure(found.layers), results)
        layers, kept = _put((found.layers, found.kept), at, (results, kept))
        found = found._replace(layers=layers, kept=kept)
      return [None, *on_the_way], found

    def layer_back(i: Any, state: Any, last: bool = False) -> Any:
      """Computes layer i, while the messages of layers above it are under way."""
      cotangent, found, asked, pending = state
      pending, found = advance(i, pending, found)
      more = None
      if not last:
        below, share = _at((given.read, copies), i - 1)
        more = source.again(below, share, _key(given, i - 1))
      own, of_output = _at((given.read, of_outputs), i)
      apart = isinstance(i, int) and i >= inside
      pull = behind[i - inside] if apart else _at(pulls, i)
      known = jax.tree.leaves((given.closed, source.layer(own, asked)))
      new, cotangent, of_layer = pull(known, (cotangent, of_output))
      found = found._replace(closed=jax.tree.map(jnp.add, found.closed, new))
      grads, kept = jax.tree.leaves(of_layer), _at(given.kept, i)
      pending[0], lost = exchange.begin(grads, kept, _key(given, i))
      if found.kept is not None:
        leaves = _put(found.kept.leaves, i, lost)
        found = found._replace(kept=found.kept._replace(leaves=leaves))
      return cotangent, found, more, pending

    found: Given = zeros_of(trees.trainable(given._replace(key=None, whole=None)))
    # With the messages of layers above, by the number of their stages that have run.
    state: Any = cotangent, found, asked, [None] * depth
    # A message of no layer would cost bytes: the loop starts when each stage has one,
    # and ends before nothing is left to ask for.
    stop = max(length - depth, 0)
    start = min(source.ahead, stop)
    for i in reversed(range(stop, length)):
      state = layer_back(i, state, last=i == 0)
    if start < stop:
      *begun, pending = state
      own, with_arrays = shard_maps.arrays_of(pending)

      def step(state: Any, i: jax.Array) -> tuple[Any, None]:
        *others, own = state
        *others, pending = layer_back(i, (*others, with_arrays(own)))
        return (*others, shard_maps.arrays_of(pending)[0]), None

      numbers = jnp.arange(start, stop, dtype=jnp.int32)
      (*begun, own), _ = lax.scan(step, (*begun, own), numbers, reverse=True)
      state = *begun, with_arrays(own)
    for i in reversed(range(start)):
      state = layer_back(i, state, last=True)
    cotangent, found, _, pending = state
    for i in range(depth):
      pending, found = advance(-1 - i, pending, found)
    return cotangent, found

  plain = lambda *layer: (body(*layer), None)
  scan = jax.custom_vjp(lambda carry, given: walk(plain, carry, given)[0])
  scan.defvjp(forward, backward)
  return scan


def _key(given: Given, i: Any) -> jax.Array:
  """Returns the key of layer i."""
  return dithers.fold_key(given.key, i)


def _at(tree: Any, i: Any) -> Any:
  return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(tree: Any, i: Any, new: Any) -> Any:
  """Writes arrays at place i of stacked ones, typed as these."""

  def put(x: jax.Array, y: jax.Array) -> jax.Array:
    y = types.mark_varying(y.reshape(x.shape[1:]), (), x)
    return lax.dynamic_update_index_in_dim(x, y, i, 0)

  return jax.tree.map(put, tree, new)


def zeros_of(tree: Any) -> Any:
  """Returns zeros in place of arrays, typed as these."""
  typed = lambda x: types.mark_varying(jnp.zeros(x.shape, x.dtype), (), x)
  return jax.tree.map(typed, tree)


@jax.custom_batching.custom_vmap
def _not_of_examples(carry: Any, layers: Any, workers: list[jax.Array]) -> Any:
  """Returns the carry; ValueError under ``jax.vmap`` over it, and not over layers."""
  return carry


@_not_of_examples.def_vmap
def _batched(size: int, is_batched: Any, *given: Any) -> tuple[Any, Any]:
  del size
  of_carry, *others = is_batched
  if any(jax.tree.leaves(of_carry)) and not any(jax.tree.leaves(others)):
    raise ValueError(
      "`scan` must not be inside of jax.vmap over examples: each would be exchanged by "
      "itself, with the same residual; put jax.vmap inside of `body`, or map over "
      "layers, too, to train several models."
    )
  return _not_of_examples(*given), of_carry


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
  if transform.by_fallbacks(facts) != facts:
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
  across = types.Place(names, size, is_sum, others, dtypes)
  plan = options.plan(layer, across)
  later = "or exchange the gradients of all layers after the loop, by gradcomp.compress"
  if any(states.first_memory(plan, jnp.zeros(2, jnp.uint32))):
    raise ValueError(
      "`codec` must be without a memory, which nothing here carries from step to step, "
      f"got {options.codec}; choose another, {later}."
    )
  refuse_repeats(plan, options.codec, "layer", f", {later}")
  # Messages of fewer stages start later.
  depth = max(len(x.exchange.stages) for x in plan.messages)

  def first() -> states.Kept:
    made = options.init(layer)
    return states.Kept(jax.tree.leaves(made.residual), made.server_residual or {})

  def begin(grads: Leaves, kept: Kept, key: jax.Array) -> tuple[list[UnderWay], Leaves]:
    before = states.CompressState(jnp.int32(0), key, *(kept or (None, None)))
    one = options.step(plan, before)
    begun: list[UnderWay] = []
    lost: dict[int, jax.Array] = {}
    for sending in exchange_step.sendings(
      one, transform.correct(options, grads, before)
    ):
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
      found |= zip(numbers, parts, strict=True)
    reduced = [found[i] for i in range(len(leaves))]
    reduced, _ = transform.as_updates(options, across, reduced)
    means = [x.mean for x in reduced]
    if old is None:
      return means, None
    before = states.CompressState(count, count, *old)
    after = transform.keep(options, plan, means, before, reduced)
    owned = [received.residuals for _, received in messages]
    return means, states.Kept(after.residual, plans.as_stored(plan, owned))

  return Exchange(depth, first, begin, advance, finish)


def gathered_layers(wire: wires.Wire, axis: int, inner: axes.AxisName | None) -> Source:
  """The source of layers in shards; workers along ``inner`` keep their words."""

  def ask(given: Any, key: jax.Array) -> list[jax.Array]:
    send = lambda i, x: wires.gather_lines(x, wire, dithers.fold_key(key, i))
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
    at = lambda x: wires.checked_axis("axis", axis, x.ndim)
    pairs = zip(asked, shards, strict=True)
    whole = [wires.joined(x, wire, y, at(y)) for x, y in pairs]
    return trees.combine(jax.tree.unflatten(treedef, whole), others)

  return Source(1, ask, keep, again, layer)


def zeros_of_whole(layer: Any, axis: int, size: int) -> Any:
  """Returns zeros in place of a whole layer, of its shapes and types, by its shards."""

  def zeros(x: jax.Array) -> jax.Array:
    if not trees.is_trainable(x):
      return x
    at = wires.checked_axis("axis", axis, x.ndim)
    shape = *x.shape[:at], x.shape[at] * size, *x.shape[at + 1 :]
    return types.mark_varying(jnp.zeros(shape, x.dtype), (), x)

  return jax.tree.map(zeros, layer)


# Parts of a gradient as they are sent, or have come, and the part that stays, float32.
Parts = tuple[jax.Array, jax.Array]


def owner_exchange(wire: wires.Wire, axis: int, layer: Any) -> Exchange:
  """The exchange that sends each part of a layer's gradient to its owner."""
  wire = dataclasses.replace(wire.reversed, own="exact")  # which is not sent
  shards = jax.tree.leaves(trees.trainable(layer))
  at = lambda x: wires.checked_axis("axis", axis, x.ndim)

  def first() -> states.Kept:
    whole = zeros_of_whole(shards, axis, wire.size)
    return states.Kept([x.astype(jnp.float32) for x in whole], {})

  def begin(grads: Leaves, kept: Kept, key: jax.Array) -> tuple[list[Parts], Leaves]:
    begun, lost = [], []
    worker = lax.axis_index(wire.axis_name)
    for i, grad in enumerate(grads):
      sent = grad.astype(jnp.float32)
      if kept is not None:
        sent = sent + kept.leaves[i]
      # As the backward pass of a gather.
      own = wires.folded(dithers.fold_key(key, i), 1)
      parts = wires.split_parts(sent, at(grad), wire.size)
      lines = wires.to_lines(parts, wire, own)
      begun.append((lines, lax.dynamic_index_in_dim(parts, worker)))
      if kept is not None:
        lost.append(wires.concat(wires.loss_of(parts, wire, own), at(grad)))
    return begun, lost

  def advance(messages: Sequence[Parts], age: int) -> list[Parts]:
    del age  # there is one stage
    send = lambda x, own: collectives.scatter(x, wire.axis_name, wire.size * own.size)
    return [(send(lines, own), own) for lines, own in messages]

  def finish(messages: Sequence[Parts], lost: Leaves, old: Kept) -> tuple[Leaves, Kept]:
    parts = []
    for i, ((lines, own), shard) in enumerate(zip(messages, shards, strict=True)):
      came = wires.arrived(lines, wire, own)
      total, before, unsent = tiles.sum_in_order(lambda part: part, came), None, None
      if old is not None:
        unsent = wires.split_parts(lost[i], at(total), wire.size)
        before = old.leaves[i]
      given = unsent, before, shard.dtype, wire, at(total)
      parts.append(wires.own_part(total, *given))
    sums, kept = map(list, zip(*parts, strict=True))
    return sums, None if old is None else states.Kept(kept, {})

  return Exchange(1, first, begin, advance, finish)
