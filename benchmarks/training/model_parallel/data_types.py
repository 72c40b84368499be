"""The data types that Dettmers compares, and a test of whether nets differ by them."""

import statistics
import time
from collections.abc import Sequence

from scipy import stats

from benchmarks.common.tables import spread
from benchmarks.training.model_parallel.ways import Runs
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


def accuracies(title: str, runs: Runs, seeds: int) -> list[float]:
  """Trains from all seeds, and returns the accuracies of the tests in percent."""
  start = time.perf_counter()
  found = [runs(seed)[0] for seed in range(seeds)]
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
  found = stats.f_oneway(*groups)
  return {"F": float(found.statistic), "p": float(found.pvalue)}


def beside(arms: dict[str, list[float]]) -> list[str]:
  """Returns the accuracies of the arms, and the differences to f32 seed by seed."""
  cells = [spread(arms["f32"])]
  for values in [*arms.values()][1:]:
    less = [a - b for a, b in zip(values, arms["f32"], strict=True)]
    cells.append(f"{spread(values)} ({spread(less, '+')})")
  return cells
