"""The optax transformation, and its step: correct, average, keep."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from gradcomp._src.codecs.protocol import Codec, LeafCodec, is_codec, working_dtype
from gradcomp._src.core import feedback as residuals
from gradcomp._src.core.border import not_differentiated, on_workers
from gradcomp._src.core.compression import Compression, Dither
from gradcomp._src.core.feedback import Feedback, FeedbackName
from gradcomp._src.core.measures import measured
from gradcomp._src.core.state import CompressState, remember, residual_key
from gradcomp._src.exchange import collectives
from gradcomp._src.exchange.auto import Auto, ExchangeName
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.exchange.plan import MessageBytes, MessagePlan
from gradcomp._src.exchange.protocol import Exchange
from gradcomp._src.exchange.step import Own, OwnEntries, Reduced, average
from gradcomp._src.floats.dtypes import fitted, narrowed
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.kernels.materialize import updated_in_place
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.study import is_study, platform
from gradcomp._src.mesh.types import Place

Finish = Callable[[list[Reduced]], tuple[list[Reduced], Any]]
Facts = TypeVar("Facts")
Kept = tuple[residuals.Stored, jax.Array | None]  # residual and momentum of a leaf
Taken = TypeVar("Taken", bound=tuple[Any, ...])  # the result that counts, and others


def compress(  # noqa: PLR0913 - options of users, by keyword
  codec: LeafCodec,
  *,
  axis_name: AxisName | None = None,
  exchange: ExchangeName | Auto | Exchange = "auto",
  feedback: FeedbackName | Feedback | None = "auto",
  min_leaf_size: int | None = None,
  message_bytes: MessageBytes = "auto",
  key: ArrayLike = 0,
  dither: Dither = "shared",
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces each worker's gradient by the mean of all workers', sent compressed.

  Put it before an optimizer, and give it the gradients of
  :func:`gradcomp.value_and_grad`, which no collective has reduced. With worker
  :math:`i`'s gradient :math:`g_i` and residual :math:`e_i` (zero without feedback), it
  returns

  .. math:: \frac{1}{N} \sum_i Q(g_i + e_i), \qquad e_i' = g_i + e_i - Q(g_i + e_i)

  where :math:`Q` encodes and decodes. Every worker gets the same bits. ``two_shot``
  encodes the mean again, and sends that rounding error in the next step: see
  :class:`gradcomp.exchange.TwoShot`. Up to that error, the result without feedback is
  unbiased if the codec is.

  Under Explicit axes, call ``update`` in plain ``jax.jit``: it takes addends typed
  ``{U:data}`` and returns their sum, replicated, without :math:`1/N`.

  All is computed in float32 and returned in the gradient's dtype; feedback keeps the
  error of that cast. A mean too large for the dtype becomes its largest number.
  ``Dense()`` adds float64 as float64. Complex gradients travel as pairs of reals. Any
  tree will do, such as an ``equinox.Module``; leaves that are not trained have None as
  gradient.

  A non-finite gradient makes at least its bucket NaN on every worker, and residuals
  keep their old values there. Guard with ``optax.apply_if_finite`` *after* this, or put
  :func:`gradcomp.skip_nonfinite` around everything, which keeps every residual.

  Args:
    codec: the codec of the leaves, e.g. :class:`gradcomp.codecs.QSGD`.
    axis_name, exchange, feedback, min_leaf_size, message_bytes, key, dither: as in
      :class:`gradcomp.CompressOptions`.

  Returns:
    A gradient transformation with a :class:`gradcomp.state.CompressState`. Inside the
    map, ``init`` makes the worker's own state; outside, under ``jax.set_mesh(mesh)`` or
    with arrays on a mesh, the global one: see :func:`gradcomp.state_specs`. Elsewhere,
    as in ``jax.jit`` without a mesh, it cannot count the workers, and ``update`` warns
    if a second stage then loses something.

  Raises:
    ValueError: an option is bad; the codec or the axes do not allow the exchange; or
      the residual would grow (``contraction`` of :class:`gradcomp.codecs.Codec`). In
      ``update``: the axis is not bound; gradients are already reduced; parameters are
      sharded over the axis; or the state or another process does not fit.
    TypeError: ``codec`` is not one; in ``update``, a gradient is not floating point, or
      ``jax.grad`` differentiates through it.

  Example:
    >>> tx = compress(gradcomp.codecs.QSGD(bits=8, rounding="nearest"))
    >>> grads = {"w": jnp.linspace(-1.0, 1.0, 512)}
    >>> state = tx.init(grads)
    >>> updates, state = tx.update(grads, state)
    >>> bool(jnp.all(updates["w"] + state.residual["w"] == grads["w"]))
    True

  References:
    Grubic et al., `2018 <https://doi.org/10.3929/ethz-b-000319485>`_, sections 2.4 and
    3.2; Han et al., `2021 <https://arxiv.org/abs/1911.08907>`_, section 4.2
  """
  if not is_codec(codec):
    raise TypeError(f"`codec` must be an instance of a codec, got {codec!r}.")
  return transformation(Compression(**locals()))


def transformation(parts: Compression) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that averages gradients as its parts do."""

  def core(
    across: Place, updates: Any, state: CompressState
  ) -> tuple[Any, CompressState]:
    updates = not_differentiated(updates)
    parts.check(across, updates, state)
    plan = parts.plan(updates, across)
    parts.warn_of_owners(plan, state)
    finish = functools.partial(as_updates, parts, across)
    take = functools.partial(
      take_step, parts, updates, state, finish, dtypes=across.dtypes
    )
    return otherwise(take(plan), take, plan, across.axes if plan.sends else None)[:2]

  unsent = not parts.exchange.sends
  return on_workers(parts.init, core, parts.axis_name, keeps=unsent, local=unsent)


def take_step(  # noqa: PLR0913 - all that a step depends on
  options: Compression,
  updates: Any,
  state: CompressState,
  finish: Finish,
  plan: MessagePlan,
  instead: Exchange | None = None,
  dtypes: Sequence[np.dtype] = (),
) -> tuple[Any, CompressState, Any]:
  """Takes a worker's step; returns updates, state, and the rest of ``finish``."""
  # `finish` turns means into updates, with their rounding errors in the unsent parts;
  # without `dtypes`, of those of the gradients.
  dtypes = dtypes or [x.dtype for x in jax.tree.leaves(updates)]
  anew = _allowed_anew(options, dtypes, state)
  step = options.step(plan, state)._replace(instead=instead, anew=anew)
  corrected = correct(options, updates, state)
  run = getattr(options.codec, "average", average)  # of factors, or of leaves
  found, owned, _ = run(step, corrected)
  reduced = [found[i] for i in range(len(corrected))]
  changed = options.feedback.received(updates, state.estimate, reduced)
  finished, rest = finish(changed)
  kept = keep(options, plan, updates, state, finished)
  # Owners' residuals that only an earlier transformation kept stay: see switch.
  kept = kept if owned is None else kept._replace(server_residual=owned)
  new = jax.tree.unflatten(jax.tree.structure(updates), [x.mean for x in finished])
  if state.measures is not None:
    kept = measured(kept, step, updates, corrected, reduced)
  return new, kept, rest


def _allowed_anew(
  options: Compression, dtypes: Sequence[np.dtype], state: CompressState
) -> list[tuple[type, ...]]:
  """Returns the records that may compute each leaf's unsent part anew, on a CPU."""
  # So a CPU does not store it until the mean is there. Beside entries, numbers rounded
  # to 16 bits take less than the random bits. Measures, estimates and errors of narrow
  # means read it earlier. A program planned for a CPU has the same bits on a GPU.
  rule = options.feedback
  is_read = state.measures is not None or rule.estimates
  if platform() != "cpu" or is_read or not rule.keeps:
    return []
  half = () if rule.moves else (Own,)
  by_kind = {"float32": (Own, OwnEntries), "bfloat16": half}
  kept = jax.tree.leaves(state.residual, is_leaf=residuals.is_stored)
  pairs = zip(map(residuals.kind, kept), dtypes, strict=True)
  return [by_kind.get(kind, ()) if x == jnp.float32 else () for kind, x in pairs]


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
      x = x._replace(mean=mean, unsent=unsent)
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
        x = x._replace(unsent=jnp.zeros_like(given[i], jnp.float32))
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
  (residual, momentum), stored, lane = old, None, None
  mean, unsent, chosen = found.mean, found.unsent, found.chosen
  own = unsent if isinstance(unsent, Own | OwnEntries) else None
  # Entries suit every shape, and XLA copies views of two rows.
  flat = isinstance(own, OwnEntries) or chosen is not None
  shape = (gradient.shape if flat else unsent.shape) or (1,)
  if own is None:
    unsent = feedback.waits(unsent)

  def split(unsent: jax.Array, lane: Any) -> tuple[jax.Array, jax.Array | None]:
    """Returns the unsent part to keep, and the one that the momentum needs, if any."""
    exact = None if chosen is None else unsent
    if lane is None:
      return unsent, exact
    # Rounded before the mean arrives, so that half the bytes are held until then. They
    # are held as integers: a CPU would materialize them as floats of 32 bits.
    rounded = residuals.to_bfloat16(unsent.astype(jnp.float32), lane)
    rounded = jnp.where(jnp.isfinite(unsent), rounded, jnp.bfloat16(jnp.inf))
    return lax.bitcast_convert_type(rounded, jnp.uint16), exact

  def kept(old: Any, gradient: Any, unsent: Any, mean: Any, chosen: Any) -> Any:
    residual, momentum = old
    if residual is not None:
      residual = _usable(residual, unsent[0], mean)
    if momentum is not None:
      given = gradient.reshape(mean.shape), mean, unsent[1], chosen
      momentum = _moved(feedback, momentum, *given)
    return residual, momentum

  def anew(old: Any, gradient: Any, own: Any, lane: Any, *rest: Any) -> Any:
    sent = feedback.sent(gradient.reshape(old[0].shape), old[1])
    unsent = feedback.waits(own.unsent(old[0].astype(jnp.float32) + sent))
    return kept(old, gradient, split(unsent, lane), *rest)

  with jax.named_scope("gradcomp_residual"):
    if isinstance(residual, residuals.Int8Residual):
      # In the unsent part's memory on CPU: materialized once for both readers, the
      # scale and the codes.
      wide = unsent.astype(jnp.float32).reshape(residual.codes.shape)
      hold = lambda new, old, mean: _usable(residuals.read_residual(old), new, mean)
      read = residual, mean.reshape(wide.shape)
      new, count = updated_in_place(hold, wide, count, read)
      blocks, residual = residual.scales.shape[-1], None
      stored = residuals.to_int8(new, residuals.lanes(key, new.shape), blocks)
    elif residuals.kind(residual) == "bfloat16":
      lane = residuals.lanes(key, shape)
    views = jax.tree.map(lambda x: x.reshape(shape), (residual, momentum))
    rest = mean.reshape(shape), chosen
    if own is not None:
      written, _ = updated_in_place(anew, views, count, (gradient, own, lane, *rest))
    else:
      given = gradient, split(unsent.reshape(shape), lane), *rest
      if all(x.shape == shape for x in jax.tree.leaves((residual, momentum))):
        written = kept(views, *given)
      else:
        written, _ = updated_in_place(kept, views, count, given)
    like = residual, momentum
    new = jax.tree.map(lambda x, old: x.reshape(old.shape), written, like)
    return new[0] if stored is None else stored, new[1]


def _usable(old: jax.Array, unsent: jax.Array, mean: jax.Array) -> jax.Array:
  """Returns the unsent part where it and the mean are finite, else the old residual."""
  if unsent.dtype != jnp.uint16:
    finite = jnp.isfinite(unsent) & jnp.isfinite(mean)
    return jnp.where(finite, unsent.astype(old.dtype), old)
  most = jnp.uint16(0x7F80)  # of bfloat16, the exponent of infinity and NaN
  finite = ((unsent & most) != most) & jnp.isfinite(mean)
  bits = jnp.where(finite, unsent, lax.bitcast_convert_type(old, jnp.uint16))
  return lax.bitcast_convert_type(bits, jnp.bfloat16)


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
  place, index = jnp.where(usable, chosen, old.size), []  # one out of bounds, or where
  for size in reversed(old.shape[1:]):
    index.append(lax.rem(place, jnp.int32(size)))  # soonest compiled: none is negative
    place = lax.div(place, jnp.int32(size))
  sent = kept.at[place, *reversed(index)]
  return sent.set(0.0, mode="drop", wrap_negative_indices=False)


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
