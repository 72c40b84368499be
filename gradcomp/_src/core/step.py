"""The step of a transformation: correct, agree, encode, exchange, decode, keep."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcomp._src.core.codec_memory import remember
from gradcomp._src.core.compression import Compression
from gradcomp._src.core.measures import measured
from gradcomp._src.core.residual_storage import add_residual, is_stored
from gradcomp._src.core.residual_update import Again, remainder
from gradcomp._src.core.state import CompressState, residual_key
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.exchange.step import Reduced, Step, agree, decode, encode, exchange
from gradcomp._src.floats.dtypes import fitted, narrowed
from gradcomp._src.kernels.common.fixed_point import scaled

Finish = Callable[[Reduced], tuple[Reduced, Any]]


def take_step(
  options: Compression, step: Step, updates: Any, state: CompressState, finish: Finish
) -> tuple[Any, CompressState, Any]:
  """Takes a step on one worker; returns its updates, its next state, and the rest.

  ``finish`` is the second half: it returns the result with updates in place of means,
  whose rounding errors join the unsent parts, and further results, the rest.
  """
  corrected = correct(options, updates, state)
  averaging = options.averaging(step, corrected)
  came: Sequence[jax.Array] = ()
  for sending in averaging:
    with sending.scope():
      agreed = agree(sending)
      message = sending.behind(came)
      encoded = encode(message, agreed)._replace(before=came)
      received = exchange(message, encoded)
      came = received.came
      averaging.add(message, decode(message, encoded, received))
  reduced = averaging.result()
  rule = options.feedback
  found = rule.received(updates, state.velocity, state.estimate, reduced)
  finished, rest = finish(found)
  kept = keep(options, step.plan, updates, corrected, state, finished)
  new = jax.tree.unflatten(jax.tree.structure(updates), finished.mean)
  return new, measured(kept, step, updates, corrected, reduced), rest


def correct(options: Compression, updates: Any, state: CompressState) -> list[Any]:
  """Returns the leaves of the gradients, plus momentum and residual."""
  given = options.feedback.sent(updates, state.velocity)
  return jax.tree.leaves(add_residual(given, state.residual, options.codec))


def as_updates(
  dtypes: Sequence[np.dtype], share: float | None, reduced: Reduced
) -> tuple[Reduced, None]:
  """Casts the means, and adds the rounding errors of the cast to the unsent parts.

  Every worker keeps the same ``share`` of the error: 1, or 1/N of a sum. It is None if
  workers keep no residuals. A mean that is too large becomes the largest number.
  """
  means, unsent, own = list(reduced.mean), list(reduced.unsent), list(reduced.own)
  for i, dtype in enumerate(dtypes):
    if share is not None and jnp.finfo(dtype).bits < jnp.finfo(means[i].dtype).bits:
      means[i], lost = narrowed(means[i], dtype)
      unsent[i] = unsent[i] + scaled(lost, share).reshape(unsent[i].shape)
      own[i] = None
  casts = list(map(fitted, means, dtypes))
  return reduced._replace(mean=casts, unsent=unsent, own=own), None


def keep(
  options: Compression,
  plan: MessagePlan,
  updates: Any,
  corrected: Sequence[jax.Array],
  state: CompressState,
  finished: Reduced,
) -> CompressState:
  """Returns the state after a step; parts that are not finite keep their old values."""
  means, unsent, feedback = finished.mean, finished.unsent, options.feedback
  counts = [state.count] * len(means)
  new: dict[str, Any] = {"count": optax.safe_increment(state.count)}
  new["memory"] = remember(plan, state.memory, finished.memory)
  if state.residual is not None:
    # A residual that an earlier transformation left, see switch, is sent once.
    waits = feedback.waits if feedback.keeps else jnp.zeros_like
    lost = map(waits, unsent if feedback.keeps else corrected)
    old, treedef = jax.tree.flatten(state.residual, is_leaf=is_stored)
    key = lambda i: lambda: residual_key(state, plan, i)
    keys = map(key, range(len(means)))
    again: list[Again | None] = [None] * len(means)
    # A momentum would have to be computed anew, too.
    if feedback.keeps and not feedback.moves:
      sent = jax.tree.leaves(feedback.sent(updates, state.velocity))
      again = [
        None if rows is None else Again(x, rows, leaf.dtype, feedback.waits)
        for x, leaf, rows in zip(sent, corrected, finished.own, strict=True)
      ]
    leaves = zip(lost, means, old, counts, keys, again, strict=True)
    written = [remainder(*leaf) for leaf in leaves]
    new["residual"] = jax.tree.unflatten(treedef, [x for x, _ in written])
    counts = [count for _, count in written]
  if feedback.moves:
    new["velocity"] = feedback.keep(updates, state.velocity, finished, counts)
  if feedback.estimates:
    old, treedef = jax.tree.flatten(state.estimate)
    new["estimate"] = jax.tree.unflatten(treedef, map(_estimate, means, old))
  # Owners' residuals that only an earlier transformation kept stay: see switch.
  if finished.owned is not None:
    new["server_residual"] = finished.owned
  return state._replace(**new)


def _estimate(mean: jax.Array, old: jax.Array) -> jax.Array:
  """Returns the mean as a state keeps it, and the old estimate where not finite."""
  new = mean.reshape(old.shape).astype(old.dtype)
  return jnp.where(jnp.isfinite(new), new, old)
