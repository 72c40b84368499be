"""Trains from any seed, with programs that are compiled once for all seeds."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
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
  evaluated: Collection[int]  # the steps behind which it is tested
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
  # Returns what a step takes beside its state, from a seed, a batch and the step's
  # number; and the step as part of a program, from a state and that.
  drawn: Callable[[int, Any, int], Any] | None = None
  whole: Callable[[Any, Any], tuple[Any, Any]] | None = None

  def train(
    self, seed: int, stepped: Callable[[], None] = lambda: None, saved: Saved = NOWHERE
  ) -> dict[str, Any]:
    """Trains from one seed, to the end or until the loss is no number any more.

    Returns the points, a fingerprint of the last parameters in hexadecimal digits, and
    the step at which a training diverged. ``stepped`` is called behind each step, and
    ``saved`` has where the training goes on from.
    """
    batches, curve = self.batches(seed), {"points": [], "losses": []}
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
    found = {"points": points, "fingerprint": _fingerprint(state[0])}
    return found if _finite(points[-1]) else found | {"diverged": points[-1]["step"]}

  def train_together(self, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Trains from several seeds at once, and returns what ``train`` does of each.

    All steps between two points are one program, a loop in a ``vmap`` over the seeds. A
    GPU computes that in seconds; see emulated.py for why a CPU does not.
    """
    loop = functools.partial(jax.lax.scan, self.whole)
    steps = jax.jit(jax.vmap(loop), donate_argnums=0)
    join = jax.jit(lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees))
    row = lambda states, i: jax.tree.map(lambda x: x[i], states)
    cut = jax.jit(lambda states: [row(states, i) for i in range(len(seeds))])
    batches, states = [*map(self.batches, seeds)], [*map(self.start, seeds)]
    found: list[dict[str, Any]] = [{"points": []} for _ in seeds]
    done = 0
    for number in sorted(self.evaluated):
      given = [
        _stacked([self.drawn(seed, next(own), x) for x in range(done + 1, number + 1)])
        for seed, own in zip(seeds, batches, strict=True)
      ]
      joined, losses = steps(join(*states), _stacked(given))
      states = cut(joined)
      for i, own in enumerate(np.asarray(losses)):
        if "diverged" in found[i]:
          continue
        mean = float(np.mean(own, dtype=np.float64))
        reached, states[i] = self.test(seeds[i], states[i], number, mean)
        found[i]["points"].append(reached)
        found[i]["fingerprint"] = _fingerprint(states[i][0])
        if not _finite(reached):
          ends = np.append(~np.isfinite(own), True)
          found[i]["diverged"] = min(done + 1 + int(ends.argmax()), number)
      done = number
    return found


def _stacked(trees: Sequence[Any]) -> Any:
  """Stacks arrays of the host, and keys."""
  stack = lambda *x: (jnp if isinstance(x[0], jax.Array) else np).stack(x)
  return jax.tree.map(stack, *trees)


def _fingerprint(params: Any) -> str:
  words = np.ravel(gradcomp.telemetry.fingerprint(params))
  return "".join(f"{word:08x}" for word in words)


def _finite(reached: Point) -> bool:
  return math.isfinite(reached["train_loss"]) and math.isfinite(reached["test_loss"])


def point(step: int, train_loss: float, evaluated: tuple[float, float]) -> Point:
  """Makes a point of a curve from the loss and the accuracy on what is held out."""
  loss, accuracy = evaluated
  found = {"step": step, "train_loss": train_loss, "test_loss": loss}
  return found | {"accuracy": 100 * accuracy}


def own(state: Any) -> Any:
  """Returns the axis of the workers for each array: None for step counts and keys."""
  same = lambda path: getattr(path[-1], "name", "") in ("count", "key")
  return jax.tree.map_with_path(lambda path, _: None if same(path) else 0, state)


def first_kept(
  exchange: Any, params: Any, workers: int, axis: str = AXIS, axes_of: Callable = own
) -> Any:
  """Returns the first state of an exchange, stacked over the workers of a ``vmap``."""
  of_each = functools.partial(jax.vmap, lambda _: exchange.init(params), axis_name=axis)
  each = jnp.arange(workers)
  return of_each(out_axes=axes_of(jax.eval_shape(of_each(), each)))(each)


def of_workers(tree: Any, workers: int) -> Any:
  """Gives each worker its part of all samples, ``[workers, n, ...]``."""
  return jax.tree.map(lambda x: x.reshape(workers, -1, *x.shape[1:]), tree)
