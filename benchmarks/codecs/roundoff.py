"""Measures round-off errors of low-precision sums in groups, as in Han's table 9.

  python -m benchmarks.codecs.roundoff [--seeds 3] [--quick] [--output FOLDER]

Adds the gradients of 256 emulated workers, scaled as APS scales them. The sums are in
the format, first in each group and then over the groups. A group of all 256 is a ring.
There are three measures, over elements whose exact sum (in float64) is not zero:

  mean    The mean of |(exact - sum) / exact|, the paper's equation 5. Elements whose
          exact sum is close to zero dominate it, because their addends cancel.
  median  The median of the same, which a typical element has.
  length  |exact - sum| / |exact| of the vectors, which an optimizer feels.

Some data are gradients of the example's LeNet on digits after 20 steps, with four
images a worker: all of the first convolution's weight, as in the paper, and a sample of
all leaves. The others are heavy-tailed numbers (Student's t, 3 degrees of freedom) that
all workers share, plus each worker's own noise, as large or four times as large.

Han et al., Auto-Precision Scaling for Distributed Deep Learning, 2021, section 4.2.
With --output, writes roundoff.json there.
"""

import functools
import itertools
import pathlib
import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.common import cli, tables
from examples.lib.data import images as data
from examples.lib.networks import LeNet
from examples.lib.training import AXIS, Task
from gradcomp import floats

FORMATS = ((5, 2), (4, 3))
METHODS = ("sequential", "kahan")
IMAGES = 4  # a worker
SAMPLE = 16  # one of so many elements of a large leaf is measured
MEASURES = ("mean", "median", "length")
# In percent, with (5, 2), of ResNet-50's first convolution on ImageNet.
PAPER = {4: 55.0, 8: 44.21, 16: 41.83, 32: 49.62, 64: 58.21, 256: 85.22}


class Size(NamedTuple):
  """The size of a measurement."""

  workers: int = 256
  groups: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)  # the last is a ring of all
  steps: int = 20  # trained before
  elements: int = 16384  # of synthetic leaves


QUICK = Size(workers=8, groups=(4, 8), steps=2, elements=512)


class Leaf(NamedTuple):
  """The elements of a leaf, or a sample of them."""

  x: np.ndarray  # float32[workers, elements]
  largest: float  # magnitude of all the leaf's elements on all workers


Tables = dict[str, list[Leaf]]


def lenet(seed: int, size: Size, data_dir: str | pathlib.Path) -> Tables:
  """Trains LeNet for some steps with momentum, and returns gradients."""
  images = data.load("digits", data_dir)
  model = functools.partial(LeNet, images.train.images.shape[1:], images.classes)
  task = Task(model, images.test, jax.make_mesh((1,), (AXIS,)))
  params, optimizer = task.init_params(seed), optax.sgd(0.05, momentum=0.9)

  @jax.jit
  def step(params: Any, state: Any, batch: data.Split) -> tuple[Any, Any]:
    updates, state = optimizer.update(jax.grad(task.loss_fn)(params, batch), state)
    return optax.apply_updates(params, updates), state

  state = optimizer.init(params)
  batches = data.batches(images.train, 64, seed=seed)
  for _ in range(size.steps):
    params, state = step(params, state, next(batches))
  # In any order, and all of those leaves that are small.
  rng = np.random.default_rng(seed)
  count = lambda x: -(-x.size // SAMPLE) if x.size > 1000 else x.size
  sampled = jax.tree.map(lambda x: rng.permutation(x.size)[: count(x)], params)

  @jax.jit
  def sample(batch: data.Split) -> Any:
    grads = jax.grad(task.loss_fn)(params, batch)
    some = jax.tree.map(lambda x, at: x.reshape(-1)[at], grads, sampled)
    return some, jax.tree.map(lambda x: jnp.abs(x).max(), grads)

  # As in training: the workers' batches are the parts of a large one.
  large = next(data.batches(images.train, size.workers * IMAGES, seed=seed + 1))
  parts = zip(*(np.split(array, size.workers) for array in large), strict=True)
  found = [jax.device_get(sample(data.Split(*part))) for part in parts]
  x, largest = jax.tree.map(lambda *values: np.stack(values), *found)
  every = [
    Leaf(x[:, : -(-count // SAMPLE)], float(a.max()))
    for x, a, count in zip(
      *map(jax.tree.leaves, (x, largest, jax.tree.map(np.size, params))), strict=True
    )
  ]
  first = x["conv1"]["kernel"][...], largest["conv1"]["kernel"][...].max()
  return {"first convolution": [Leaf(*first)], "all of LeNet": every}


def synthetic(seed: int, size: Size, noise: float) -> Leaf:
  """Draws numbers that all workers share, and adds each worker's own noise."""
  rng = np.random.default_rng(seed)
  shared = rng.standard_t(3, size.elements)
  x = shared + noise * rng.standard_t(3, (size.workers, size.elements))
  return Leaf(x.astype(np.float32), float(np.abs(x).max()))


def errors(tables: Tables, fmt: floats.FloatFormat, size: Size) -> dict[str, Any]:
  """Measures each table with all methods and groups."""
  leaves = [leaf for table in tables.values() for leaf in table]
  x = np.concatenate([scaled(leaf, fmt) for leaf in leaves], axis=1)
  exact = x.sum(axis=0, dtype=np.float64)
  widths = [sum(leaf.x.shape[1] for leaf in table) for table in tables.values()]
  ends = np.cumsum(widths)
  parts = dict(zip(tables, map(slice, ends - widths, ends), strict=True))

  def measured(sums: np.ndarray) -> dict[str, dict[str, float]]:
    return {name: measure(exact[part], sums[part]) for name, part in parts.items()}

  cast = np.asarray(floats.round_to(x, fmt), np.float64)
  found: dict[str, Any] = {"cast alone": measured(cast.sum(axis=0))}
  found["zeros"] = {
    name: 100 * float(np.mean(cast[:, part][x[:, part] != 0] == 0))
    for name, part in parts.items()
  }
  on_device = jnp.asarray(x)
  for method in METHODS:
    for count in size.groups:
      all_of_them = count == size.workers
      name, group = ("ring", None) if all_of_them else ("hierarchical", count)
      sums = floats.all_reduce(on_device, fmt, name, group_size=group, method=method)
      found[f"{method} {count}"] = measured(np.asarray(sums))
  return {name: {key: row[name] for key, row in found.items()} for name in parts}


def scaled(leaf: Leaf, fmt: floats.FloatFormat) -> np.ndarray:
  """Scales a leaf by a power of two, as in algorithm 1."""
  mantissa, exponent = np.frexp(len(leaf.x) * leaf.largest)
  exponent -= mantissa == 0.5
  return np.ldexp(leaf.x, 2 ** (fmt.exponent_bits - 1) - 1 - exponent)


def measure(exact: np.ndarray, sums: np.ndarray) -> dict[str, float]:
  """Returns the three measures in percent."""
  used = exact != 0
  exact, sums = exact[used], sums[used]
  length = np.linalg.norm(exact - sums) / np.linalg.norm(exact)
  return {
    "mean": 100 * float(floats.round_off_error(exact, sums)),
    "median": 100 * float(np.median(np.abs((exact - sums) / exact))),
    "length": 100 * float(length),
  }


def mean_of_seeds(found: list[Any]) -> Any:
  """Averages tables of the same keys, number by number."""
  if not isinstance(found[0], dict):
    return statistics.fmean(found)
  return {key: mean_of_seeds([row[key] for row in found]) for key in found[0]}


def show(results: dict[str, Any], groups: tuple[int, ...]) -> None:
  """Prints errors in percent, by measures and groups."""
  for fmt, of_format in results["formats"].items():
    for name, found in of_format.items():
      print(f"\n{name}, {fmt}: {found['zeros']:.1f} % of the addends become zero")
      of_paper = {size: PAPER.get(size, np.nan) for size in groups}
      rows = {"paper, mean": of_paper} if fmt == "(5, 2)" else {}
      for method, measure in itertools.product(METHODS, MEASURES):
        row = {size: found[f"{method} {size}"][measure] for size in groups}
        rows[f"{method}, {measure}"] = row | {"cast": found["cast alone"][measure]}
      tables.show(rows)


def main() -> None:
  options = cli.options(
    __doc__,
    "eight workers, one seed",
    "folder of the file",
    seeds=cli.Option(3, 1),
    data_dir=cli.Option(data.FOLDER, help="of the images"),
  )
  size = QUICK if options.quick else Size()
  found: dict[str, list[Any]] = {str(bits): [] for bits in FORMATS}
  for seed in range(options.seeds):
    tables = lenet(seed, size, options.data_dir) | {
      "shared + noise": [synthetic(seed, size, 1.0)],
      "shared + 4 x noise": [synthetic(seed, size, 4.0)],
    }
    for bits in FORMATS:
      found[str(bits)].append(errors(tables, floats.FloatFormat(*bits), size))
  results = {
    "seeds": options.seeds,
    "paper": PAPER,
    "formats": {bits: mean_of_seeds(rows) for bits, rows in found.items()},
  }
  show(results, size.groups)
  cli.write_json(options.output and options.output / "roundoff.json", results)


if __name__ == "__main__":
  main()
