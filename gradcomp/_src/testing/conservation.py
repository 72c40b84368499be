"""The law of conservation: updates and residuals add up to the gradients."""

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

  N times the updates, the residuals of all workers, and N times the residuals of the
  owners, are together the sum of all gradients, to float32's rounding, or that of
  residuals with fewer bits. Two steps show residuals. A transformation without
  residuals passes; so does one that sends momentum, one with decaying residuals, and a
  chain of several, because its updates are not means. With ``feedback="ef21"`` the
  mean of the workers' estimates is the shared one and the owner residuals.

  Example:
    >>> tx = gradcomp.onebit_sgd(axis_name="data")
    >>> steps = [{"w": jax.random.normal(jax.random.key(i), (2, 600))} for i in (0, 1)]
    >>> gradcomp.testing.laws.nothing_is_lost(tx, steps)
  """
  workers = workers_of(gradients)
  outputs, state = modes.run("vmap", transformation, gradients, axis_name=axis_name)
  keeps = isinstance(state, CompressState) and state.residual is not None
  if not keeps or state.velocity is not None:
    return
  params = params_of(gradients)
  ((plan, options),) = tracing.study(transformation, params, workers).made
  if float(options["feedback"].waits(jnp.float32(1.0))) != 1.0:  # it decays
    return
  owned = owned_leaves(plan, state.server_residual)
  stored = jax.tree.leaves(state.residual, is_leaf=is_stored)
  for i, (path, *given) in enumerate(zipped(*gradients)):
    means = [np.asarray(jax.tree.leaves(x)[i], np.float64)[0] for x in outputs]
    sent = workers * np.sum(means, axis=0)
    rest = np.asarray(read_residual(stored[i]), np.float64)
    waiting = rest.sum(axis=0).reshape(sent.shape)
    own = workers * np.asarray(owned[i], np.float64)
    total = sent + waiting + own
    expected = np.sum([np.asarray(x, np.float64).sum(axis=0) for x in given], axis=0)
    if state.estimate is not None:  # the last update, while residuals are negative
      sent, expected = workers * means[-1], np.zeros_like(expected)
      total = sent + waiting + own
    if total.shape != expected.shape:
      found = f"has the shape {total.shape}, not {expected.shape}"
      yield "the transformation", f"keep the shape of {path}", found
    # Every number that is rounded, at most 4 N + 8 of them an element, is below this;
    # one l2 norm a tensor makes residuals much larger than gradients.
    largest = max(np.abs(x).max(initial=0) for x in (*given, rest, own))
    unit = float(jnp.finfo(jnp.float32).eps)
    storing = len(gradients) * workers * STORING[kind(stored[i])]
    bound = ((4 * workers + 8) * unit + storing) * max(5.0, float(largest))
    wrong = np.argwhere(~(np.abs(total - expected) <= bound))
    for at in map(tuple, wrong.tolist()):
      yield (
        "the transformation",
        f"keep what it does not send: after {len(gradients)} steps, what is sent and "
        "what waits are the sum of all gradients",
        f"of {path} element {list(at)} is {total[at]:.7g} and not {expected[at]:.7g}, "
        f"{sent[at]:.4g} sent, {waiting[at]:.4g} in residuals, {own[at]:.4g} with its "
        "owner",
      )


def owned_leaves(plan: MessagePlan, owned: Any) -> list[np.ndarray]:
  """Returns the owner residuals in the shapes of their leaves; zeros without any."""
  leaves: list[Any] = [np.zeros(x.shape) for x in plan.leaves]
  for axes, matrices in owned_matrices(plan).items() if owned else ():
    for matrix, array in zip(matrices, owned[axes], strict=True):
      rows: Any = np.asarray(array).reshape(-1, *matrix.shape[1:])
      for i, slot, like in matrix.leaves():
        # Else owner residuals are of low-rank factors.
        if plan.codecs[i].rounds(plan.leaves[i].shape)[0].of_leaf:
          leaf = from_tiles(rows[slot.start : slot.stop], like, matrix.codec)
          leaves[i] = np.asarray(leaf)
  return leaves
