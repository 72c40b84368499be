"""Names the optimizers that are timed on links: they exchange in place of gradients.

A time covers the way from the gradient to the update. Each makes its first step, which
is not timed, in float32 where it has a warm-up.
"""

from collections.abc import Callable
from typing import NamedTuple

import optax

import gradcomp
from gradcomp import contrib, optimizers

_RATE = 1e-3


class Optimizer(NamedTuple):
  """An optimizer of the gradients of the axis ``"data"``, and its exchanges' names."""

  make: Callable[[str], optax.GradientTransformation]
  exchanges: tuple[str, ...]
  message_bytes: None = None

  def transformation(self, exchange: str) -> optax.GradientTransformation:
    """Makes the optimizer with one of its exchanges."""
    return self.make(exchange)


def _adam(exchange: str) -> optax.GradientTransformation:
  return optax.chain(
    gradcomp.dense(axis_name="data", exchange=exchange), optax.adam(_RATE)
  )


OPTIMIZERS: dict[str, Optimizer] = {
  "adam": Optimizer(_adam, ("psum",)),
  "1-bit adam": Optimizer(
    lambda name: optimizers.adam(_RATE, axis_name="data", exchange=name, warmup=1),
    ("two_shot", "all_gather"),
  ),
  "dion-4": Optimizer(
    lambda name: contrib.dion(_RATE, axis_name="data", exchange=name, rank=4), ("psum",)
  ),
}
