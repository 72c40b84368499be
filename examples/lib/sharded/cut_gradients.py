"""Inspects the loss of gradients on their way to the owners of sharded parameters.

``parallel.gather`` compresses in its backward pass, out of which nothing comes but
cotangents. So another exchange is inspected, which does to whole gradients what that
one does: it encodes them with the same codec, on top of the same residuals. (A worker's
own part, which gather leaves as it is, is rounded there, too.)
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import gradcomp
from gradcomp.codecs import Codec

AXIS = "data"
SMALL = 1024  # elements of a leaf that travels in float32


def exchange_of(codec: Codec, *, feedback: bool = True) -> optax.GradientTransformation:
  """Makes the exchange; its state also has the residuals of gathers."""
  return gradcomp.compress(
    codec,
    axis_name=AXIS,
    exchange="all_gather",
    feedback="error" if feedback else None,
    min_leaf_size=SMALL,
  )


def inspect(
  exchange: optax.GradientTransformation, grads: Any, residuals: Any
) -> gradcomp.telemetry.Inspection:
  """Inspects whole gradients of a worker, inside the map.

  Args:
    exchange: that of the codec.
    grads: of whole parameters, in the units in which owners add them.
    residuals: the unsent parts, in the same shapes; None without one.
  """
  state = exchange.init(grads)
  if state.residual is not None:
    leaves, tree = jax.tree.flatten(grads)
    kept = [
      jnp.zeros_like(g, shape=g.shape or (1,)) if e is None else e
      for g, e in zip(leaves, tree.flatten_up_to(residuals), strict=True)
    ]
    state = state._replace(residual=tree.unflatten(kept))
  found = gradcomp.telemetry.inspect(exchange, grads, state)

  def to_owners(metrics: gradcomp.telemetry.Metrics) -> gradcomp.telemetry.Metrics:
    # Each part goes to one worker here, where all_gather sends it to all others.
    return metrics._replace(bytes_sent=metrics.bytes_sent / lax.axis_size(AXIS))

  leaves = {path: to_owners(metrics) for path, metrics in found.leaves.items()}
  return gradcomp.telemetry.Inspection(to_owners(found.total), leaves)
