"""Measures the errors of 8-bit numbers, and prints them beside the paper's table 2.

  python -m benchmarks.codecs.approximation [--size 25000000] [--quick]
    [--output FILE.json]

The paper is Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016,
section 3.4. It has mean absolute errors, and means of |decoded - x| / |x|, in which
exact zeros do not count. As in the paper, dynamic_tree and linear are scaled by the
largest of all numbers, and static_tree and mantissa by 10, or by 100 on N(0, 10^2).
There 10^2 is the variance: at a deviation of 100, a third of the numbers would be
beyond the largest level. A second table has static_tree and mantissa scaled by the
largest number instead, and also dynamic_map, which the paper does not have.

Compare the relative errors. The paper's absolute errors are in a unit that it does not
name, and they grow with the square of the deviation. With 127 equal steps up to 5.5,
which is about the largest of 25 million normal numbers, the error is a quarter of a
step, 0.011, and the paper has 0.0004.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.common import cli, tables
from gradcomp.codecs import EightBit

# The paper's mean absolute errors and mean relative errors in percent.
PAPER = {
  "U(0, 1)": {
    "dynamic_tree": (0.00004, 1.39),
    "linear": (0.0024, 2.16),
    "mantissa": (0.0017, 7.22),
    "static_tree": (0.0007, 4.82),
  },
  "N(0, 1)": {
    "dynamic_tree": (0.0005, 2.46),
    "linear": (0.0004, 6.47),
    "mantissa": (0.0104, 6.89),
    "static_tree": (0.0093, 6.3),
  },
  "N(0, 10^2)": {
    "dynamic_tree": (0.049, 2.49),
    "linear": (0.041, 6.44),
    "mantissa": (1.066, 7.19),
    "static_tree": (0.926, 6.28),
  },
  "N(0, 0.2^2)": {
    "dynamic_tree": (0.000018, 2.45),
    "linear": (0.000015, 6.15),
    "mantissa": (0.00055, 8.26),
    "static_tree": (0.00022, 6.58),
  },
}

Sample = Callable[[np.random.Generator, int], np.ndarray]

# Each distribution, and the power of ten that the paper scales it by.
DISTRIBUTIONS: dict[str, tuple[Sample, int]] = {
  "U(0, 1)": (lambda rng, size: rng.random(size, np.float32), 1),
  "N(0, 1)": (lambda rng, size: rng.standard_normal(size, np.float32), 1),
  "N(0, 10^2)": (lambda rng, size: 10 * rng.standard_normal(size, np.float32), 2),
  "N(0, 0.2^2)": (lambda rng, size: 0.2 * rng.standard_normal(size, np.float32), 1),
}
BEYOND_THE_PAPER = ("static_tree", "mantissa", "dynamic_map")


@functools.cache
def roundtrip(codec: EightBit) -> Callable[[np.ndarray], jax.Array]:
  """Compiles encoding and decoding once for all samples."""
  return jax.jit(lambda x: codec.decode(codec.encode(x), like=x))


def errors(codec: EightBit, x: np.ndarray) -> dict[str, float]:
  """Returns the mean errors of one codec on one sample."""
  distance = np.abs(np.asarray(roundtrip(codec)(x)) - x)
  size = np.abs(x)
  relative = np.divide(distance, size, out=np.zeros_like(size), where=size > 0)
  return {
    "absolute": float(distance.mean(dtype=np.float64)),
    "relative_percent": float(100 * relative.sum(dtype=np.float64) / (size > 0).sum()),
  }


def beside_paper(name: str, x: np.ndarray, offset: int) -> dict[str, dict[str, float]]:
  """Returns the errors of the paper's types, scaled as in the paper."""
  result = {}
  for data_type, (absolute, relative) in PAPER[name].items():
    fixed = offset if data_type in ("static_tree", "mantissa") else None
    found = errors(EightBit(dtype=data_type, exponent_offset=fixed), x)
    result[data_type] = found | {
      "paper_absolute": absolute,
      "paper_relative_percent": relative,
      "ratio": found["relative_percent"] / relative,
    }
  return result


def show(title: str, results: dict[str, dict[str, dict[str, float]]]) -> None:
  """Prints a line for each type on each distribution."""
  print(f"\n{title}")
  tables.show(
    {f"{x}  {y}": row for x, of_x in results.items() for y, row in of_x.items()}
  )


def main() -> None:
  options = cli.options(
    __doc__,
    "1,000 numbers in a sample",
    "JSON file to write",
    size=cli.Option(25_000_000, 1000, "numbers in a sample"),
    seed=cli.Option(0),
  )
  results: dict[str, Any] = {"size": options.size, "seed": options.seed}
  as_paper, by_largest = results["as_paper"], results["by_largest"] = {}, {}
  for name, (sample, offset) in DISTRIBUTIONS.items():
    x = sample(np.random.default_rng(options.seed), options.size)
    as_paper[name] = beside_paper(name, x, offset)
    by_largest[name] = {
      data_type: errors(EightBit(dtype=data_type), x) for data_type in BEYOND_THE_PAPER
    }
  show(f"Scaled as in the paper, {options.size:,} numbers", as_paper)
  show("Scaled by the largest number", by_largest)
  cli.write_json(options.output, results)


if __name__ == "__main__":
  main()
