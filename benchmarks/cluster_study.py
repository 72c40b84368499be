"""Runs the papers' studies on real data, and says which of their findings hold.

  python benchmarks/cluster_study.py run --networks lenet gru --codecs f32 qsgd-4
    --emulate 8 --epochs 2 --seeds 5 --output DIR

With ``--emulate`` one device emulates the workers: there are accuracies and bytes, and
no times. Each run is a line of JSON in a file of the folder. What is there already is
not run again, so a study can be stopped, go on, and be cut into parts: launches at the
same time take ``--part 0/2`` and ``--part 1/2``.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster_codecs
import cluster_emulated
import cluster_networks
import jax
from cluster_networks import Source
from cluster_records import Records
from cluster_settings import Setting

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import data  # noqa: E402
from progress import Progress  # noqa: E402
from training import AXIS, Task  # noqa: E402


def settings(args: argparse.Namespace) -> Iterator[tuple[Source, Setting]]:
  """Yields the runs, all codecs of one seed before the next seed."""
  for network in args.networks:
    found = cluster_networks.source(
      network, args.dataset, args.data_dir, args.idx, args.pixels, args.text
    )
    defaults = cluster_networks.defaults(network)
    momentum = defaults.momentum if args.momentum is None else args.momentum
    for workers in args.emulate:
      batch = args.batch_size * (workers if args.batch == "per-worker" else 1)
      steps = args.steps or max(1, round(args.epochs * (found.epoch // batch)))
      for seed in range(args.first_seed, args.first_seed + args.seeds):
        for codec in args.codecs:
          for exchange in args.exchanges:
            yield (
              found,
              Setting(
                way="emulated",
                network=network,
                dataset=found.name,
                codec=codec,
                exchange=exchange,
                workers=workers,
                rule=args.batch,
                batch=batch,
                steps=steps,
                epoch=found.epoch,
                points=args.points,
                seed=seed,
                optimizer=args.optimizer,
                learning_rate=args.learning_rate or defaults.learning_rate,
                momentum=None if args.optimizer == "adam" else momentum or None,
                max_norm=defaults.max_norm,
              ),
            )


def run(args: argparse.Namespace) -> None:
  """Runs what is not there yet."""
  records = Records(args.output)
  part, parts = args.part
  everything = [x for i, x in enumerate(settings(args)) if i % parts == part]
  left = [x for x in everything if not records.has(x[1]._asdict())]
  print(f"{len(left)} of {len(everything)} runs are left", flush=True)
  mesh = jax.make_mesh((1,), (AXIS,), devices=jax.devices()[:1])
  tasks: dict[str, Task] = {}
  trainers: dict[Setting, Any] = {}
  clock = Clock([setting for _, setting in left])
  for found, setting in left:
    if records.has(setting._asdict()):
      clock.drop(setting)
      continue
    task = tasks.setdefault(setting.network, Task(found.model, found.test, mesh))
    alike = setting._replace(seed=0)
    if alike not in trainers:
      trainers[alike] = cluster_emulated.Trainer(task, found, alike)
    start = time.perf_counter()
    title = f"{setting.network} {setting.codec} N={setting.workers} seed {setting.seed}"
    shown = sys.stderr.isatty()
    with Progress(title, setting.steps, shown=shown) as progress:
      points = trainers[alike].train(setting.seed, progress.step)
    seconds = time.perf_counter() - start
    sizes = trainers[alike].bytes() | sized(task, found)
    records.append(setting.record(points=points, seconds=seconds, **sizes))
    print(
      f"{title}: accuracy {points[-1]['accuracy']:.2f} %, {seconds:.0f} s, "
      f"{clock.after(setting, seconds)}",
      flush=True,
    )


def sized(task: Task, found: Source) -> dict[str, float]:
  """Returns the size of a network, and what a sample costs."""
  params = jax.eval_shape(lambda: task.init_params(0))
  elements = sum(leaf.size for leaf in jax.tree.leaves(params))
  sample = tuple(x[:1] for x in found.test)
  return {
    "parameters": elements,
    "megabytes": 4 * elements / 1e6,
    "gigaflops": cluster_networks.gigaflops(task.loss_fn, params, sample),
  }


class Clock:
  """Estimates the time that is left from the runs of the same network."""

  def __init__(self, left: list[Setting]):
    self._left = list(left)
    self._done: list[tuple[Setting, float]] = []

  def drop(self, setting: Setting) -> None:
    self._left.remove(setting)

  def after(self, setting: Setting, seconds: float) -> str:
    """Says what is left behind a run that took so many seconds."""
    self.drop(setting)
    self._done.append((setting, seconds))
    total = sum(map(self._expected, self._left))
    return f"{len(self._left)} left, about {total / 60:.0f} min"

  def _expected(self, setting: Setting) -> float:
    """Returns the seconds of a run: the mean of those that are like it most."""
    for alike in (
      lambda x: x._replace(seed=setting.seed) == setting,
      lambda x: (x.network, x.workers) == (setting.network, setting.workers),
      lambda x: True,
    ):
      found = [
        seconds / x.steps * setting.steps for x, seconds in self._done if alike(x)
      ]
      if found:
        return sum(found) / len(found)
    return 0.0


def make_parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  commands = parser.add_subparsers(dest="command", required=True)
  command = commands.add_parser("run", help="run what is not there yet")
  add = command.add_argument
  add("--networks", nargs="+", choices=cluster_networks.NETWORKS, required=True)
  add("--codecs", nargs="+", type=cluster_codecs.check, required=True)
  add("--exchanges", nargs="+", default=["auto"])
  add("--emulate", nargs="+", type=int, metavar="N", help="numbers of workers")
  add("--dataset", default="digits")
  add("--data-dir", type=Path, default=data.FOLDER, help=data.HELP)
  add("--idx", type=Path, metavar="FOLDER", help="images in IDX files; see make data")
  add("--text", choices=("python", "brown"), default="python")
  add("--pixels", type=int, help="reduce images to this width and height")
  add("--epochs", type=float, default=1.0)
  add("--steps", type=int, help="in place of epochs")
  add("--points", type=int, default=10, help="of a curve; default: 10")
  add("--batch", choices=("fixed", "per-worker"), default="fixed")
  add("--batch-size", type=int, default=128, help="of all workers, or of each")
  add("--seeds", type=int, default=1)
  add("--first-seed", type=int, default=0)
  add("--optimizer", choices=("sgd", "adam"), default="sgd")
  add("--learning-rate", type=float, help="of all networks; default: each its own")
  add("--momentum", type=float, help="0 for none; default: each its own")
  add("--part", type=part, default=(0, 1), metavar="I/N", help="every N-th run, from I")
  add("--output", type=Path, required=True, help="folder of the records")
  return parser


def part(text: str) -> tuple[int, int]:
  """Parses which part of the runs to take.

  Example:
    >>> part("1/2")
    (1, 2)
  """
  index, _, count = text.partition("/")
  return int(index), int(count)


def main(argv: list[str] | None = None) -> None:
  run(make_parser().parse_args(argv))


if __name__ == "__main__":
  main()
