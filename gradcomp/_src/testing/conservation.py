"""The law of conservation: updates and residuals add up to the gradients."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.tiles import from_tiles
from gradcomp._src.core.residual_storage import is_stored, kind, read_residual
from gradcomp._src.core.state import CompressState
from gradcomp._src.exchange.owners import owned_matrices
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.report import tracing
from gradcomp._src.testing import modes
from gradcomp._src.testing.broken import Findings, law
from gradcomp._src.testing.leaves import (
  Gradients,
  Transformation,
  params_of,
  workers_of,
  zipped,
)

# The rounding error of a stored residual, as a part of the largest element.
STORING = {"float32": 0.0, "bfloat16": 2.0**-7, "int8": 1 / 63}


@law(look="the residual: x - decode(encode(x))")
def nothing_is_lost(
  transformation: Transformation, gradients: Gradients, *, axis_name: str = "data"
) -> Findings:
  """Updates, residuals and owner residuals add up to the gradients, with feedback.

  In each step the updates and residuals of all workers, and N times the residuals of
  the owners, are together the sum of all gradients and of what waited before, to
  float32's rounding, or that of residuals with fewer bits. Momentum, ``m u + g``, takes
  the place of a gradient where it is sent. With ``feedback="ef21"`` the mean of the
  workers' estimates is the update and the owner residuals. Two steps show residuals. A
  transformation without residuals passes; so does one with decaying residuals, and a
  chain of several, because its updates are not means.

  Example:
    >>> tx = gradcomp.onebit_sgd(axis_name="data")
    >>> steps = [{"w": jax.random.normal(jax.random.key(i), (2, 600))} for i in (0, 1)]
    >>> gradcomp.testing.laws.nothing_is_lost(tx, steps)
  """
  params, workers = params_of(gradients), workers_of(gradients)
  place = modes.started("vmap", transformation, workers, axis_name=axis_name)
  state = place.init(params)
  if not isinstance(state, CompressState) or state.residual is None:
    return
  ((plan, options),) = tracing.study(transformation, params, workers).made
  feedback = options["feedback"]
  if float(feedback.waits(jnp.float32(1.0))) != 1.0:  # it decays
    return
  for number, gradient in enumerate(gradients):
    output, after = place.update(gradient, state, params)
    for path, found in lost_in_step(plan, feedback, gradient, output, state, after):
      expected = f"keep what it does not send: in step {number} what is sent and what"
      expected += f" waits of {path} are the sum of all gradients, and what waited"
      yield "the transformation", expected, found
    state = after


def lost_in_step(
  plan: MessagePlan,
  feedback: Any,
  gradients: Any,
  updates: Any,
  before: CompressState,
  after: CompressState,
) -> Iterator[tuple[str, str]]:
  """Yields leaf and words for each element that a step loses; leaves ``[N, ...]``."""
  was, owns = (owned_leaves(plan, x.server_residual) for x in (before, after))
  old, new = (jax.tree.leaves(x.residual, is_leaf=is_stored) for x in (before, after))
  velocity = jax.tree.leaves(before.velocity)
  for i, (path, *both) in enumerate(zipped(gradients, updates)):
    given, sent = (np.asarray(x, np.float64) for x in both)
    if sent.shape != given.shape:
      yield path, f"it has the shape {sent.shape[1:]}, not {given.shape[1:]}"
      continue
    residuals = (np.asarray(read_residual(x[i]), np.float64) for x in (old, new))
    waited, waits = (x.reshape(given.shape) for x in residuals)
    if velocity:
      last = np.asarray(velocity[i], np.float32).reshape(given.shape)
      momentum = np.float64(np.float32(feedback.decay) * last) + given
      given = given + feedback.decay * momentum if feedback.nesterov else momentum
    workers = len(given)
    sums = np.stack([sent.sum(axis=0), waits.sum(axis=0), workers * owns[i]])
    expected = np.asarray((given + waited).sum(axis=0) + workers * was[i])
    if after.estimate is not None:  # residuals are negative estimates
      expected = np.zeros_like(expected)
    total = np.asarray(sums.sum(axis=0))
    # Each of at most 4 N + 8 numbers that are rounded is below the largest; one l2 norm
    # a tensor makes residuals much larger than gradients.
    parts = (given, sent, waited, waits, was[i], owns[i])
    largest = max(np.abs(x).max(initial=0) for x in parts)
    unit = (4 * workers + 8) * 2.0**-23 + 2 * workers * STORING[kind(new[i])]
    wrong = np.argwhere(~(np.abs(total - expected) <= unit * max(1.0, largest)))
    for at in map(tuple, wrong.tolist()):
      kept = "{:.4g} sent, {:.4g} in residuals, {:.4g} with its owner"
      words = kept.format(*(x[at] for x in sums))
      yield (
        path,
        f"element {list(at)} is {total[at]:.7g}, not {expected[at]:.7g}, {words}",
      )


def owned_leaves(plan: MessagePlan, owned: Any) -> list[np.ndarray]:
  """Returns the owner residuals in the shapes of their leaves; zeros without any."""
  leaves: list[Any] = [np.zeros(x.shape) for x in plan.leaves]
  for axes, matrices in owned_matrices(plan).items() if owned else ():
    for matrix, array in zip(matrices, owned[axes], strict=True):
      rows: Any = np.asarray(array).reshape(-1, *matrix.shape[1:])
      for i, slot, like in matrix.leaves():
        leaf = from_tiles(rows[slot.start : slot.stop], like, matrix.codec)
        leaves[i] = np.asarray(leaf, np.float64)
  return leaves
