"""Measures how much of the rounding errors of N workers is left in their mean.

  python -m benchmarks.codecs.noise [--size 262144] [--quick] [--output FOLDER]

The squared error of the mean is divided by what it would be if each worker drew random
numbers of its own. That is known exactly: an element between two levels that are `step`
apart, at the fraction f of the way, has the variance step^2 f (1 - f).

Two ways to round are compared, with the same levels in buckets of 512:

  gradcomp   All workers draw the same random numbers, and each XORs them with its mask.
             This is the library itself, with workers that `vmap` emulates.
  Suresh     Correlated quantization, in NumPy: worker i rounds with (p_i + g_i) / N.
             The p_i are a random permutation of 0 ... N - 1 for every element, and the
             g_i are uniform in [0, 1).

The gradients are Gaussian. Those of different workers are independent, or nearly agree:
any two then have the cosine 0.9. With --output, writes noise.json and noise.png there.

Suresh et al., Correlated Quantization for Distributed Mean Estimation and Optimization,
2022, https://arxiv.org/abs/2203.04925
"""

import functools
import pathlib
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

import gradcomp
from benchmarks.common import cli, tables
from gradcomp.codecs import QSGD

CODECS = {
  "1 bit": QSGD(bits=1, levels="uniform"),
  "2 bits": QSGD(bits=2),
  "3 bits": QSGD(bits=3),
  "4 bits": QSGD(bits=4),
  "8 bits": QSGD(bits=8),
}
WORKERS = (2, 3, 4, 8, 16)
COSINES = {"are independent": 0.0, "nearly agree": 0.9}
METHODS = ("gradcomp", "Suresh")
BUCKET = 512
DRAWN = ("1 bit", "2 bits", "4 bits")
_BLUE = "#2f6db3"

# By gradients, method and codec: a ratio for each number of workers.
Ratios = dict[str, dict[str, dict[str, list[float]]]]


def gradients(cosine: float, workers: int, size: int, seed: int) -> np.ndarray:
  """Draws ``float32[workers, size]``; any two rows have the same expected cosine."""
  rng = np.random.default_rng([seed, workers])
  own = rng.standard_normal((workers, size), np.float32)
  common = rng.standard_normal(size, np.float32)
  return np.float32(cosine**0.5) * common + np.float32((1 - cosine) ** 0.5) * own


def ratios(
  codecs: dict[str, QSGD], counts: tuple[int, ...], size: int, seed: int
) -> Ratios:
  """Measures all cells of the table."""
  found: Ratios = {
    name: {method: {codec: [] for codec in codecs} for method in METHODS}
    for name in COSINES
  }
  for label, codec in codecs.items():
    for workers in counts:
      mean = library(codec)
      for name, cosine in COSINES.items():
        x = gradients(cosine, workers, size, seed)
        exact = x.mean(axis=0, dtype=np.float64)
        position, step = places(codec, x)
        alone = independent(position, step)
        errors = {
          "gradcomp": np.asarray(mean(x)[0]) - exact,
          "Suresh": correlated(position, step, seed),
        }
        for method, error in errors.items():
          ratio = float(np.mean(np.square(error)) / alone)
          found[name][method][label].append(ratio)
  return found


@functools.cache
def library(codec: QSGD) -> Any:
  """Returns the mean of all workers as a function of ``float32[workers, size]``."""
  tx = gradcomp.compress(
    codec, axis_name="data", exchange="all_gather", feedback=None, min_leaf_size=0
  )
  mean = lambda x: tx.update(x, tx.init(x))[0]
  return jax.jit(jax.vmap(mean, axis_name="data"))


def places(codec: QSGD, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns each element's place, counted in steps between levels, and its step."""
  buckets = x.astype(np.float64).reshape(len(x), -1, BUCKET)
  scale = np.abs(buckets).max(axis=2, keepdims=True)
  if codec.levels == "uniform":
    step = 2 * scale / (2**codec.bits - 1)
    place = (buckets + scale) / step
  else:
    step = scale / (2 ** (codec.bits - 1) - 1)
    place = buckets / step
  return place.reshape(x.shape), np.broadcast_to(step, buckets.shape).reshape(x.shape)


def independent(place: np.ndarray, step: np.ndarray) -> float:
  """Returns the expected squared error of the mean where each worker draws its own."""
  fraction = place - np.floor(place)
  return float(np.mean(step**2 * fraction * (1 - fraction)) / len(place))


def correlated(place: np.ndarray, step: np.ndarray, seed: int) -> np.ndarray:
  """Returns the error of the mean with the paper's draws."""
  rng = np.random.default_rng(seed)
  order = rng.permuted(np.indices(place.shape, np.float32)[0], axis=0)
  draw = (order + rng.random(place.shape)) / len(place)
  return ((np.floor(place + draw) - place) * step).mean(axis=0)


def show(found: Ratios, counts: tuple[int, ...]) -> None:
  """Prints a line for each codec and method."""
  for name, methods in found.items():
    print(f"\nGradients that {name}:")
    numbers = [f"N = {count}" for count in counts]
    tables.show(
      {
        f"{method}, {codec}": dict(zip(numbers, row, strict=True))
        for method, codecs in methods.items()
        for codec, row in codecs.items()
      }
    )


def plot(found: Ratios, counts: tuple[int, ...], path: pathlib.Path) -> None:
  """Draws a row of panels for each kind of gradients, and a column for each codec.

  With 3 bits and more all codecs look the same.
  """
  drawn = [codec for codec in found["are independent"]["gradcomp"] if codec in DRAWN]
  figure = Figure(figsize=(8.6, 5.2), layout="constrained")
  shape = len(found), len(drawn)
  axes = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False)
  numbers = np.arange(len(counts))
  for row, (kind, methods) in zip(axes, found.items(), strict=True):
    row[0].set_ylabel(f"gradients that\n{kind}")
    for axis, codec in zip(row, drawn, strict=True):
      ours, theirs = (methods[method][codec] for method in METHODS)
      bars = axis.bar(numbers, ours, 0.66, color=_BLUE, label="gradcomp")
      for number, ratio in zip(numbers, ours, strict=True):
        axis.annotate(f"{ratio:.2f}", (number, 0.02), color="w", ha="center", size=8.5)
      (points,) = axis.plot(
        numbers, theirs, "D", color="0.15", mec="w", ms=6, label="Suresh et al. 2022"
      )
      line = axis.axhline(1, color="0.3", lw=1, ls="--", label="independent draws")
      axis.set_ylim(0, 1.1)
      axis.set_yticks((0, 0.5, 1))
      axis.set_xticks(numbers, [str(count) for count in counts])
      axis.tick_params(length=0)
      for side in ("top", "right"):
        axis.spines[side].set_visible(False)
  for axis, codec in zip(axes[0], drawn, strict=True):
    axis.set_title(codec, fontsize=11)
  for axis in axes[-1]:
    axis.set_xlabel("workers")
  entries = [bars, points, line]
  figure.legend(handles=entries, loc="outside lower center", ncols=3, frameon=False)
  figure.suptitle("Squared error of the workers' mean, over that of independent draws")
  figure.savefig(path, dpi=100, metadata={"Software": None})


def main() -> None:
  options = cli.options(
    __doc__,
    "one codec, two and three workers, few elements",
    "folder of the two files",
    size=cli.Option(2**18, 2**14, f"elements of a gradient, a multiple of {BUCKET}"),
    seed=cli.Option(0),
  )
  codecs, counts = CODECS, WORKERS
  if options.quick:
    codecs, counts = {"4 bits": CODECS["4 bits"]}, (2, 3)
  found = ratios(codecs, counts, options.size, options.seed)
  show(found, counts)
  if options.output:
    about = {"size": options.size, "seed": options.seed, "workers": counts}
    cli.write_json(options.output / "noise.json", {**about, "ratios": found})
    plot(found, counts, options.output / "noise.png")


if __name__ == "__main__":
  main()
