"""Trains, one after another, what no record has. ``make evidence`` starts it.

Trainings run at the lowest priority, one a core. They are stopped while a benchmark
keeps the machine quiet (common/quiet.py), and end with the queue. One that takes much
more CPU time than it said, or ends with an error twice, is left, and its record says
why. Remove the line, and it is trained again. Launches that are timed need a quiet
machine: they are no part of the queue.
"""

import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.common import cli, quiet
from benchmarks.study import records as study_records
from benchmarks.study.queue import child as queue_child
from benchmarks.study.settings import Setting


class Item(Protocol):
  """A training, as ``items`` has it."""

  @property
  def launch(self) -> str: ...
  @property
  def setting(self) -> Setting: ...
  @property
  def cpu(self) -> float: ...
  @property
  def digest(self) -> str: ...
  @property
  def title(self) -> str: ...


class Folders(NamedTuple):
  """Names the folders and the files of a queue.

  Attributes:
    records: a file for each launch, which git has.
    work: all else, which git ignores.
  """

  records: Path
  work: Path

  def state(self, digest: str) -> Path:
    return self.work / "states" / digest

  def log(self, digest: str) -> Path:
    return self.work / "log" / f"{digest}.txt"

  @property
  def lock(self) -> Path:
    """The file that a queue locks while it runs."""
    return self.work / "queue.lock"

  @property
  def running(self) -> Path:
    """The file with the digests of what a queue trains now."""
    return self.work / "running.json"


class Limits(NamedTuple):
  """When a training is given up, and how often the queue looks.

  Attributes:
    factor: of a training's estimate, in CPU time.
    compiling: seconds of CPU time beside that, which no estimate has in it.
    starting: seconds of CPU time before there is an estimate.
    idle: seconds without CPU time.
    failures: of one training, with which it is left.
    in_a_row: failures of any trainings with none that is done in between, with which
      the queue ends. Then the machine is at fault, and not the trainings.
    ending: seconds in which trainings may save their states at the end.
    poll: seconds between two looks.
  """

  factor: float = 5.0
  compiling: float = 600.0
  starting: float = 1800.0
  idle: float = 600.0
  failures: int = 2
  in_a_row: int = 6
  ending: float = 3.0
  poll: float = 1.0


def queued(items: Sequence[Item]) -> list[Item]:
  """Returns the items that a queue trains: all but those that are timed."""
  return [item for item in items if item.setting.way != "timed"]


class Queue:
  """Trains items until all have records, or a signal ends it.

  Args:
    items: in the order in which they are trained.
    folders: of records and states.
    command: makes the command line that trains an item.
    cores: those that trainings run on, one on each.
    about: what each record of a training that is left says beside.
    limits: see there.
  """

  def __init__(
    self,
    items: Sequence[Item],
    folders: Folders,
    command: Callable[[Item], Sequence[str]],
    cores: Sequence[int],
    about: dict[str, Any] | None = None,
    limits: Limits = Limits(),  # noqa: B008
  ):
    self._items = queued(items)
    self._folders = folders
    self._command = command
    self._cores = cores
    self._about = about or {}
    self._limits = limits
    self._running: dict[str, tuple[Item, queue_child.Child]] = {}
    self._failures: dict[str, int] = {}
    self._in_a_row = 0
    self._known: set[Setting] = set()
    self._quiet = False
    self._signal = 0

  def run(self) -> int:
    """Trains, and returns the exit status: 0, 143 behind SIGTERM, or 1.

    It is 1 where trainings fail one after another.
    """
    self._folders.records.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._note)
    self._read()
    try:
      while not self._signal and self._step():
        time.sleep(self._limits.poll)
    finally:
      self._end()
    return 128 + self._signal if self._signal else int(self._broken)

  @property
  def _broken(self) -> bool:
    return self._in_a_row >= self._limits.in_a_row

  def _note(self, number: int, frame: Any) -> None:
    self._signal = number

  def _step(self) -> bool:
    """Looks once at all there is, and returns whether anything is left to do."""
    self._keep_quiet()
    for item, child in list(self._running.values()):
      if (status := child.ended()) is not None:
        self._ended(item, child, status)
      elif not self._quiet:
        self._watch(item, child)
    if self._broken:
      return False
    waiting = self._waiting()
    if self._quiet:
      return bool(self._running) or next(waiting, None) is not None
    used = {child.core for _, child in self._running.values()}
    free = [core for core in self._cores if core not in used]
    for core, item in zip(free, list(waiting), strict=False):
      print(f"{time.strftime('%F %T')} trains {item.digest}: {item.title}", flush=True)
      child = queue_child.Child(
        self._command(item),
        self._folders.state(item.digest),
        self._folders.log(item.digest),
        core,
      )
      self._running[item.digest] = item, child
    self._tell()
    return bool(self._running)

  def _keep_quiet(self) -> None:
    """Stops all trainings where a benchmark takes times, and lets them go on later."""
    holder = quiet.holder()
    if self._quiet == (holder is not None):
      return
    self._quiet = holder is not None
    for _, child in self._running.values():
      if self._quiet:
        child.stop()
      else:
        child.go_on()
    print(f"{time.strftime('%F %T')} {f'waits for {holder}' if holder else 'goes on'}")
    sys.stdout.flush()

  def _waiting(self) -> Iterator[Item]:
    for item in self._items:
      if item.setting not in self._known and item.digest not in self._running:
        yield item

  def _ended(self, item: Item, child: queue_child.Child, status: int) -> None:
    """Takes a training out whose process has ended."""
    self._read()
    if item.setting in self._known:
      self._in_a_row = 0
      self._forget(item, "done")
    else:  # also where it ended well and has no record: it would start for ever
      self._failed(item, child, f"ended with {status}")

  def _watch(self, item: Item, child: queue_child.Child) -> None:
    """Leaves a training that takes too much CPU time, or takes none.

    Seconds on a clock tell nothing at the lowest priority.
    """
    limits, spent, estimate = self._limits, child.cpu(), child.heartbeat().estimate
    if estimate is None and spent > limits.starting:
      child.kill()
      self._leave(item, spent, f"no estimate after {spent:.0f} CPU s")
    elif estimate is not None and spent > limits.factor * estimate + limits.compiling:
      child.kill()
      reason = f"slower than {limits.factor:g} times its estimate of {estimate:.0f}"
      self._leave(item, spent, f"{reason} CPU s")
    elif (idle := child.idle()) > limits.idle:
      child.kill()
      self._failed(item, child, f"took no CPU time for {idle:.0f} s")

  def _failed(self, item: Item, child: queue_child.Child, how: str) -> None:
    """Has a training start anew, for its state may be at fault, or leaves it."""
    self._in_a_row += 1
    count = self._failures[item.digest] = self._failures.get(item.digest, 0) + 1
    if count < self._limits.failures or self._broken:
      for saved in self._folders.state(item.digest).glob("saved-*"):
        shutil.rmtree(saved, ignore_errors=True)
      return self._forget(item, f"{how}: {self._said(child)}")
    reason = f"failed {count} times; last it {how}: {self._said(child)}"
    return self._leave(item, child.heartbeat().cpu, reason)

  def _said(self, child: queue_child.Child) -> str:
    """Returns the last line that a training printed, without folders of the machine."""
    return child.last_line().replace(f"{self._folders.work.absolute().parent}/", "")

  def _leave(self, item: Item, spent: float, reason: str) -> None:
    path = self._folders.records / f"{item.launch}.jsonl"
    results = {"left": reason, "cpu": round(spent, 1), **self._about}
    study_records.append(path, item.setting, results)
    self._read()
    self._forget(item, f"is left: {reason}")

  def _forget(self, item: Item, how: str) -> None:
    del self._running[item.digest]
    print(f"{time.strftime('%F %T')} {item.digest} {how}", flush=True)

  def _read(self) -> None:
    found = study_records.read(self._folders.records)
    # Not in place of what was known: the checkout may be on another branch now.
    self._known |= {record.setting for record in found}

  def _tell(self) -> None:
    """Writes what runs, for study/queue/status.py."""
    cli.replace_json(self._folders.running, list(self._running))

  def _end(self) -> None:
    """Ends all trainings within seconds; those that save their states go on later."""
    children = [child for _, child in self._running.values()]
    for child in children:
      child.end()
    deadline = time.monotonic() + self._limits.ending
    while time.monotonic() < deadline and any(x.ended() is None for x in children):
      time.sleep(0.05)
    for child in children:
      child.kill()


def main() -> None:
  """Runs the queue in the tree of a commit, as study/queue/start.py starts it."""
  parser = cli.parser(__doc__)
  parser.add_argument("--records", type=Path, required=True, help="folder, in git")
  parser.add_argument("--work", type=Path, required=True, help="folder, not in git")
  parser.add_argument("--jobs", type=int, help="trainings at once; default: the cores")
  args = parser.parse_args()
  found = importlib.util.find_spec("gradcomp")
  if not (found and found.origin and Path(found.origin).is_relative_to(cli.ROOT)):
    raise RuntimeError(
      f"gradcomp must be that of {cli.ROOT}, which PYTHONPATH says; it is {found}"
    )
  from benchmarks.study.queue import items as queue_items

  folders = Folders(args.records, args.work)

  def command(item: Item) -> list[str]:
    state = str(folders.state(item.digest))
    given = [item.digest, "--records", str(folders.records), "--state", state]
    return [
      sys.executable,
      "-P",
      *cli.module("benchmarks.study.queue.train", *given)[1:],
    ]

  cores = sorted(os.sched_getaffinity(0))[: args.jobs]
  about = {"commit": cli.commit()}
  sys.exit(Queue(queue_items.items(), folders, command, cores, about).run())


if __name__ == "__main__":
  main()
