"""The data types that Dettmers compares, and a test of whether nets differ by them."""

import statistics
import time
from collections.abc import Iterable, Sequence

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


def friedman(arms: Iterable[Sequence[float]]) -> float:
  """Returns p of an analysis of variance by ranks, whose blocks are the seeds.

  All arms of a seed begin with the same parameters and see the same batches: they are
  ranked among themselves, so that what a seed adds to all of them hides nothing.

  Example:
    >>> seeds = [90.0, 92.0, 94.0, 96.0, 98.0]
    >>> p = friedman([seeds, [x - 0.1 for x in seeds], [x - 0.2 for x in seeds]])
    >>> round(p, 4), float(round(stats.f_oneway(seeds, [x - 0.1 for x in seeds])[1], 2))
    (0.0067, 0.96)
  """
  return float(stats.friedmanchisquare(*arms).pvalue)


def beside(arms: dict[str, list[float]]) -> list[str]:
  """Returns the accuracies of the arms, and the differences to f32 seed by seed."""
  cells = [spread(arms["f32"])]
  for values in [*arms.values()][1:]:
    less = [a - b for a, b in zip(values, arms["f32"], strict=True)]
    cells.append(f"{spread(values)} ({spread(less, '+')})")
  return cells
