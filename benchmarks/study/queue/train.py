"""Runs one training of the evidence queue, and goes on where an earlier one stopped.

  python -m benchmarks.study.queue.train SETTING RECORDS STATE

The setting is JSON; a line goes to the file of records. The folder of the state has
heartbeat.json, which says how far the training is, and the state itself, every five
minutes and at SIGTERM. Other code starts anew. All is gone once the record is written.
Time is CPU time: beside other work nothing else says what a training costs.
"""

import functools
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from benchmarks.common import cli
from benchmarks.study import records, runner, settings
from benchmarks.study.analysis import in_groups
from benchmarks.study.items import Item
from examples.lib.checkpoints import Saved
from gradcomp._src.version import WIRE

_BETWEEN = 300.0  # CPU seconds from one saved state to the next
_WORTH = 30.0  # CPU seconds that are saved at the end
_BEAT = 1.0  # seconds from one heartbeat to the next


class Keeper:
  """Keeps the state of a training and its heartbeat; ``record``: what it belongs to."""

  def __init__(self, folder: Path, steps: int, record: dict[str, Any] | None):
    self._folder, self._steps, self._record = folder, steps, record
    self._before, self._beat = 0.0, 0.0
    self._last = self.cpu
    self._ends = False

  @property
  def cpu(self) -> float:
    """The CPU seconds so far, those of earlier processes included."""
    return self._before + time.process_time()

  def end(self, *_: Any) -> None:
    """Has the next step be the last of this process."""
    self._ends = True

  def restore(self, state: Any, batches: Any, notes: Any) -> tuple[int, Any, Any]:
    """Returns the steps done, and the state and the notes after them."""
    if not self._folder.exists():
      return 0, state, notes
    found = {"notes": notes, "cpu": self.cpu}
    step, state, found = self._saved.restore(state, batches, found)
    self._before = found["cpu"] - time.process_time()
    self._last = self.cpu
    return step, state, found["notes"]

  def save(self, step: int, state: Any, notes: Any) -> None:
    """Saves if it is time to; the process may end then."""
    if (now := time.monotonic()) - self._beat > _BEAT:
      self._beat = now
      beat = json.dumps({"step": step, "steps": self._steps, "cpu": self.cpu})
      cli.replace(self._folder.with_name("heartbeat.json"), beat)
    if self.cpu - self._last >= (_WORTH if self._ends else _BETWEEN):
      self._saved.save(step, state, {"notes": notes, "cpu": self.cpu})
      self._last = self.cpu
    if self._ends:
      sys.exit(128 + signal.SIGTERM)

  @functools.cached_property
  def _saved(self) -> Saved:
    return Saved(self._folder, record=self._record)


def train(
  setting: settings.Setting, state: Path, ended: Callable[[dict[str, Any]], None]
) -> None:
  """Trains, and gives the results to ``ended`` before the state is removed."""
  state.mkdir(parents=True, exist_ok=True)
  trainer, size = runner.trainer_of(setting)
  made = made_with()
  keeper = Keeper(state / f"saved-{made['code']}", setting.steps, trainer.recorded())
  signal.signal(signal.SIGTERM, keeper.end)
  found = trainer.train(setting.seed, saved=keeper)
  cost = {"cpu": round(keeper.cpu, 1)}
  ended(rounded(found) | trainer.bytes() | cost | made | size)
  shutil.rmtree(state)


def train_arms(items: Iterable[Item], folder: Path, minutes: float) -> None:
  """Trains arms on a GPU: ``make evidence ARGS="--device gpu --minutes 8"``.

  All seeds of an arm that have no record are one program. The order is the queue's, and
  float32 comes before the codecs of a launch. Trainings that one device does not
  emulate are left to CPUs. Records name the device, and have seconds in place of CPU
  seconds. No arm begins after so many minutes, and what has ended is appended.
  """
  start, known = time.monotonic(), {x.setting for x in records.read(folder)}
  new = lambda x: x.setting.way == "emulated" and x.setting not in known
  arms = in_groups(filter(new, items), lambda item: item.setting._replace(seed=0))
  for arm in arms.values():
    if time.monotonic() - start > 60 * minutes:
      return
    began, made = time.monotonic(), made_with()
    trainer, size = runner.trainer_of(arm[0].setting)
    found = trainer.train_together([x.setting.seed for x in arm])
    seconds = time.monotonic() - began
    print(f"{arm[0].launch}: {arm[0].title} and {len(arm) - 1} more, {seconds:.0f} s")
    made |= {"seconds": round(seconds / len(arm), 1)}
    made |= {"device": jax.devices()[0].device_kind}
    sent = trainer.bytes()
    for item, own in zip(arm, found, strict=True):
      path = folder / f"{item.launch}.jsonl"
      records.append(path, item.setting, rounded(own) | sent | made | size)


def made_with() -> dict[str, Any]:
  """Returns what a record says of its code; to be asked before the training."""
  made = {"commit": cli.commit(), "code": cli.code()}
  return made | {"wire": WIRE, "jax": jax.__version__}


def rounded(found: Any) -> Any:
  """Rounds the numbers of a curve to five digits.

  >>> rounded({"points": [{"step": 936, "accuracy": 88.296875}]})
  {'points': [{'step': 936, 'accuracy': 88.297}]}
  """
  if isinstance(found, dict):
    return {name: rounded(each) for name, each in found.items()}
  if isinstance(found, list):
    return [rounded(each) for each in found]
  return float(f"{found:.5g}") if isinstance(found, float) else found


def main() -> None:
  parser = cli.parser(__doc__)
  parser.add_argument("setting", help="in JSON", type=json.loads)
  parser.add_argument("records", type=Path, help="file of the launch")
  parser.add_argument("state", type=Path, help="folder of its state")
  args = parser.parse_args()
  setting = settings.Setting(**args.setting)
  append = lambda results: records.append(args.records, setting, results)
  train(setting, args.state, append)


if __name__ == "__main__":
  main()
