"""Runs one training of the evidence queue, and goes on where an earlier one stopped.

  python -m benchmarks.study.queue.train DIGEST --records FOLDER --state FOLDER

The state's folder has heartbeat.json, which says how far the training is. It has the
state of a long training, every five minutes and at SIGTERM. Other code starts anew. All
is gone once the record is written. Time is CPU time: beside other work nothing else
says what a training costs.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.common import cli
from benchmarks.common.trainer import Trainer
from benchmarks.study import dettmers, emulated, records, tasks
from benchmarks.study.queue import items
from benchmarks.study.queue.child import Heartbeat
from benchmarks.study.runner import sized
from benchmarks.study.settings import Setting
from benchmarks.study.tasks import Source
from examples.lib.checkpoints import Saved
from examples.lib.training import AXIS, Task
from gradcomp._src.version import WIRE

_LONG = 600.0  # CPU seconds, from which on a training saves its state
_BETWEEN = 300.0  # CPU seconds from one saved state to the next
_COMPILED = 2  # steps that take longer than those behind them
_MEASURED = 10.0  # CPU seconds of steps that tell what all steps take
_ENDED = 128 + signal.SIGTERM  # the exit status
_BEAT = 1.0  # seconds from one heartbeat to the next


class Heart:
  """Says how far a training is, and what it takes.

  Args:
    path: of the file.
    steps: of the training.

  Attributes:
    estimate: the CPU seconds of the whole training, once some steps have shown it.
  """

  def __init__(self, path: Path, steps: int):
    self._path, self._steps = path, steps
    self._step, self._before = 0, 0.0
    self._compiled: float | None = None
    self._last = 0.0
    self.estimate: float | None = None

  @property
  def cpu(self) -> float:
    """The CPU seconds so far, those of earlier processes included."""
    return self._before + time.process_time()

  def go_on(self, step: int, cpu: float, estimate: float | None) -> None:
    """Counts on from a saved state."""
    self._step, self.estimate = step, estimate
    self._before = cpu - time.process_time()

  def beat(self) -> None:
    """Counts a step."""
    self._step += 1
    if self.estimate is None:
      self._learn()
    now = time.monotonic()
    if now - self._last > _BEAT:
      self._last = now
      self._write()

  def _learn(self) -> None:
    if self._step == _COMPILED:
      self._compiled = self.cpu
    if self._compiled is None or self._step == _COMPILED:
      return
    spent = self.cpu - self._compiled
    if spent > _MEASURED or self._step == self._steps:
      each = spent / (self._step - _COMPILED)
      self.estimate = self._compiled + each * (self._steps - _COMPILED)
      print(f"{self.estimate:.0f} CPU seconds, {each:.4f} a step", flush=True)

  def _write(self) -> None:
    found = Heartbeat(self._step, self._steps, self.cpu, self.estimate)
    cli.replace_json(self._path, found._asdict())


class Keeper:
  """Keeps the state of a training that takes long, as ``checkpoints.Saved`` does.

  Args:
    folder: of the states.
    heart: of the training.
    record: what the state belongs to: see ``gradcomp.checkpoint.record``.
  """

  def __init__(self, folder: Path, heart: Heart, record: dict[str, Any] | None):
    self._folder, self._heart, self._record = folder, heart, record
    self._saved: Saved | None = None
    self._last = heart.cpu
    self._ends = False

  def end(self, *_: Any) -> None:
    """Has the next step of a long training be the last of this process.

    A short one ends at once, for it keeps nothing.
    """
    if not self._long:
      os._exit(_ENDED)
    self._ends = True

  @property
  def _long(self) -> bool:
    estimate = self._heart.estimate
    return estimate is not None and estimate >= _LONG

  def restore(
    self, state: Any, batches: Iterator[Any], notes: Any
  ) -> tuple[int, Any, Any]:
    """Returns the steps done, and the state and the notes after them."""
    if not self._folder.exists():
      return 0, state, notes
    found = {"notes": notes, "cpu": self._heart.cpu, "estimate": None}
    step, state, found = self._open().restore(state, batches, found)
    self._heart.go_on(step, found["cpu"], found["estimate"])
    self._last = self._heart.cpu
    return step, state, found["notes"]

  def save(self, step: int, state: Any, notes: Any) -> None:
    """Saves if it is time to; the process may end then."""
    due = self._heart.cpu - self._last >= _BETWEEN
    if self._long and (due or self._ends):
      self._save(step, state, notes)
    if self._ends:
      sys.exit(_ENDED)

  def _save(self, step: int, state: Any, notes: Any) -> None:
    heart = self._heart
    found = {"notes": notes, "cpu": heart.cpu, "estimate": heart.estimate}
    self._open().save(step, state, found)
    self._last = heart.cpu

  def _open(self) -> Saved:
    if self._saved is None:
      self._saved = Saved(self._folder, record=self._record)
    return self._saved


def source_of(setting: Setting) -> Source:
  """Loads what a setting trains on, if that has the size that the setting says."""
  source = tasks.source(
    setting.network,
    **tasks.named(setting.dataset),
    dropout=setting.dropout,
  )
  _check(setting, source.name, source.epoch)
  return source


def _check(setting: Setting, name: str, epoch: int) -> None:
  if (name, epoch) != (setting.dataset, setting.epoch):
    raise ValueError(
      f"`setting` must say what its data is, {name!r} with {epoch} samples an epoch, "
      f"got {setting.dataset!r} with {setting.epoch}."
    )


def trainer_of(setting: Setting) -> tuple[Trainer, dict[str, Any]]:
  """Makes what trains, and says how large the network is."""
  alike = setting._replace(seed=0)
  if setting.way != "emulated":
    name, images = tasks.images(**tasks.named(setting.dataset))
    _check(setting, name, len(images.train.labels))
    return dettmers.trainer(images, alike), {}
  source = source_of(setting)
  known = source.arrays[0][: tasks.KNOWN]
  mesh = jax.make_mesh((1,), (AXIS,), devices=jax.devices()[:1])
  task = Task(source.model, source.test, mesh, known=known)
  return emulated.trainer(task, source, alike), sized(task, source)


def train(
  setting: Setting, state: Path, ended: Callable[[dict[str, Any]], None]
) -> None:
  """Trains, and gives the results to ``ended`` before the state is removed."""
  state.mkdir(parents=True, exist_ok=True)
  heart = Heart(state / "heartbeat.json", setting.steps)
  trainer, size = trainer_of(setting)
  code = cli.code()
  keeper = Keeper(state / f"saved-{code}", heart, trainer.recorded())
  signal.signal(signal.SIGTERM, keeper.end)
  found = trainer.train(setting.seed, heart.beat, keeper)
  made = {
    "cpu": round(heart.cpu, 1),
    "commit": cli.commit(),
    "code": code,
    "wire": WIRE,
    "jax": jax.__version__,
  }
  ended(rounded(found) | trainer.bytes() | made | size)
  shutil.rmtree(state)


def rounded(found: dict[str, Any]) -> dict[str, Any]:
  """Rounds the numbers of a curve to five digits.

  Example:
    >>> rounded({"points": [{"step": 936, "accuracy": 88.296875}]})
    {'points': [{'step': 936, 'accuracy': 88.297}]}
  """

  def digits(x: Any) -> Any:
    if isinstance(x, dict):
      return {name: digits(each) for name, each in x.items()}
    if isinstance(x, list):
      return [digits(each) for each in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x

  return found | {"points": digits(found["points"])}


def main() -> None:
  parser = cli.parser(__doc__)
  parser.add_argument("digest", help="of the training")
  parser.add_argument("--records", type=Path, required=True, help="their folder")
  parser.add_argument("--state", type=Path, required=True, help="folder of its state")
  args = parser.parse_args()
  (item,) = (x for x in items.items() if x.digest == args.digest)
  path = args.records / f"{item.launch}.jsonl"
  append = lambda results: records.append(path, item.setting, results)
  train(item.setting, args.state, append)


if __name__ == "__main__":
  main()
