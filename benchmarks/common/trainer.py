"""Trains with workers that ``vmap`` emulates on one device.

A part of a run is one scan over its steps, so a run takes as long as its arithmetic.
The mean and the residuals are those of workers on devices of their own.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from examples.lib.training import AXIS, Batch


class Plan(NamedTuple):
  """A way to train, as one worker does it.

  Attributes:
    init: from whole parameters to the worker's own and its state.
    step: from these and a batch to the next ones, the loss, and what is found out.
  """

  init: Callable[[Any], Any]
  step: Callable[[Any, Any, Any], Any]


class Emulated:
  """Trains workers by a program that is compiled once for all seeds.

  Args:
    plan: of each worker.
    workers: N.
  """

  def __init__(self, plan: Plan, workers: int):
    each = functools.partial(jax.vmap, axis_name=AXIS, axis_size=workers)

    def init(params: Any) -> Any:
      of_each = functools.partial(each, plan.init, in_axes=None)
      return of_each(out_axes=own(jax.eval_shape(of_each(), params)))(params)

    def step(carry: Any, batch: Any) -> Any:
      axes = own(carry)
      *carry, loss, found = each(plan.step, in_axes=(*axes, 0), out_axes=(*axes, 0, 0))(
        *carry, batch
      )
      return tuple(carry), (loss.mean(), found)

    self._workers = workers
    self._init = jax.jit(init)
    self._steps = jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)

  def start(self, params: Any) -> Any:
    """Returns the parameters and the states of all workers, stacked."""
    return self._init(params)

  def run(self, carry: Any, batches: Iterator[Batch], steps: int) -> Any:
    """Takes steps with the next batches.

    Returns:
      The parameters and the states; the mean loss of each step, and what is found out.
    """
    part = stacked(batches, steps, self._workers)
    return jax.block_until_ready(self._steps(carry, part))

  @property
  def compilations(self) -> int:
    """How often the program of the steps was compiled."""
    return self._steps._cache_size()


def point(
  step: int, train_loss: float, evaluated: tuple[float, float]
) -> dict[str, float]:
  """Returns a point of a curve.

  Args:
    step: the number of steps so far.
    train_loss: the mean since the last point.
    evaluated: the loss and the accuracy on what is held out.
  """
  loss, accuracy = evaluated
  return {
    "step": step,
    "train_loss": train_loss,
    "test_loss": loss,
    "accuracy": 100 * accuracy,
  }


def with_perplexity(found: dict[str, float]) -> dict[str, float]:
  """Adds the perplexity to a point."""
  return found | {"perplexity": math.exp(min(found["test_loss"], 50.0))}


def own(state: Any) -> Any:
  """Returns the axis of the workers for each array of a state.

  It is None for step counts and keys, which all workers share.
  """

  def axis(path: Any, _: Any) -> int | None:
    return None if getattr(path[-1], "name", "") in ("count", "key") else 0

  return jax.tree.map_with_path(axis, state)


def stacked(batches: Iterator[Batch], steps: int, workers: int) -> Batch:
  """Stacks the next batches as arrays of ``[steps, workers, ...]``."""
  drawn = [next(batches) for _ in range(steps)]
  return jax.tree.map(
    lambda *x: np.stack(x).reshape(steps, workers, -1, *x[0].shape[1:]), *drawn
  )
