"""The data types that Dettmers compares, and what tells whether nets differ by them."""

import statistics
import time
from collections.abc import Sequence

from cut_training import Trainer
from jax.scipy.special import betainc
from tables import spread

from gradcomp.codecs import Codec, Dense, EightBit

TYPES = ("dynamic_tree", "linear", "mantissa", "static_tree")
ARMS: dict[str, Codec] = {
  "f32": Dense(),
  **{name: EightBit(dtype=name) for name in TYPES},
}


def with_offset(exponent: int) -> dict[str, Codec]:
  """Returns the types that Dettmers' section 3.1 scales by ``10**exponent``.

  It divides the other two, whose exponents are dynamic or none, by the largest element.
  """
  return {
    f"{name}_paper": EightBit(dtype=name, exponent_offset=exponent)
    for name in ("mantissa", "static_tree")
  }


def accuracies(title: str, trainer: Trainer, seeds: int) -> list[float]:
  """Trains from all seeds, and returns the accuracies of the tests in percent."""
  start = time.perf_counter()
  found = [trainer.train(seed)[0] for seed in range(seeds)]
  seconds = time.perf_counter() - start
  print(f"{title}: {statistics.fmean(found):.2f} %, {seconds:.0f} s", flush=True)
  return found


def anova(groups: Sequence[Sequence[float]]) -> dict[str, float]:
  """Returns F and p of a one-way analysis of variance.

  Example:
    >>> found = anova([[6, 8, 4, 5, 3, 4], [8, 12, 9, 11, 6, 8], [13, 9, 11, 8, 7, 12]])
    >>> round(found["F"], 3), round(found["p"], 4)
    (9.265, 0.0024)
  """
  count = sum(map(len, groups))
  mean = statistics.fmean([x for group in groups for x in group])
  means = [statistics.fmean(group) for group in groups]
  between = sum(
    len(group) * (own - mean) ** 2 for group, own in zip(groups, means, strict=True)
  )
  within = sum(
    (x - own) ** 2 for group, own in zip(groups, means, strict=True) for x in group
  )
  a, b = len(groups) - 1, count - len(groups)
  ratio = (between / a) / (within / b) if within else 0.0
  p = float(betainc(b / 2, a / 2, b / (b + a * ratio)))
  return {"F": ratio, "p": p}


def beside(arms: dict[str, list[float]]) -> list[str]:
  """Returns the accuracies of the arms, and the differences to f32 seed by seed."""
  cells = [spread(arms["f32"])]
  for values in [*arms.values()][1:]:
    less = [a - b for a, b in zip(values, arms["f32"], strict=True)]
    cells.append(f"{spread(values)} ({spread(less, '+')})")
  return cells
