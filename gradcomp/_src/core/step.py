"""The step of a transformation: correct, average, keep; and again by fallbacks."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gradcomp._src.codecs.protocol import Codec, working_dtype
from gradcomp._src.core import residual_storage as residuals
from gradcomp._src.core.codec_memory import remember
from gradcomp._src.core.compression import Compression
from gradcomp._src.core.feedback import Feedback
from gradcomp._src.core.measures import measured
from gradcomp._src.core.state import CompressState, residual_key
from gradcomp._src.exchange import collectives
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.exchange.step import Own, OwnEntries, Reduced, Step, average
from gradcomp._src.floats.dtypes import fitted, narrowed
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.kernels.materialize import updated_in_place
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.place import Place
from gradcomp._src.mesh.study import is_study

Finish = Callable[[list[Reduced]], tuple[list[Reduced], Any]]
Facts = TypeVar("Facts")
Kept = tuple[residuals.Stored, jax.Array | None]  # residual and momentum of a leaf
Taken = TypeVar("Taken", bound=tuple[Any, ...])  # the result that counts, and others


def take_step(
  options: Compression, step: Step, updates: Any, state: CompressState, finish: Finish
) -> tuple[Any, CompressState, Any]:
  """Takes a worker's step; returns updates, state, and the rest of ``finish``."""
  # `finish` turns means into updates, with their rounding errors in the unsent parts.
  corrected = correct(options, updates, state)
  run = getattr(options.codec, "average", average)  # of factors, or of leaves
  found, owned, _ = run(step, corrected)
  reduced = [found[i] for i in range(len(corrected))]
  changed = options.feedback.received(updates, state.estimate, reduced)
  finished, rest = finish(changed)
  kept = keep(options, step.plan, updates, state, finished)
  # Owners' residuals that only an earlier transformation kept stay: see switch.
  kept = kept if owned is None else kept._replace(server_residual=owned)
  new = jax.tree.unflatten(jax.tree.structure(updates), [x.mean for x in finished])
  return new, measured(kept, step, updates, corrected, reduced), rest


def correct(options: Compression, updates: Any, state: CompressState) -> list[Any]:
  """Returns the leaves of the gradients, plus momentum and residual."""

  def add(g: jax.Array, residual: residuals.Stored | None = None) -> jax.Array:
    wide = g.astype(working_dtype(options.codec.facts, g.dtype))
    if residual is None:
      return wide
    kept = lax.reshape(residuals.read_residual(residual), g.shape)
    return lax.add(kept.astype(wide.dtype), wide)

  given = options.feedback.sent(updates, state.velocity)
  with jax.named_scope("gradcomp_correct"):
    rest = [] if state.residual is None else [state.residual]
    return jax.tree.leaves(jax.tree.map(add, given, *rest))


def as_updates(
  options: Compression, across: Place, reduced: Sequence[Reduced]
) -> tuple[list[Reduced], None]:
  """Casts the means; with feedback each worker keeps the error, or 1/N of a sum's."""
  share = 1 / across.addends if options.exchange.sends else 1.0

  def cast(x: Any, dtype: np.dtype) -> Any:
    if options.feedback.keeps and jnp.finfo(dtype).bits < jnp.finfo(x.mean.dtype).bits:
      mean, lost = narrowed(x.mean, dtype)
      unsent = x.unsent + scaled(lost, share).reshape(x.unsent.shape)
      x = x._replace(mean=mean, unsent=unsent, own=None)
    return x._replace(mean=fitted(x.mean, dtype))

  return list(map(cast, reduced, across.dtypes)), None


def keep(
  options: Compression,
  plan: MessagePlan,
  updates: Any,
  state: CompressState,
  finished: Sequence[Any],  # of Reduced
) -> CompressState:
  """Returns the state after a step; parts that are not finite keep their old values."""
  feedback = options.feedback
  new: dict[str, Any] = {"count": optax.safe_increment(state.count)}
  new["memory"] = remember(plan, state.memory, [x.memory for x in finished])
  if state.residual is not None:
    old, treedef = jax.tree.flatten(state.residual, is_leaf=residuals.is_stored)
    given = jax.tree.leaves(updates)
    moved = jax.tree.leaves(state.velocity) if feedback.moves else [None] * len(given)
    written = []
    for i, x in enumerate(finished):
      exact = residuals.kind(old[i]) == "float32"
      key = None if exact else residual_key(state, plan, i)
      if not feedback.keeps:  # an earlier one left it, see switch, and it was sent once
        x = x._replace(unsent=jnp.zeros_like(given[i], jnp.float32), own=None)
      x = x._replace(share=None, memory=None, sent=None)  # so a shape is traced once
      before = old[i], moved[i]
      written.append(remainder(feedback, before, given[i], x, state.count, key))
    new["residual"] = jax.tree.unflatten(treedef, [x for x, _ in written])
    if feedback.moves:
      treedef = jax.tree.structure(state.velocity)
      new["velocity"] = jax.tree.unflatten(treedef, [x for _, x in written])
  if feedback.estimates:
    old, treedef = jax.tree.flatten(state.estimate)
    usable = lambda new, h: jnp.where(jnp.isfinite(new), new, h)
    hold = lambda x, h: usable(x.mean.reshape(h.shape).astype(h.dtype), h)
    kept = [hold(x, h) for x, h in zip(finished, old, strict=True)]
    new["estimate"] = jax.tree.unflatten(treedef, kept)
  return state._replace(**new)


@functools.partial(jax.jit, static_argnums=0)  # leaves of a shape: traced once
def remainder(
  feedback: Feedback,
  old: Kept,
  gradient: jax.Array,
  found: Reduced,
  count: jax.Array,
  key: Any,
) -> Kept:
  """Returns the new residual and momentum; old ones where the step is not finite."""
  # Where the unsent part or the mean is not finite, no worker keeps the gradient, or
  # counts its bucket as sent. `count` is the step's, see materialize.updated_in_place.
  # `key`, uint32[2], rounds to fewer bits.
  residual: Any
  keep: Any = _usable
  (residual, momentum), stored, lane = old, None, None
  mean, unsent, own, chosen = found.mean, found.unsent, found.own, found.chosen
  dtype, kind = unsent.dtype, residuals.kind(residual)
  unsent = feedback.waits(unsent)
  # With `own` a CPU does not store the unsent part until the mean is there. Beside
  # entries, numbers rounded to 16 bits take less than the random bits.
  half = kind == "bfloat16" and isinstance(own, Own) and not feedback.moves
  own = own if kind == "float32" or half else None
  # Entries suit every shape, and XLA copies views of two rows.
  flat = isinstance(own, OwnEntries) or chosen is not None
  shape = (gradient.shape if flat else unsent.shape) or (1,)
  with jax.named_scope("gradcomp_residual"):
    if isinstance(residual, residuals.Int8Residual):
      wide = unsent.astype(jnp.float32).reshape(residual.codes.shape)
      new, count = _of_int8(wide, mean.reshape(wide.shape), residual, count)
      blocks, residual = residual.scales.shape[-1], None
      stored = residuals.to_int8(new, residuals.lanes(key, new.shape), blocks)
    elif kind == "bfloat16":
      lane, keep = residuals.lanes(key, shape), _of_bfloat16

    def split(unsent: jax.Array, lane: Any) -> tuple[jax.Array, jax.Array | None]:
      return _rounded(unsent, lane), None if chosen is None else unsent

    def kept(old: Any, gradient: Any, unsent: Any, mean: Any, chosen: Any) -> Any:
      residual, momentum = old
      if residual is not None:
        residual = keep(residual, unsent[0], mean)
      if momentum is not None:
        given = gradient.reshape(mean.shape), mean, unsent[1], chosen
        momentum = _moved(feedback, momentum, *given)
      return residual, momentum

    def anew(old: Any, gradient: Any, own: Any, lane: Any, *rest: Any) -> Any:
      sent = feedback.sent(gradient.reshape(old[0].shape), old[1])
      unsent = feedback.waits(own.unsent(old[0].astype(dtype) + sent.astype(dtype)))
      return kept(old, gradient, split(unsent, lane), *rest)

    views = jax.tree.map(lambda x: x.reshape(shape), (residual, momentum))
    rest = mean.reshape(shape), chosen
    read = gradient, split(unsent.reshape(shape), lane), *rest
    once = lambda old: kept(old, *read)
    if own is not None:
      read_again = gradient, own, lane, *rest
      found, _ = updated_in_place(anew, views, count, read_again, once)
    elif all(x.shape == shape for x in jax.tree.leaves((residual, momentum))):
      found = once(views)
    else:
      found, _ = updated_in_place(kept, views, count, read)
    like = residual, momentum
    new = jax.tree.map(lambda x, old: x.reshape(old.shape), found, like)
    return new[0] if stored is None else stored, new[1]


def _moved(
  feedback: Feedback,
  old: jax.Array,
  gradient: jax.Array,
  mean: jax.Array,
  unsent: jax.Array | None,
  chosen: jax.Array | None,
) -> jax.Array:
  """Returns the new momentum, zero in chosen elements; old ones where not finite."""
  # The barrier has u' computed again, from the same numbers. Else it would take the
  # memory of a gradient from the encoding to the end of the exchange.
  added, again = lax.optimization_barrier((gradient, old))
  # A codec that sends all elements makes the mean NaN wherever one is not finite.
  finite = jnp.isfinite(mean)
  if chosen is None or unsent is None:
    return jnp.where(finite, feedback.moved(added, again), old)
  finite = finite & jnp.isfinite(unsent)
  kept = jnp.where(finite, feedback.moved(added, again), old)
  if chosen.dtype == bool:
    return jnp.where(chosen.reshape(old.shape) & finite, 0.0, kept)
  # Zeros are written one by one into the old momentum's memory, without a mask. A flat
  # view of it would be a copy.
  at = lambda x: x.reshape(-1).at[chosen].get(mode="clip", wrap_negative_indices=False)
  mean, unsent = at(mean), at(unsent)
  usable = jnp.isfinite(mean) & jnp.isfinite(unsent)
  sent = kept.at[_index(jnp.where(usable, chosen, old.size), old.shape)]
  return sent.set(0.0, mode="drop", wrap_negative_indices=False)


def _index(place: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
  """Returns indices of flat positions; the array's size gives one out of bounds."""
  index = []
  for size in reversed(shape[1:]):
    index.append(lax.rem(place, jnp.int32(size)))  # soonest compiled: none is negative
    place = lax.div(place, jnp.int32(size))
  return (place, *reversed(index))


def _usable(old: jax.Array, unsent: jax.Array, mean: jax.Array) -> jax.Array:
  """Returns the unsent part where it and the mean are finite, else the old residual."""
  finite = jnp.isfinite(unsent) & jnp.isfinite(mean)
  return jnp.where(finite, unsent.astype(old.dtype), old)


def _rounded(unsent: jax.Array, lane: jax.Array | None) -> jax.Array:
  """Returns the unsent part; in ``bfloat16``, with a lane, as integers ``uint16``."""
  if lane is None:
    return unsent
  # Rounded before the mean arrives, so that half the bytes are held until then. They
  # are held as integers: a CPU would materialize them as floats of 32 bits.
  rounded = residuals.to_bfloat16(unsent.astype(jnp.float32), lane)
  rounded = jnp.where(jnp.isfinite(unsent), rounded, jnp.bfloat16(jnp.inf))
  return lax.bitcast_convert_type(rounded, jnp.uint16)


def _of_bfloat16(old: jax.Array, new: jax.Array, mean: jax.Array) -> jax.Array:
  """Returns the new residual in ``bfloat16``, where it and the mean are finite."""
  most = jnp.uint16(0x7F80)  # the exponent of infinity and NaN
  finite = ((new & most) != most) & jnp.isfinite(mean)
  bits = jnp.where(finite, new, lax.bitcast_convert_type(old, jnp.uint16))
  return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _of_int8(
  unsent: jax.Array, mean: jax.Array, old: residuals.Int8Residual, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes the new residual in float32, before it is rounded to int8."""
  # In the unsent part's memory on CPU: materialized once for both readers, the scale
  # and the codes.
  keep = lambda new, old, mean: _usable(residuals.read_residual(old), new, mean)
  return updated_in_place(keep, unsent, count, (old, mean))


def by_fallbacks(facts: Facts) -> Facts:
  """Returns facts, a tree of layouts and codecs, by their fallbacks; else the same."""

  def of(x: Any) -> Any:
    if isinstance(x, Layout):  # the same rows, so that owners keep theirs
      return dataclasses.replace(x, codecs=by_fallbacks(x.codecs))
    return (x.fallback or x) if isinstance(x, Codec) else x

  return jax.tree.map(of, facts)


def otherwise(
  taken: Taken,
  step: Callable[[Facts], Taken],
  facts: Facts,
  workers: AxisName | None,
  *,
  alike: bool = True,
) -> Taken:
  """Returns ``taken``, or ``step`` by its facts' fallbacks if its first has NaN."""
  # If `alike`, `taken` has the same bits along the axes `workers`.
  arrays, again = jax.tree.leaves(taken[0]), by_fallbacks(facts)
  # Studies read the usual step.
  if again == facts or not arrays or is_study():
    return taken
  # Devices that see something else must take the same branch: XLA's permutations wait
  # for all devices of the program. Devices with the same bits need not be asked.
  found = collectives.any_nan(arrays, workers, alike=alike)
  repeat = jax.named_scope(collectives.REPEAT)(lambda: step(again))
  return lax.cond(found, repeat, lambda: taken)
