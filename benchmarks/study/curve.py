"""Follows a training of study/command.py: its curve, where it goes on, how it ends."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import gradcomp
from benchmarks.study.settings import Setting
from examples.lib.checkpoints import Saved

Point = dict[str, Any]


def follow(
  setting: Setting,
  state: Any,
  batches: Iterator[Any],
  step: Callable[[Any, Any, int], tuple[Any, Any]],
  test: Callable[[Any, int, float], tuple[Point, Any]],
  stepped: Callable[[], None],
  saved: Saved,
) -> dict[str, Any]:
  """Trains to the end, or until the loss is no number any more.

  Args:
    setting: the settings.
    state: the first state, a tuple that begins with the parameters.
    batches: from the first on.
    step: returns the next state and the loss of a state, a batch and the step's number.
    test: returns a point of the curve, and the state with what it learns from that,
      from a state, the step's number and the mean loss since the point before.
    stepped: called behind each step.
    saved: where the training goes on from, and what keeps it.

  Returns:
    See ``ended``.
  """
  done, state, curve = saved.restore(state, batches, {"points": [], "losses": []})
  points, losses = curve["points"], curve["losses"]
  evaluated = setting.evaluated
  for number in range(done + 1, setting.steps + 1):
    state, loss = step(state, next(batches), number)
    losses.append(float(loss))
    stepped()
    if number in evaluated or not math.isfinite(losses[-1]):
      reached, state = test(state, number, mean_of(losses))
      points.append(reached)
      losses = []
      if not finite(reached):
        break
    saved.save(number, state, {"points": points, "losses": losses})
  return ended(points, state[0])


def mean_of(losses: list[Any]) -> float:
  """Returns the mean of losses that may still be on devices."""
  return float(np.mean(jax.device_get(losses), dtype=np.float64))


def finite(reached: Point) -> bool:
  """Says whether the losses of a point of a curve are numbers."""
  return math.isfinite(reached["train_loss"]) and math.isfinite(reached["test_loss"])


def ended(points: list[Point], params: Any) -> dict[str, Any]:
  """Returns the points and a fingerprint of the last parameters in hexadecimal digits.

  A training that diverged also says at which step.
  """
  words = np.ravel(gradcomp.telemetry.fingerprint(params))
  found = {"points": points, "fingerprint": "".join(f"{word:08x}" for word in words)}
  return found if finite(points[-1]) else found | {"diverged": points[-1]["step"]}
