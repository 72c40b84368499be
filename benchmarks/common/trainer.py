"""Trains from any seed, with programs that are compiled once for all seeds."""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradcomp
from examples.lib.checkpoints import NOWHERE, Saved
from examples.lib.training import AXIS

Point = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Trainer:
  """Trains a method step by step, whatever workers are: devices or a ``vmap``."""

  steps: int  # of a training
  evaluated: Container[int]  # the steps behind which it is tested
  # Makes the first state of a seed, a tuple that begins with the parameters.
  start: Callable[[int], Any]
  batches: Callable[[int], Iterator[Any]]  # those of a seed, from the first on
  # Returns the next state and the loss, from a seed, a state, a batch and the number of
  # the step.
  step: Callable[[int, Any, Any, int], tuple[Any, Any]]
  # Returns a point of the curve, and the state with what it learns from that, from a
  # seed, a state, the step's number and the mean loss since the last point.
  test: Callable[[int, Any, int, float], tuple[Point, Any]]
  bytes: Callable[[], dict[str, Any]]  # what a worker sends in a step, and its ratio
  # Returns what a saved state belongs to.
  recorded: Callable[[], dict[str, Any] | None] = lambda: None

  def train(
    self, seed: int, stepped: Callable[[], None] = lambda: None, saved: Saved = NOWHERE
  ) -> dict[str, Any]:
    """Trains from one seed, to the end or until the loss is no number any more.

    Returns the points, a fingerprint of the last parameters in hexadecimal digits, and
    the step at which a training diverged. ``stepped`` is called behind each step, and
    ``saved`` has where the training goes on from.
    """
    batches = self.batches(seed)
    curve = {"points": [], "losses": []}
    done, state, curve = saved.restore(self.start(seed), batches, curve)
    points, losses = curve["points"], curve["losses"]
    for number in range(done + 1, self.steps + 1):
      state, loss = self.step(seed, state, next(batches), number)
      losses.append(float(loss))
      stepped()
      if number in self.evaluated or not math.isfinite(losses[-1]):
        mean = float(np.mean(losses, dtype=np.float64))
        reached, state = self.test(seed, state, number, mean)
        points.append(reached)
        losses = []
        if not _finite(reached):
          break
      saved.save(number, state, {"points": points, "losses": losses})
    words = np.ravel(gradcomp.telemetry.fingerprint(state[0]))
    found = {"points": points, "fingerprint": "".join(f"{word:08x}" for word in words)}
    return found if _finite(points[-1]) else found | {"diverged": points[-1]["step"]}


def _finite(reached: Point) -> bool:
  return math.isfinite(reached["train_loss"]) and math.isfinite(reached["test_loss"])


def point(step: int, train_loss: float, evaluated: tuple[float, float]) -> Point:
  """Makes a point of a curve from the loss and the accuracy on what is held out."""
  loss, accuracy = evaluated
  return {
    "step": step,
    "train_loss": train_loss,
    "test_loss": loss,
    "accuracy": 100 * accuracy,
  }


def own(state: Any) -> Any:
  """Returns the axis of the workers for each array: None for step counts and keys."""

  def axis(path: Any, _: Any) -> int | None:
    return None if getattr(path[-1], "name", "") in ("count", "key") else 0

  return jax.tree.map_with_path(axis, state)


def first_kept(
  exchange: Any,
  params: Any,
  workers: int,
  axis_name: str = AXIS,
  axes_of: Callable[[Any], Any] = own,
) -> Any:
  """Returns the first state of an exchange, stacked over the workers of a ``vmap``."""
  of_each = functools.partial(
    jax.vmap, lambda _: exchange.init(params), axis_name=axis_name
  )
  each = jnp.arange(workers)
  return of_each(out_axes=axes_of(jax.eval_shape(of_each(), each)))(each)


def of_workers(tree: Any, workers: int) -> Any:
  """Gives each worker its part of all samples, ``[workers, n, ...]``."""
  return jax.tree.map(lambda x: x.reshape(workers, -1, *x.shape[1:]), tree)
