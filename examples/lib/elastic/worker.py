"""Trains as one worker of a generation; the supervisors of elastic.py start it.

A worker goes on from the parts that its plan names. When the generation is over, it
saves its parts of the states after its last two steps, because others may be a step
behind or ahead, and leaves. Parts of all workers of one step are a checkpoint.
"""

import argparse
import os
import pathlib
import sys
import threading
import time
import traceback
import zipfile
from typing import NoReturn

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

import gradcomp
from examples import elastic
from examples.lib.elastic import training as elastic_training
from examples.lib.elastic.options import training
from examples.lib.parsing import natural
from examples.lib.shared_folder import publish, read
from examples.lib.telemetry import ends_round

FAILED = 3  # the exit code of a worker that leaves early; Python's own is 1
# In seconds. A dead process is noticed at once; these are for one that hangs.
LIMITS = {
  "initialization_timeout": 60,
  "heartbeat_timeout_seconds": 20,
  "shutdown_timeout_seconds": 10,
}


class Worker:
  """One of the workers of a plan."""

  def __init__(self, folder: pathlib.Path, plan: elastic.Plan, host: int):
    self._folder, self._plan, self._host = folder, plan, host
    self._leaving = threading.Lock()
    self._parent = os.getppid()
    self._training: elastic_training.Training | None = None
    self._first = host == plan.hosts[0]
    threading.Thread(target=self._watch, daemon=True).start()

  def _mark(self, what: str, of: str = "") -> pathlib.Path:
    return self._folder / f"{what}-{self._plan.generation}{of}"

  def _watch(self) -> None:
    """Leaves when others ask for it, in whatever state the main thread is."""
    while not self._mark("over").exists():
      self._wait()
    self.leave()

  def _wait(self) -> None:
    if os.getppid() != self._parent:
      os._exit(FAILED)  # without its supervisor this host is dead
    time.sleep(elastic.TICK)

  def leave(self) -> NoReturn:
    """Saves this worker's parts, and ends without JAX's barrier for all others."""
    with self._leaving:
      self._mark("over").touch()
      try:
        for step, state in list(self._training.kept) if self._training else []:
          self._save(step, state)
      except Exception:  # then without it, for the others wait
        traceback.print_exc()
      self._mark("left", f"-{self._host}").touch()
      # JAX aborts the others when the coordinator ends. So its supervisor ends it, when
      # the others have left.
      while self._first:
        self._wait()
      os._exit(FAILED)

  def _save(self, step: int, state: elastic_training.State) -> None:
    path = elastic.parts_path(self._folder, self._plan.generation, step, self._host)
    if not path.exists():
      part = [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(state)]
      temporary = path.with_suffix(".new")
      with open(temporary, "wb") as file:
        np.savez(file, *part)
      temporary.replace(path)

  def _load(self, generation: int, step: int, host: int) -> list[np.ndarray]:
    path = elastic.parts_path(self._folder, generation, step, host)
    try:
      with np.load(path) as arrays:
        return list(arrays.values())
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
      raise ValueError(f"{path} must be whole, but {error}; remove it.") from error

  def _resume(self, training: elastic_training.Training) -> str:
    """Goes on from the source of the plan; describes the lost parts in words."""
    plan = self._plan
    if plan.source is None:
      return "a new training"
    generation, step = plan.source
    record = read(self._folder / f"record-{generation}.json")
    hosts = elastic.plan_of(self._folder, generation).hosts
    gradcomp.checkpoint.check_record(record, training.record(len(hosts)))
    parts = {x: self._load(*plan.source, x) for x in hosts if x not in plan.lost}
    stay = [x for x in plan.hosts if x in hosts]
    gone = [x for x in hosts if x not in stay]
    training.resume(step, parts, hosts, stay + gone)
    lost = [f"the part of host {x}{self._size(training, x)}" for x in plan.lost]
    if again := step - training.step:
      lost.append(f"{again} steps of a round, which are done again")
    whole = plan.source == plan.checkpoint
    if whole and (self._folder / f"over-{plan.generation - 1}").exists():
      lost.append("steps after it, which are done again")
    source = "a checkpoint" if whole else "memory"
    return f"from {source}; lost: {', '.join(lost) or 'nothing'}"

  def _size(self, training: elastic_training.Training, host: int) -> str:
    """Describes the size of a host's lost part when it was last saved."""
    last = self._plan.checkpoint
    if last is None or not elastic.parts_path(self._folder, *last, host).exists():
      return ""
    told = training.unsent(self._load(*last, host))
    return f" ({told} after step {last[1]})"

  def train(self, options: argparse.Namespace) -> None:
    """Trains until the last step, or until somebody wants to join."""
    plan = self._plan
    rank = plan.hosts.index(self._host)
    jax.distributed.initialize(plan.address, len(plan.hosts), rank, **LIMITS)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    training = elastic_training.Training(mesh, options.local_steps, options.codec)
    told = self._resume(training)
    steps = process_allgather(np.int32(training.step))
    if len(set(steps.tolist())) > 1:
      raise RuntimeError(f"all workers must go on from one step, got {steps}.")
    self._say(f"hosts {plan.hosts} go on after step {training.step}: {told}")
    # Beside what will be saved, before there is something.
    path = self._folder / f"record-{plan.generation}.json"
    publish(path, training.record(len(plan.hosts)))
    self._training = training
    while training.step < options.steps:
      number = training.step + 1
      look = inspected(number, options.inspect, options.local_steps or 1)
      metrics = training.advance(inspect=look)
      if look:
        self._say(f"step {number}:\n{metrics['inspection']}")
      time.sleep(options.pause)
      if training.step % options.save_every and training.step < options.steps:
        continue
      self._save(*training.kept[-1])
      self._say(f"step {training.step}: loss {metrics['loss']:.4f}")
      # All have saved when all have answered, and all do what the first one says.
      stop = process_allgather(np.bool_(self._mark("stop").exists()))[0]
      self._forget_before(training.step)
      if stop:
        break
    if training.step == options.steps:
      found = gradcomp.telemetry.compare_replicas(training.params, axis_name="data")
      found.require_equal()
      self._say(f"done; the parameters are equal on all {len(found.words)} workers")
      publish(self._folder / "done.json", {"steps": training.step})
    jax.distributed.shutdown()

  def _forget_before(self, step: int) -> None:
    """Removes parts that are older than the parts that all have just saved."""
    for generation, other in elastic.all_parts(self._folder) if self._first else []:
      if (generation, other) < (self._plan.generation, step):
        for path in self._folder.glob(f"parts-{generation}-{other}-*.npz"):
          path.unlink()

  def _say(self, text: str) -> None:
    if self._first:
      print(f"generation {self._plan.generation}: {text}", flush=True)


def inspected(number: int, every: int, round_steps: int) -> bool:
  """Returns True for a step that ends the round with a multiple of ``every`` in it."""
  return every > 0 and ends_round(number, round_steps, first=every, every=every)


def main() -> None:
  parser = argparse.ArgumentParser(
    description="Started by elastic.py.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    parents=[training()],
  )
  add = parser.add_argument
  add("folder", type=pathlib.Path)
  add("generation", type=natural)
  add("host", type=natural)
  options = parser.parse_args()
  plan = elastic.plan_of(options.folder, options.generation)
  worker = Worker(options.folder, plan, options.host)
  try:
    worker.train(options)
  except Exception:
    traceback.print_exc()
    sys.stderr.flush()
    worker.leave()


if __name__ == "__main__":
  main()
