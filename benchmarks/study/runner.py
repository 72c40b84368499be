"""Runs the settings of a study that are not there yet, and says how long it will take.

One process is a launch of its own. Where there are several, all run this with the same
settings, and the first appends the results.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils

import gradcomp
from benchmarks.common import quiet, trainer
from benchmarks.links import launch
from benchmarks.study import devices as study_devices
from benchmarks.study import emulated, options
from benchmarks.study import tasks as study_tasks
from benchmarks.study.records import Records
from benchmarks.study.settings import Setting, step_seconds
from benchmarks.study.tasks import Source
from examples.lib.tables import Progress
from examples.lib.training import AXIS, Task, takes_dropout
from gradcomp._src.version import WIRE


class Job(NamedTuple):
  """A setting, and what it learns from."""

  source: Source
  setting: Setting


def jobs(args: options.Run) -> Iterator[Job]:
  """Yields all runs: times first, then all codecs of one seed before the next seed."""
  for network in args.networks:
    drops = takes_dropout(study_tasks.MODELS[network.partition("-")[0]])
    dropout = args.dropout if drops else None
    given = args.dataset, args.data_dir, args.pixels, args.text
    source = study_tasks.source(network, *given, dropout)
    settings = []
    for workers in args.emulate or args.workers or [jax.device_count()]:
      setting = _trained(args, network, source, workers)._replace(dropout=dropout)
      if not args.emulate:
        # No seed changes what is timed.
        own = {"way": "timed", "points": 0, "seed": 0, "link": args.link}
        own |= {"steps": args.steps_only or args.timed_steps}
        settings.append(setting._replace(**own, hosts=jax.process_count()))
      if not args.steps_only:
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        settings += [setting._replace(seed=seed) for seed in seeds]
    for setting, *names in itertools.product(settings, args.codecs, args.exchanges):
      codec, exchange = names
      yield Job(source, setting._replace(codec=codec, exchange=exchange))


def _trained(args: options.Run, network: str, source: Source, workers: int) -> Setting:
  """Returns the setting of a training, of float32 and the first seed."""
  defaults = study_tasks.defaults(network, args.optimizer)
  momentum = defaults.momentum if args.momentum is None else args.momentum
  batch = args.batch_size * (workers if args.batch == "per-worker" else 1)
  steps = args.steps or max(1, round(args.epochs * (source.epoch // batch)))
  same = ("points", "optimizer", "schedule", "nesterov", "weight_decay")
  return Setting(
    way="emulated" if args.emulate else "trained",
    network=network,
    dataset=source.name,
    codec="f32",
    exchange="auto",
    workers=workers,
    rule=args.batch,
    batch=batch,
    steps=steps,
    epoch=source.epoch,
    seed=args.first_seed,
    learning_rate=args.learning_rate or defaults.learning_rate,
    momentum=None if args.optimizer == "adam" else momentum or None,
    max_norm=defaults.max_norm,
    **{name: getattr(args, name) for name in same},
  )


def run(args: options.Run) -> None:
  most = max(args.workers, default=0)
  if not args.emulate and most > jax.device_count():
    sys.exit(
      f"--workers must be at most the devices of all processes, {jax.device_count()}; "
      f"got {most}. One process has as many as --devices says."
    )
  records = Records(args.output)
  if jax.process_count() > 1:
    if jax.process_index() == 0:  # data is prepared by one process alone
      list(jobs(args))
    multihost_utils.sync_global_devices("data is prepared")
  part, parts = args.share
  everything = [job for i, job in enumerate(jobs(args)) if i % parts == part]
  left = [job for job in everything if not _known(records, job.setting)]
  first = jax.process_index() == 0
  if first:
    print(f"{len(left)} of {len(everything)} runs are left", flush=True)
  clock = Clock([job.setting for job in left])
  tasks: dict[Any, tuple[Task, dict[str, float]]] = {}
  trainers: dict[Setting, trainer.Trainer] = {}
  for source, setting in left:
    if _known(records, setting):
      clock.left.remove(setting)
      continue
    devices = 1 if args.emulate else setting.workers
    key = setting.network, devices
    if key not in tasks:
      known = source.arrays[0][: study_tasks.KNOWN]
      mesh = jax.make_mesh((devices,), (AXIS,), devices=jax.devices()[:devices])
      task = Task(source.model, source.test, mesh, known=known)
      tasks[key] = task, sized(task, source)
    task, _ = tasks[key]
    title = " ".join(
      [setting.way, setting.network, setting.codec, f"N={setting.workers}"]
      + ([] if setting.way == "timed" else [f"seed {setting.seed}"])
    )
    shown = first and sys.stderr.isatty() and setting.way != "timed"
    # Who starts several processes keeps their machine quiet: see study/hosts.py.
    unless = setting.way != "timed" or jax.process_count() > 1
    with quiet.machine(unless=unless):
      start = time.perf_counter()
      try:
        with Progress(title, setting.steps, shown=shown) as progress:
          results, said = _one(task, source, setting, trainers, args, progress.step)
      except ValueError as error:  # such as an exchange that a codec does not go with
        results, said = {"failed": str(error)}, f"failed: {error}"
      seconds = time.perf_counter() - start
    if first:
      machine = launch.machine() if setting.way == "timed" else {}
      known = {
        "seconds": seconds,
        "gradcomp": gradcomp.__version__,
        "wire": WIRE,
        "jax": jax.__version__,
        "price": args.price,
        **sized(task, source),
        **machine,
      }
      records.append(setting, results | known)
      print(f"{title}: {said}, {seconds:.0f} s, {clock.after(setting, seconds)}")
      sys.stdout.flush()


def _known(records: Records, setting: Setting) -> bool:
  """Returns whether a run is there, the same in all processes."""
  known = records.has(setting)
  if jax.process_count() > 1:
    known = bool(multihost_utils.broadcast_one_to_all(known))
  return known


def _one(
  task: Task,
  source: Source,
  setting: Setting,
  trainers: dict[Setting, trainer.Trainer],
  args: options.Run,
  stepped: Callable[[], None],
) -> tuple[dict[str, Any], str]:
  """Does one run, and returns its results and a line about them."""
  if setting.way == "timed":
    found = study_devices.timed(task, source, setting, args.interface)
    found["probe"] = args.probe
    return found, f"{1e3 * found['step']:.1f} ms a step"
  alike = setting._replace(seed=0)
  if alike not in trainers:
    module = emulated if setting.way == "emulated" else study_devices
    trainers[alike] = module.trainer(task, source, alike)
  found = trainers[alike].train(setting.seed, stepped)
  said = f"accuracy {found['points'][-1]['accuracy']:.2f} %"
  return found | trainers[alike].bytes(), said


def sized(task: Task, source: Source) -> dict[str, float]:
  """Returns the size of a network, and what a sample costs."""
  params = jax.eval_shape(lambda: task.init_params(0))
  elements = sum(leaf.size for leaf in jax.tree.leaves(params))
  return {
    "parameters": elements,
    "megabytes": 4 * elements / 1e6,
    "gigaflops": study_tasks.gigaflops(task, source.test),
  }


class Clock:
  """Estimates the time that is left from the runs that are most alike."""

  def __init__(self, left: list[Setting]):
    self.left = list(left)
    self._done: list[tuple[Setting, float]] = []  # and seconds a step

  def after(self, setting: Setting, seconds: float) -> str:
    """Says what is left behind a run that took so many seconds."""
    self.left.remove(setting)
    self._done.append((setting, seconds / setting.steps))
    fields = ("way", "network", "workers", "codec"), ("way", "network"), ()
    each = lambda x: x.steps * (step_seconds(self._done, x, *fields) or 0.0)
    return f"{len(self.left)} left, about {sum(map(each, self.left)) / 60:.0f} min"
