"""The step of a transformation: correct, average, keep; and again by fallbacks."""

import dataclasses
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
from gradcomp._src.core.measures import measured
from gradcomp._src.core.residual_update import remainder
from gradcomp._src.core.state import CompressState, residual_key
from gradcomp._src.exchange import collectives
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.exchange.step import Reduced, Step
from gradcomp._src.floats.dtypes import fitted, narrowed
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.study import is_study

Finish = Callable[[list[Reduced]], tuple[list[Reduced], Any]]
Facts = TypeVar("Facts")
Taken = TypeVar("Taken", bound=tuple[Any, ...])  # the result that counts, and others


def take_step(
  options: Compression, step: Step, updates: Any, state: CompressState, finish: Finish
) -> tuple[Any, CompressState, Any]:
  """Takes a worker's step; returns updates, state, and the rest of ``finish``."""
  # `finish` turns means into updates, with their rounding errors in the unsent parts.
  corrected = correct(options, updates, state)
  found, owned, _ = options.averaging.run(step, corrected)
  reduced = [found[i] for i in range(len(corrected))]
  changed = options.feedback.received(updates, state.velocity, state.estimate, reduced)
  finished, rest = finish(changed)
  kept = keep(options, step.plan, updates, corrected, state, finished)
  # Owners' residuals that only an earlier transformation kept stay: see switch.
  kept = kept if owned is None else kept._replace(server_residual=owned)
  new = jax.tree.unflatten(jax.tree.structure(updates), [x.mean for x in finished])
  return new, measured(kept, step, updates, corrected, reduced), rest


def correct(options: Compression, updates: Any, state: CompressState) -> list[Any]:
  """Returns the leaves of the gradients, plus momentum and residual."""
  facts = options.codec.facts

  def add(g: jax.Array, residual: residuals.Stored | None = None) -> jax.Array:
    wide = g.astype(working_dtype(facts, g.dtype))
    if residual is None:
      return wide
    return residuals.read_residual(residual).reshape(g.shape).astype(wide.dtype) + wide

  given = options.feedback.sent(updates, state.velocity)
  with jax.named_scope("gradcomp_correct"):
    rest = [] if state.residual is None else [state.residual]
    return jax.tree.leaves(jax.tree.map(add, given, *rest))


def as_updates(
  dtypes: Sequence[np.dtype], share: float | None, reduced: Sequence[Reduced]
) -> tuple[list[Reduced], None]:
  """Casts the means; each worker keeps a ``share`` of the error, 1 or 1/N, or None."""

  def cast(x: Any, dtype: np.dtype) -> Any:
    if share is not None and jnp.finfo(dtype).bits < jnp.finfo(x.mean.dtype).bits:
      mean, lost = narrowed(x.mean, dtype)
      unsent = x.unsent + scaled(lost, share).reshape(x.unsent.shape)
      x = x._replace(mean=mean, unsent=unsent, own=None)
    return x._replace(mean=fitted(x.mean, dtype))

  return list(map(cast, reduced, dtypes)), None


def keep(
  options: Compression,
  plan: MessagePlan,
  updates: Any,
  corrected: Sequence[jax.Array],
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
        x = x._replace(unsent=jnp.zeros_like(corrected[i]), own=None)
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
