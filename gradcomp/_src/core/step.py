"""The step of a transformation: correct, agree, encode, exchange, decode, keep."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcomp._src.core.codec_memory import remember
from gradcomp._src.core.compression import Compression
from gradcomp._src.core.measures import measured
from gradcomp._src.core.residual_storage import add_residual, is_stored
from gradcomp._src.core.residual_update import remainder
from gradcomp._src.core.state import CompressState, residual_key
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.exchange.step import (
  Averaging,
  Reduced,
  Step,
  agree,
  decode,
  encode,
  exchange,
)
from gradcomp._src.floats.dtypes import narrowed
from gradcomp._src.kernels.common.fixed_point import scaled


class Update(NamedTuple):
  """The result of the second half of a step: what becomes of the means.

  Attributes:
    updates: the tree of updates.
    reduced: the result of the exchange.
    unsent: its unsent parts, plus the rounding errors of the updates.
    rest: further results.
  """

  updates: Any
  reduced: Reduced
  unsent: Sequence[jax.Array]
  rest: Any = None


def take_step(
  options: Compression,
  step: Step,
  updates: Any,
  state: CompressState,
  finish: Callable[[Reduced], Update],
) -> tuple[Update, CompressState]:
  """Takes a step on one worker; returns its updates, and its next state.

  Args:
    options: the options of the transformation.
    step: the facts of the step.
    updates: the worker's gradients.
    state: the state before the step.
    finish: the second half of the step, which makes updates of the means.
  """
  corrected = correct(options, updates, state)
  averaging = Averaging(step, corrected)
  for message in averaging:
    with message.scope():
      agreed = agree(message)
      encoded = encode(message, agreed)
      received = exchange(message, encoded)
      averaging.add(message, decode(message, encoded, received))
  update = finish(averaging.result())
  kept = keep(options, step.plan, updates, corrected, state, update)
  return update, measured(kept, step, updates, corrected, update.reduced)


def correct(options: Compression, updates: Any, state: CompressState) -> list[Any]:
  """Returns the leaves of the gradients, plus momentum and residual."""
  given = options.feedback.sent(updates, state.velocity)
  return jax.tree.leaves(add_residual(given, state.residual, options.codec))


def as_updates(
  like: Any, dtypes: Sequence[np.dtype], share: float | None, reduced: Reduced
) -> Update:
  """Casts the means, and adds the rounding errors of the cast to the unsent parts.

  Every worker keeps the same error, so the mean of all is the error of the mean.

  Args:
    like: a tree of the structure of the updates.
    dtypes: the dtype of each update.
    share: the part of each error that a worker keeps: 1, or 1/N of a sum. None if
      workers keep no residuals; then a mean that is too large becomes infinite.
    reduced: the result of an exchange.
  """
  means = list(reduced.mean)
  unsent = list(reduced.unsent)
  for i, dtype in enumerate(dtypes):
    if share is not None and jnp.finfo(dtype).bits < jnp.finfo(means[i].dtype).bits:
      means[i], lost = narrowed(means[i], dtype)
      unsent[i] = unsent[i] + scaled(lost, share).reshape(unsent[i].shape)
  casts = [mean.astype(dtype) for mean, dtype in zip(means, dtypes, strict=True)]
  updates = jax.tree.unflatten(jax.tree.structure(like), casts)
  return Update(updates, reduced, unsent)


def keep(
  options: Compression,
  plan: MessagePlan,
  updates: Any,
  corrected: Sequence[jax.Array],
  state: CompressState,
  update: Update,
) -> CompressState:
  """Returns the state after a step, with the new residuals.

  Where an update is not finite, residuals and momentum keep their old values.
  """
  reduced, means = update.reduced, jax.tree.leaves(update.updates)
  feedback, unsent = options.feedback, update.unsent
  counts = [state.count] * len(means)
  new: dict[str, Any] = {"count": optax.safe_increment(state.count)}
  new["memory"] = remember(plan, state.memory, reduced.memory)
  if state.residual is not None:
    # A residual that an earlier transformation left, see switch, is sent once.
    waits = feedback.waits if feedback.keeps else jnp.zeros_like
    lost = map(waits, unsent if feedback.keeps else corrected)
    old, treedef = jax.tree.flatten(state.residual, is_leaf=is_stored)
    key = lambda i: lambda: residual_key(state, plan, i)
    leaves = zip(lost, means, old, counts, map(key, range(len(means))), strict=True)
    written = [remainder(*leaf) for leaf in leaves]
    new["residual"] = jax.tree.unflatten(treedef, [x for x, _ in written])
    counts = [count for _, count in written]
  if feedback.moves:
    chosen = reduced.chosen
    args = updates, state.velocity, means, unsent, chosen, counts
    new["velocity"] = feedback.keep(*args)
  # Owners' residuals that only an earlier transformation kept stay: see switch.
  if reduced.owned is not None:
    new["server_residual"] = reduced.owned
  return state._replace(**new)
