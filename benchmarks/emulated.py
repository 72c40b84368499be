"""Trains with workers that ``vmap`` emulates on one device.

A fifth of a run is one scan over its steps, so a run takes as long as its arithmetic.
The mean and the residuals are those of workers on devices of their own.
"""

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcomp

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from training import AXIS, Batch, Task  # noqa: E402

WORKERS = 4
POINTS = 5  # of a curve


class Setting(NamedTuple):
  """The settings that all methods share."""

  title: str
  metric: str
  task: Task
  batches: Callable[..., Iterator[Batch]]
  steps: int
  learning_rate: float
  momentum: float | None
  max_norm: float | None


# From the densities of the phases and their first steps to what exchanges.
Exchange = Callable[
  [Setting, Sequence[float], Sequence[int]], optax.GradientTransformation
]


class Method(NamedTuple):
  """An exchange in one phase or several, and the optimizer behind it."""

  exchange: Exchange
  densities: tuple[float, ...]
  phase: int = 0  # percent of the steps that each phase but the last takes
  momentum_behind: bool = False
  clip_behind: bool = False

  def starts(self, steps: int) -> list[int]:
    return [i * self.phase * steps // 100 for i in range(len(self.densities))]


class Trainer:
  """Trains one method on one task with a program that is compiled once."""

  def __init__(self, setting: Setting, method: Method):
    exchange = method.exchange(setting, method.densities, method.starts(setting.steps))
    rate = optax.cosine_decay_schedule(setting.learning_rate, setting.steps)
    after = optax.sgd(rate)
    if method.momentum_behind and setting.momentum is not None:
      after = optax.sgd(rate, momentum=setting.momentum, nesterov=True)
    if method.clip_behind and setting.max_norm is not None:
      after = optax.chain(optax.clip_by_global_norm(setting.max_norm), after)

    def init(params: Any) -> Any:
      of_each = functools.partial(
        jax.vmap, lambda _: exchange.init(params), axis_name=AXIS
      )
      each = jnp.arange(WORKERS)
      axes = own(jax.eval_shape(of_each(), each))
      return params, of_each(out_axes=axes)(each), after.init(params)

    def step(carry: Any, batch: Batch) -> Any:
      params, kept, state = carry
      axes = own(kept)

      def worker(kept: Any, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(setting.task.loss_fn)(params, batch)
        mean, kept = exchange.update(grads, kept, params)
        return mean, kept, jax.lax.pmean(loss, AXIS)

      mean, kept, loss = jax.vmap(
        worker, in_axes=(axes, 0), out_axes=(None, axes, None), axis_name=AXIS
      )(kept, batch)
      updates, state = after.update(mean, state, params)
      return (optax.apply_updates(params, updates), kept, state), loss

    self._setting = setting
    self._init = jax.jit(init)
    self._steps = jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)
    self.bytes = byte_counts(setting, method)

  def train(self, seed: int) -> dict[str, Any]:
    """Trains from one seed, and returns the curve."""
    setting = self._setting
    params = jax.device_get(setting.task.init_params(seed))  # of no mesh
    carry = self._init(params)
    batches = setting.batches(seed=seed)
    points, seconds = [], []
    steps = setting.steps // POINTS
    for i in range(POINTS):
      part = stacked(batches, steps)
      start = time.perf_counter()
      carry, losses = jax.block_until_ready(self._steps(carry, part))
      seconds.append(time.perf_counter() - start)
      evaluated = setting.task.evaluate(carry[0])
      reached = point((i + 1) * steps, float(losses.mean()), evaluated)
      points.append(with_perplexity(reached))
    compilations = self._steps._cache_size()
    if compilations != 1:
      raise RuntimeError(f"{compilations} compilations")
    return {
      "points": points,
      "step_ms": 1000 * statistics.median(seconds) / steps,
      "compilations": compilations,
    }


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


def stacked(batches: Iterator[Batch], steps: int) -> Batch:
  """Stacks the next batches as arrays of ``[steps, workers, ...]``."""
  drawn = [next(batches) for _ in range(steps)]
  return jax.tree.map(
    lambda *x: np.stack(x).reshape(steps, WORKERS, -1, *x[0].shape[1:]), *drawn
  )


def byte_counts(setting: Setting, method: Method) -> dict[str, Any]:
  """Counts the bytes of a worker in a step of the last phase, and in a mean step."""
  params = jax.eval_shape(lambda: setting.task.init_params(0))
  counts = [
    gradcomp.explain(
      method.exchange(setting, [density], [0]), params, workers=WORKERS
    ).bytes_sent
    for density in method.densities
  ]
  ends = [*method.starts(setting.steps), setting.steps]
  lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
  total = sum(n * count for n, count in zip(lengths, counts, strict=True))
  return {"bytes_a_step": counts[-1], "mean_bytes_a_step": total / setting.steps}
