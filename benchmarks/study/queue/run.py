"""Trains, one after another, what no record has: ``make evidence``.

  setsid nohup make evidence &      goes on when the terminal is closed
  make evidence-status              says how far it is, and its process

Trainings run one a core, at the lowest priority, and end with the queue. They are
stopped while a benchmark keeps the machine quiet (common/quiet.py). One that takes much
more CPU time than its launch says, or fails twice, is left, and its record says why.
Remove the line, and it is trained again.

Work on the checkout does not disturb them: they run in a worktree of git, which moves
to HEAD whenever the queue starts. Records go to the checkout. A second queue of a
checkout does not start. Linux only.
"""

import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from benchmarks.common import cli, locks, quiet
from benchmarks.study import records as study_records
from benchmarks.study.items import RECORDS, WORK, Item, items, queued
from benchmarks.study.queue import train
from benchmarks.study.settings import Setting

FACTOR = 5  # times the CPU time that a launch says, with which a training is left
COMPILING = 600  # seconds beside that
FAILURES = 2  # of one training, with which it is left
IN_A_ROW = 6  # of any, with which the queue ends: then the machine is at fault
ENDING = 3.0  # seconds in which trainings may save their states at the end
_LIBC = ctypes.CDLL(None)
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
Process = subprocess.Popen[bytes]
Start = Callable[[Item, int], Process]  # an item on a core


def start(
  command: Sequence[str], log: Path, core: int, seconds: int, env: dict[str, str]
) -> Process:
  """Starts a training on one core, at the lowest priority, in a session of its own.

  XLA then computes with one thread. The system kills the training with the queue, also
  where it is stopped, and behind so many seconds of CPU time.
  """
  log.parent.mkdir(parents=True, exist_ok=True)

  def settle() -> None:
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    os.nice(19)
    # Linux divides the time among sessions first, so that nice counts inside of one.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
      file.write("19")
    os.sched_setaffinity(0, {core})
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

  with log.open("wb") as file:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
      command, env=env, start_new_session=True, preexec_fn=settle, **pipes
    )


@dataclasses.dataclass
class Queue:
  """Trains items in their order until all have records, or a signal ends it."""

  left: Sequence[Item]
  folder: Path  # of the records
  work: Path  # the folder of states and logs, by the items' digests
  start: Start  # starts a training
  cores: Sequence[int]  # those that trainings run on, one on each
  commit: str  # what the record of a training that is left says beside
  poll: float = 1.0  # seconds between two looks
  known: set[Setting] = dataclasses.field(default_factory=set)
  running: dict[int, tuple[Item, Process]] = dataclasses.field(default_factory=dict)
  failures: dict[str, int] = dataclasses.field(default_factory=collections.Counter)
  in_a_row: int = 0
  stopped: bool = False

  def run(self) -> int:
    """Trains, and returns the exit status: 0; 143 behind SIGTERM; 1 where all fail."""
    self.folder.mkdir(parents=True, exist_ok=True)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, lambda number, _: signals.append(number))
    self._read()
    try:
      while not signals and self.in_a_row < IN_A_ROW and self._step():
        time.sleep(self.poll)
    finally:
      self._end()
    return 128 + signals[0] if signals else int(self.in_a_row >= IN_A_ROW)

  def _step(self) -> bool:
    """Looks once at all there is, and returns whether anything is left to do."""
    holder = quiet.holder()
    if self.stopped != (holder is not None):
      self.stopped = holder is not None
      for _, child in self.running.values():
        child.send_signal(signal.SIGSTOP if self.stopped else signal.SIGCONT)
      _say(f"waits for {holder}" if holder else "goes on")
    for core, (item, child) in list(self.running.items()):
      if (status := child.poll()) is not None:
        del self.running[core]
        self._ended(item, status)
    trained = {item.digest for item, _ in self.running.values()}
    new = lambda x: x.setting not in self.known and x.digest not in trained
    waiting = [x for x in self.left if new(x)]
    if not self.stopped and self.in_a_row < IN_A_ROW:
      free = [core for core in self.cores if core not in self.running]
      for core, item in zip(free, waiting, strict=False):
        _say(f"trains {item.digest}: {item.title}")
        self.running[core] = item, self.start(item, core)
    return bool(self.running or waiting)

  def _ended(self, item: Item, status: int) -> None:
    """Counts a training whose process has ended, and may leave one that failed."""
    self._read()
    if item.setting in self.known:
      self.in_a_row = 0
      return _say(f"{item.digest} done")
    # Also where it ended well and has no record: it would start for ever.
    self.in_a_row += 1
    self.failures[item.digest] += 1
    printed = (self.work / "log" / f"{item.digest}.txt").read_text(errors="replace")
    last = printed.rstrip().rpartition("\n")[-1]
    inside = f"{self.work.absolute().parent}/"
    reason = f"ended with {status}: {last}".replace(inside, "")
    if status == -signal.SIGXCPU:
      reason = f"took more than {limit(item)} CPU s"
    elif self.failures[item.digest] < FAILURES or self.in_a_row >= IN_A_ROW:
      # It starts anew, for its state may be at fault.
      shutil.rmtree(self.work / "states" / item.digest, ignore_errors=True)
      return _say(f"{item.digest} {reason}")
    else:
      reason = f"failed {FAILURES} times; last it {reason}"
    path = self.folder / f"{item.launch}.jsonl"
    study_records.append(path, item.setting, {"left": reason, "commit": self.commit})
    self._read()
    return _say(f"{item.digest} is left: {reason}")

  def _read(self) -> None:
    # Not in place of what was known: the checkout may be on another branch now.
    self.known |= {x.setting for x in study_records.read(self.folder)}

  def _end(self) -> None:
    """Ends all trainings within seconds; those that save their states go on later."""
    children = [child for _, child in self.running.values()]
    for child in children:  # also one that is stopped
      child.send_signal(signal.SIGTERM)
      child.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + ENDING
    while time.monotonic() < deadline and any(x.poll() is None for x in children):
      time.sleep(0.05)
    for child in children:
      child.kill()
      child.wait()


def _say(text: str) -> None:
  print(f"{time.strftime('%F %T')} {text}", flush=True)


def limit(item: Item) -> int:
  """Returns the seconds of CPU time with which a training is left."""
  return int(FACTOR * item.cpu) + COMPILING


def move(root: Path, tree: Path) -> str:
  """Makes or moves a worktree, with the checkout's datasets; returns HEAD's commit."""

  def git(folder: Path, *words: str) -> str:
    line = ["git", "-C", str(folder), *words]
    return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout

  commit = git(root, "rev-parse", "HEAD").strip()
  if (tree / ".git").exists():
    git(tree, "checkout", "--quiet", "--detach", "--force", commit)
  else:  # --force: git may know of one that was removed
    git(root, "worktree", "add", "--quiet", "--detach", "--force", str(tree), commit)
  sets = tree / "datasets"
  if not sets.is_symlink():
    sets.symlink_to(root / "datasets")
  return commit


def main(work: Path = WORK) -> None:
  parser = cli.parser(__doc__)
  parser.add_argument("--jobs", type=int, help="trainings at once; default: the cores")
  said = "gpu: all seeds of an arm at once, see train.py"
  parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help=said)
  said = "after which no arm begins on a GPU"
  parser.add_argument("--minutes", type=float, default=8.0, help=said)
  args = parser.parse_args()
  if args.device == "gpu":
    if jax.default_backend() != "gpu":
      parser.error(f"--device gpu needs a GPU, got {jax.default_backend()!r}")
    return train.train_arms(items(), RECORDS, args.minutes)
  work.mkdir(exist_ok=True)
  lock = work / "queue.lock"
  if locks.take(lock) is None:
    print(f"the queue runs already: {locks.holder(lock)}")
    return
  tree, log = work / "tree", work / "queue.txt"
  commit = move(cli.ROOT, tree)[:12]
  print(f"trains with {commit}, prints to {log}", flush=True)
  with log.open("a") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
  env = os.environ | {
    "PYTHONPATH": str(tree),
    "JAX_PLATFORMS": "cpu",
    "JAX_TRACEBACK_FILTERING": "off",  # so that an error is the last line of a log
    # Trainings that differ in their seeds alone share what they compile.
    "JAX_COMPILATION_CACHE_DIR": str(work / "programs"),
  }

  def started(item: Item, core: int) -> Process:
    # -P: nothing is imported from the folder that the queue starts in.
    line = [sys.executable, "-P", *cli.module("benchmarks.study.queue.train")[1:]]
    line += [json.dumps(item.setting._asdict()), str(RECORDS / f"{item.launch}.jsonl")]
    line += [str(work / "states" / item.digest)]
    return start(line, work / "log" / f"{item.digest}.txt", core, limit(item), env)

  cores = sorted(os.sched_getaffinity(0))[: args.jobs]
  sys.exit(Queue(queued(items()), RECORDS, work, started, cores, commit).run())


if __name__ == "__main__":
  main()
