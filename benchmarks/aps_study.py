"""Trains with low-precision floats, with Auto Precision Scaling (APS) and without.

  python benchmarks/aps_study.py [--seeds 5] [--tables paper ...] [--quick]
    [--output FOLDER]

Trains the example's LeNet on the embedded digits, with 8 workers, momentum 0.9 and 200
steps, as study.py does. As in Han et al., 2021, the workers are a ring, all leaves are
in the format, and there is no feedback unless the table says so. A cast converts to the
format without any scale. Partial sums are rounded, too.

  paper  Tables 4 and 6: (5, 2), (4, 3) and (3, 0), each with APS and without. With APS
         and 8 bits, the accuracy may be 0.3 points below that of f32.
  small  The loss makes gradients 2^-12 of their size, and the mean is multiplied by
         2^12 behind the exchange. Powers of two are exact, so f32 trains as before.
         Loss scaling by 2^12 is the constant that undoes the factor.
  lars   Table 5: optax.lars behind the exchange. The rate is the best of four for f32.
  fails  The same as small with several factors and one seed. It shows at which factor
         each format stops training.
  cures  What the paper recommends, and what the library adds, for the format that needs
         it: (3, 0) with the last layer in f32, with hybrid precision (f32 in the first
         third), with error feedback and with Kahan sums.

With --output, writes aps_study.json and aps_study.md there.
"""

import argparse
import copy
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
import running
import study

import gradcomp
from gradcomp.codecs import FloatCast

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import data  # noqa: E402
import networks  # noqa: E402
from training import AXIS, Point, Run, Task, compile_step, init_state  # noqa: E402

WORKERS, BATCH, STEPS = 8, 64, 200
LEARNING_RATE, LARS_RATE = 0.05, 2.0
Transform = optax.GradientTransformation


class Way(NamedTuple):
  """An exchange of gradients, and the training around it."""

  exchange: Transform
  allowed: float | None = None  # points below f32
  scale: float = 1.0  # of the loss
  full_first: float = 0.0  # the part of the steps with f32, before the others
  lars: bool = False


class Table(NamedTuple):
  title: str
  full: Way
  ways: dict[str, Way]
  seeds: int | None = None


PAPER = {"axis_name": AXIS, "exchange": "ring", "feedback": None, "min_leaf_size": 0}


def aps(e: int, m: int, **options: Any) -> Transform:
  """Makes APS as in the paper, changed by the options."""
  return gradcomp.aps(e, m, **PAPER | options)


def cast(e: int, m: int, factor: float = 1.0) -> Transform:
  """Makes a cast with one factor for all leaves; a factor of 1 changes nothing."""
  return gradcomp.loss_scaling_cast(factor, e, m, **PAPER)


def head_full(e: int, m: int) -> Transform:
  """Makes APS with the last layer in f32."""

  def labels(params: Any) -> Any:
    name = lambda path, _: "full" if path[0].key == "head" else "low"
    return jax.tree_util.tree_map_with_path(name, params)

  return optax.partition({"low": aps(e, m), "full": FULL}, labels)


FULL = gradcomp.dense(axis_name=AXIS)
FORMATS = ((5, 2), (4, 3), (3, 0))
FACTORS = {(5, 2): (-8, -12, -16), (4, 3): (-4, -8), (3, 0): (4,)}
TABLES = {
  "paper": Table(
    "8 workers, momentum, 200 steps",
    Way(FULL),
    {
      name: way
      for bits in FORMATS
      for name, way in {
        f"{bits}, APS": Way(aps(*bits), 0.3 if sum(bits) == 7 else None),
        f"{bits}, cast": Way(cast(*bits)),
      }.items()
    },
  ),
  "small": Table(
    "Gradients of 2^-12 of their size, 8 workers, momentum, 200 steps",
    Way(FULL),
    {
      "(4, 3), cast": Way(cast(4, 3), scale=2.0**-12),
      "(4, 3), loss scaling by 2^12": Way(cast(4, 3, 2.0**12), scale=2.0**-12),
    },
  ),
  "lars": Table(
    f"LARS with a rate of {LARS_RATE:g}, 8 workers, 200 steps",
    Way(FULL, lars=True),
    {f"{bits}, APS": Way(aps(*bits), 0.3, lars=True) for bits in FORMATS[:2]},
    seeds=5,
  ),
  "fails": Table(
    "Gradients of another size, 8 workers, momentum, 200 steps",
    Way(FULL),
    {
      "f32, times 2^-12": Way(FULL, scale=2.0**-12),
      "(4, 3), APS, times 2^-12": Way(aps(4, 3), scale=2.0**-12),
      **{
        f"{bits}, cast, times 2^{k}": Way(cast(*bits), scale=2.0**k)
        for bits, exponents in FACTORS.items()
        for k in exponents
      },
    },
    seeds=1,
  ),
  "cures": Table(
    "4 bits, 8 workers, momentum, 200 steps",
    Way(FULL),
    {
      "(3, 0), APS, last layer f32": Way(head_full(3, 0)),
      "(3, 0), APS, first third f32": Way(aps(3, 0), full_first=1 / 3),
      "(3, 0), APS, error feedback": Way(aps(3, 0, feedback="error")),
      "(3, 0), APS, Kahan": Way(aps(3, 0, accumulate="kahan")),
    },
    seeds=3,
  ),
}
QUICK = {"cures": "(3, 0), APS, first third f32"}  # what a quick run takes


class Bench:
  """Trains in each way from the same initialisations with the same batches."""

  def __init__(self, images: data.ImageSet, workers: int, steps: int):
    self.train, self.steps = images.train, steps
    shape = images.train.images.shape[1:]
    model = networks.for_images("lenet", shape, images.classes)
    self.task = Task(model, images.test, jax.make_mesh((workers,), (AXIS,)))

  @functools.cache  # noqa: B019
  def runs(self, name: str, way: Way, seeds: int) -> list[Run]:
    """Trains once for each seed, with steps of both precisions compiled once."""
    batches = functools.partial(data.batches, self.train, BATCH)
    full_steps = round(way.full_first * self.steps)
    phases = []
    for exchange, count in ((FULL, full_steps), (way.exchange, self.steps)):
      if count:
        compiled = self.compile(exchange, way, next(batches(seed=0)))
        phases.append((exchange, *compiled))
    ends = [full_steps, self.steps][-len(phases) :]
    found = []
    for seed in range(seeds):
      params, inner = self.task.init_params(seed), None
      draw, done, sent = batches(seed=seed), 0, 0
      start = time.perf_counter()
      for (exchange, step, wire), end in zip(phases, ends, strict=True):
        fresh = init_state(self.task, self.optimizer(exchange, way), params)
        # The exchange is another; momenta and the place in the schedule stay.
        state = (fresh[0], fresh[1] if inner is None else inner)
        for _ in range(done, end):
          batch = self.task.place(next(draw))
          # Emulated devices lock each other out if several steps are under way.
          params, state, _ = jax.block_until_ready(step(params, state, batch))
        sent, done, inner = sent + (end - done) * wire.bytes_sent, end, state[1]
      loss, accuracy = self.task.evaluate(params)
      ms = 1000 * (time.perf_counter() - start) / self.steps
      point = Point(self.steps, sent, float("nan"), loss, accuracy)
      bytes_a_step = round(sent / self.steps)
      found.append(Run(name, seed, bytes_a_step, wire.dense_bytes, ms, [point]))
    return found

  def compile(
    self, exchange: Transform, way: Way, batch: data.Split
  ) -> tuple[Any, Any]:
    """Compiles a step, and returns it with its wire report."""
    task = copy.copy(self.task)
    task.loss_fn = lambda params, batch: way.scale * self.task.loss_fn(params, batch)
    return compile_step(task, self.optimizer(exchange, way), batch)

  def optimizer(self, exchange: Transform, way: Way) -> Transform:
    """Chains the exchange, the factor that undoes the loss scale, and the optimizer."""
    rate = optax.cosine_decay_schedule(
      LARS_RATE if way.lars else LEARNING_RATE, self.steps
    )
    inner = optax.lars(rate) if way.lars else optax.sgd(rate, momentum=0.9)
    return optax.chain(exchange, optax.chain(optax.scale(1 / way.scale), inner))


def run_table(
  bench: Bench, table: Table, seeds: int, result: dict[str, Any]
) -> Iterator[None]:
  """Trains in all ways of a table, f32 first, and yields after each."""
  full = bench.runs("f32", table.full, seeds)
  rows = [study.row(full, full, None)]
  sizes = study.sizes(bench.task, FloatCast(), 0)
  result |= {"title": table.title, "seeds": seeds, **sizes, "rows": rows}
  for name, way in table.ways.items():
    rows.append(study.row(bench.runs(name, way, seeds), full, way.allowed))
    print(
      " | ".join(study.cells(rows[-1])), f"{rows[-1]['step_ms']:.0f} ms", flush=True
    )
    yield


def quick(name: str) -> Table:
  """Returns a table with one way, and a title that nobody takes for a result."""
  table = TABLES[name]
  way = QUICK.get(name, next(iter(table.ways)))
  title = f"A quick run, no result: {table.title}"
  return table._replace(title=title, ways={way: table.ways[way]}, seeds=1)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--tables", nargs="+", choices=TABLES)
  parser.add_argument("--seeds", type=int, default=5)
  running.add_quick(parser, "three steps of two workers in one way a table")
  parser.add_argument("--data-dir", type=Path, default=data.FOLDER, help=data.HELP)
  parser.add_argument("--output", type=Path, help="folder of the two files")
  options = parser.parse_args()
  tables = [TABLES[name] for name in options.tables or TABLES]
  workers, steps = WORKERS, STEPS
  if options.quick:
    tables = [quick(name) for name in options.tables or QUICK]
    workers, steps = 2, 3
  jax.config.update("jax_num_cpu_devices", workers)
  bench = Bench(data.load("digits", options.data_dir), workers, steps)
  results: list[dict[str, Any]] = []
  for table in tables:
    print(table.title, flush=True)
    results.append({})
    for _ in run_table(bench, table, table.seeds or options.seeds, results[-1]):
      if options.output:
        page = study.markdown(results)
        running.write(options.output, "aps_study", results, page)
  print(study.markdown(results))


if __name__ == "__main__":
  main()
