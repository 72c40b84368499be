"""The law of conservation: updates and residuals add up to the gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.sum import RowDecoder
from gradcomp._src.core.residual_storage import is_stored, kind, read_residual
from gradcomp._src.core.state import CompressState
from gradcomp._src.exchange.plan import MessagePlan, own_axes
from gradcomp._src.report import tracing
from gradcomp._src.testing import modes
from gradcomp._src.testing.broken import Findings, law
from gradcomp._src.testing.leaves import Gradients, workers_of, zipped

# The rounding error of a stored residual, as a part of the largest element.
_STORING = {"float32": 0.0, "bfloat16": 2.0**-7, "int8": 1 / 63}


@law(look="the residual: x - decode(encode(x))")
def nothing_is_lost(
  transformation: optax.GradientTransformation,
  gradients: Gradients,
  *,
  plan: MessagePlan | None = None,
  axis_name: str = "data",
) -> Findings:
  """Updates, residuals and owner residuals add up to the gradients, with feedback.

  N times the updates, the residuals of all workers, and N times the residuals of the
  owners, are together the sum of all gradients, to float32's rounding, or that of
  residuals with fewer bits. Two steps show residuals. A transformation without
  residuals passes; so does one that sends momentum, one with decaying residuals, and a
  chain of several, because its updates are not means.

  Its messages are read from a trace, if ``plan`` does not have them, and so is the
  decay of residuals.

  Example:
    >>> from gradcomp.testing import laws
    >>> tx = gradcomp.onebit_sgd(axis_name="data", exchange="all_gather")
    >>> steps = [{"w": jax.random.normal(jax.random.key(i), (2, 600))} for i in (0, 1)]
    >>> laws.nothing_is_lost(tx, steps)
  """
  workers = workers_of(gradients)
  outputs, state = modes.run("vmap", transformation, gradients, axis_name=axis_name)
  if not isinstance(state, CompressState) or state.residual is None:
    return
  if state.velocity is not None:
    return
  if plan is None:
    params = jax.tree.map(lambda leaf: leaf[0], gradients[0])
    ((plan, options),) = tracing.study(transformation, params, workers).made
    if float(options["feedback"].waits(jnp.float32(1.0))) != 1.0:  # it decays
      return
  owned = _owned_leaves(plan, gradients[0], state.server_residual)
  stored = jax.tree.leaves(state.residual, is_leaf=is_stored)
  for i, (path, *given) in enumerate(zipped(*gradients)):
    means = [np.asarray(jax.tree.leaves(x)[i][0], np.float64) for x in outputs]
    sent = workers * np.sum(means, axis=0)
    rest = np.asarray(read_residual(stored[i]), np.float64)
    waiting = rest.sum(axis=0).reshape(sent.shape)
    own = workers * np.asarray(owned[i], np.float64)
    total = sent + waiting + own
    expected = np.sum([np.asarray(x, np.float64).sum(axis=0) for x in given], axis=0)
    if total.shape != expected.shape:
      found = f"has the shape {total.shape}, not {expected.shape}"
      yield "the transformation", f"keep the shape of {path}", found
      continue
    # Every number that is rounded, at most 4 N + 8 of them an element, is below this;
    # one l2 norm a tensor makes residuals much larger than gradients.
    largest = max(np.abs(x).max(initial=0) for x in (*given, rest, own))
    unit = float(jnp.finfo(jnp.float32).eps)
    storing = len(gradients) * workers * _STORING[kind(stored[i])]
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


def _owned_leaves(plan: MessagePlan, gradients: Any, owned: Any) -> list[Any]:
  """Returns the owner residuals in the shapes of their leaves."""
  leaves = [np.zeros(x.shape[1:]) for x in jax.tree.leaves(gradients)]
  waiting = {axes: list(arrays) for axes, arrays in (owned or {}).items()}
  for message in plan.messages:
    arrays = waiting.get(own_axes(plan.axis_name, message.others), [])
    decoders: dict[int, RowDecoder] = {}
    for group, codec in enumerate(message.layout.codecs):
      lossy = arrays and not codec.facts.exact
      decoders[group] = _decoder(codec, arrays.pop(0) if lossy else None)
    found = message.layout.decode(decoders)
    for i, leaf in zip(message.leaves, found, strict=True):
      (first, *_) = plan.codecs[i].rounds(plan.leaves[i].shape)
      if first.of_leaf:  # else owner residuals are of low-rank factors
        leaves[i] = np.asarray(leaf)
  return leaves


def _decoder(codec: Codec, array: Any) -> RowDecoder:
  """Returns the rows of all owners, ``[N, share, ...]``, or zeros."""
  if array is None:
    return lambda start, stop: jnp.zeros((stop - start, codec.tile_size))
  rows = jnp.asarray(array).reshape(-1, *array.shape[2:])
  return lambda start, stop: rows[start:stop]
