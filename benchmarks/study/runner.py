"""Makes what trains or times a setting, and runs those that have no record yet.

One process is a launch of its own. Where there are several, all run this with the same
settings, and the first appends the results.
"""

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import gradcomp
from benchmarks.common import quiet
from benchmarks.common.trainer import Trainer
from benchmarks.links import launch
from benchmarks.study import dettmers, devices, emulated, records, tasks
from benchmarks.study.items import Item
from benchmarks.study.settings import Setting
from examples.lib.training import AXIS, Task
from gradcomp._src.version import WIRE


def source_of(setting: Setting) -> tasks.Source:
  """Loads what a setting trains on, if that has the size that the setting says."""
  source = tasks.source(setting.network, setting.dataset, setting.dropout)
  _check(setting, source.epoch)
  return source


def _check(setting: Setting, epoch: int) -> None:
  data, given = setting.dataset, setting.epoch
  if epoch != given:
    raise ValueError(f"`epoch` must be {epoch}, the samples of {data!r}, got {given}.")


def task_of(setting: Setting) -> tuple[Task, tasks.Source]:
  """Makes the task of a setting on as many devices as it needs."""
  source, count = source_of(setting), setting.workers
  count = 1 if setting.way == "emulated" else count
  mesh = jax.make_mesh((count,), (AXIS,), devices=jax.devices()[:count])
  known = source.arrays[0][: tasks.KNOWN]
  return Task(source.model, source.test, mesh, known=known), source


def trainer_of(setting: Setting) -> tuple[Trainer, dict[str, Any]]:
  """Makes what trains from any seed, and says how large the network is."""
  alike = setting._replace(seed=0)
  if alike.way in ("emulated", "trained"):
    task, source = task_of(alike)
    module = emulated if alike.way == "emulated" else devices
    return module.trainer(task, source, alike), sized(task, source)
  images = tasks.images(alike.dataset)
  _check(alike, len(images.train.labels))
  return dettmers.trainer(images, alike), {}


def sized(task: Task, source: tasks.Source) -> dict[str, float]:
  """Returns the size of a network, and what a sample's gradient costs."""
  params = jax.eval_shape(lambda: task.init_params(0))
  elements = sum(leaf.size for leaf in jax.tree.leaves(params))
  sample = tuple(x[:1] for x in source.test)
  gradient = jax.jit(jax.grad(task.loss_fn))
  cost = gradient.lower(params, sample, **task.options(0, 0)).cost_analysis()
  return {
    "parameters": elements,
    "megabytes": 4 * elements / 1e6,
    "gigaflops": (cost or {}).get("flops", 0.0) / 1e9,  # of a loop's operations once
  }


def run(
  items: Sequence[Item], folder: Path, interface: str = "", probe: float | None = None
) -> None:
  """Runs the items without a record in the folder, which launches may share."""
  first = jax.process_index() == 0
  left = _left(folder, items)
  if jax.process_count() > 1:
    for item in left if first else ():  # data is prepared by one process alone
      source_of(item.setting)
    multihost_utils.sync_global_devices("data is prepared")
  made = functools.cache(trainer_of)  # programs are compiled once for all seeds
  for number, item in enumerate(left, 1):
    if not _left(folder, [item]):  # another launch has run it meanwhile
      continue
    exchanges = item.setting.way in ("timed", "trained")
    if exchanges and item.setting.workers > jax.device_count():
      sys.exit(
        f"{item.title} must have at most the devices of all processes, "
        f"{jax.device_count()}. One process has as many as --devices says."
      )
    # Who starts several processes keeps their machine quiet: see study/__main__.py.
    timed = item.setting.way == "timed"
    with quiet.machine(unless=not timed or jax.process_count() > 1):
      start = time.perf_counter()
      try:
        if timed:
          task, source = task_of(item.setting)
          results = devices.timed(task, source, item.setting, interface)
          results |= sized(task, source) | {"probe": probe}
          said = f"{1e3 * results['step']:.1f} ms a step"
        else:
          trainer, size = made(item.setting._replace(seed=0))
          found = trainer.train(item.setting.seed)
          said = f"accuracy {found['points'][-1]['accuracy']:.2f} %"
          results = found | trainer.bytes() | size
      except ValueError as error:  # such as an exchange that a codec does not go with
        results, said = {"failed": str(error)}, f"failed: {error}"
      seconds = time.perf_counter() - start
    if first:
      results |= {"seconds": seconds, "gradcomp": gradcomp.__version__, "wire": WIRE}
      results |= launch.machine() if timed else {"jax": jax.__version__}
      records.append(folder / f"{item.launch}.jsonl", item.setting, results)
      print(f"{number} of {len(left)}, {item.title}: {said}, {seconds:.0f} s")
      sys.stdout.flush()


def _left(folder: Path, items: Sequence[Item]) -> list[Item]:
  """Returns the items without a record, the same in all processes."""
  done = records.done(folder)
  left = np.array([item.setting not in done for item in items], bool)
  if jax.process_count() > 1:
    left = multihost_utils.broadcast_one_to_all(left)
  return [item for item, own in zip(items, left, strict=True) if own]
