"""The queue trains what no record has, gives way, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.common import locks
from benchmarks.study.queue import child
from benchmarks.study.queue import start as queue_start
from benchmarks.study.queue import status as queue_status
from benchmarks.study.queue.supervisor import Folders
from benchmarks.study.records import append
from tests.benchmarks import queues
from tests.benchmarks.queues import Queue, gone, until
from tests.benchmarks.study_records import SETTING, TIMED

SUPERVISOR = "benchmarks/study/queue/supervisor.py"
HOLD = """
import time
from benchmarks.common import quiet
quiet.STOPPING = 0
quiet.keep()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def queue(tmp_path):
  """Starts queues, and kills what still runs at the end."""
  started = []

  def start(*names, **options):
    started.append(Queue(tmp_path, *names, **options))
    return started[-1]

  yield start
  for one in started:
    one.process.kill()
    one.process.communicate()


@pytest.fixture
def holder(tmp_path):
  """Keeps the machine quiet for the queues of this folder, until it is killed."""
  held = []

  def hold():
    lock = {"GRADCOMP_QUIET_LOCK": str(tmp_path / "quiet.lock")}
    held.append(
      subprocess.Popen(
        [sys.executable, "-c", HOLD],
        cwd=queues.ROOT,
        env=os.environ | lock,
        stdout=subprocess.PIPE,
      )
    )
    assert held[-1].stdout.readline() == b"held\n"
    return held[-1]

  yield hold
  for process in held:
    process.kill()
    process.communicate()


def test_each_training_without_a_record_runs_once_and_in_order(queue, tmp_path):
  """What is timed needs a quiet machine. The last line of the file was torn."""
  known = '{"run": {"codec": "good", "seed": 1, "way": "emulated"}, "points": []}\n'
  (tmp_path / "records").mkdir()
  (tmp_path / "records" / "other.jsonl").write_text(f"{known}{known[:40]}")
  names = [(0, "good"), (1, "good"), (0, "timed"), (2, "good"), (0, "good")]
  one = queue(*names)
  status, printed = one.ended()
  assert status == 0
  assert printed == [
    "trains good-0: good-0",
    "good-0 done",
    "trains good-2: good-2",
    "good-2 done",
  ]
  assert [line["run"]["seed"] for line in one.lines()] == [0, 2]


def test_trainings_have_the_lowest_priority_and_a_core(queue):
  one = queue((0, "endless"), (1, "endless"), (2, "endless"), jobs=2)
  for digest in ("endless-0", "endless-1"):
    assert one.state("nice", digest) == "19"
    assert one.state("autogroup", digest).rstrip().endswith("nice 19")
    assert one.state("cores", digest) == "1"
  assert not (one.folder / "work" / "states" / "endless-2").exists()


def test_a_training_that_fails_twice_is_left(queue):
  """Its record has what it printed, and the queue goes on."""
  one = queue((0, "failing"), (0, "silent"), (0, "good"))
  assert one.ended()[0] == 0
  failing, silent, good = one.lines()
  reason = "failed 2 times; last it ended with 1: there is a bug in script.py"
  assert failing["left"] == reason  # without folders of the machine
  assert silent["left"] == "failed 2 times; last it ended with 0: "
  assert good["run"]["codec"] == "good" and "left" not in good
  assert one.state("starts", "failing-0") == "2"


def test_a_queue_whose_trainings_all_fail_ends(queue):
  """The machine is at fault then: few trainings are left, and not all."""
  one = queue(*[(seed, "failing") for seed in range(9)])
  status, printed = one.ended()
  assert status == 1
  assert len(one.lines()) == 2
  assert "there is a bug" in printed[-1]


@pytest.mark.parametrize(
  "codec, limits, reason",
  [
    ("slow", {"compiling": 0.1}, "slower than 5 times its estimate of 0 CPU s"),
    ("busy", {"starting": 0.1}, "no estimate after 0 CPU s"),
    # On a busy core the lowest priority gets a tick of 10 ms in about a second.
    ("idle", {"idle": 3.0}, "failed 2 times; last it took no CPU time for "),
  ],
  ids=["slow", "busy", "idle"],
)
def test_a_training_that_takes_too_much_or_nothing_is_left(
  codec, limits, reason, queue
):
  one = queue((0, codec), **limits)
  assert one.ended()[0] == 0
  [line] = one.lines()
  assert line["left"].startswith(reason)
  assert gone(one.state("process", f"{codec}-0"))


def test_sigterm_ends_all_within_seconds(queue, holder):
  """Trainings that are stopped save their states; one does not listen."""
  one = queue((0, "endless"), (0, "deaf"), jobs=2)
  trainings = [one.state("process", f"{name}-0") for name in ("endless", "deaf")]
  holder()
  until(lambda: "waits for" in one.process.stdout.readline())
  start = time.monotonic()
  one.process.send_signal(signal.SIGTERM)
  assert one.ended()[0] == 143
  assert time.monotonic() - start < 5
  assert all(map(gone, trainings))
  assert one.state("saved") == ""
  assert not one.records.exists()


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_killed_queue_leaves_no_training(stopped, queue, holder):
  one = queue((0, "endless"), (1, "endless"), jobs=2)
  trainings = [one.state("process", f"endless-{seed}") for seed in (0, 1)]
  if stopped:
    holder()
    until(lambda: "waits for" in one.process.stdout.readline())
  one.process.kill()
  until(lambda: all(map(gone, trainings)))


def test_trainings_stop_for_a_quiet_machine(queue, holder):
  """A holder that is killed lets go."""
  one = queue((0, "endless"))
  one.state("count")
  benchmark = holder()
  until(lambda: f"waits for process {benchmark.pid}" in one.process.stdout.readline())
  before = one.state("count")
  time.sleep(0.3)
  assert one.state("count") == before
  benchmark.kill()
  until(lambda: one.state("count") != before)


def test_one_benchmark_waits_for_another(tmp_path):
  """The processes that it starts do not wait for it."""
  code = "from benchmarks.common import quiet; "
  code += "quiet.STOPPING = 0; quiet.keep(); print('done')"
  run = [sys.executable, "-c", code]
  nested = f"{code}; import subprocess; subprocess.run({run!r}, check=True)"
  path = tmp_path / "quiet.lock"
  held = locks.take(path)
  waits = subprocess.Popen(
    [sys.executable, "-u", "-c", nested],
    cwd=queues.ROOT,
    env=os.environ | {"GRADCOMP_QUIET_LOCK": str(path)},
    stdout=subprocess.PIPE,
    text=True,
  )
  first = waits.stdout.readline()
  assert first.startswith(f"waits for a quiet machine: process {os.getpid()}, ")
  os.close(held)
  assert waits.communicate(timeout=30)[0].splitlines() == ["done", "done"]


@pytest.fixture
def checkout(tmp_path):
  """A repository whose queue prints its tree, its lock and its library."""
  root = tmp_path / "checkout"
  script = root / SUPERVISOR
  script.parent.mkdir(parents=True)
  for folder in script.parents[:3]:
    (folder / "__init__.py").touch()
  script.write_text(
    "import fcntl, os, sys\n"
    "from pathlib import Path\n"
    "print(Path(__file__).parents[3], os.environ['PYTHONPATH'], *sys.argv[1:])\n"
    "with open(Path(sys.argv[4], 'queue.lock')) as file:\n"
    "  try:\n"
    "    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)\n"
    "  except BlockingIOError:\n"
    "    print('locked')\n"
  )
  git(root, "init", "--quiet")
  commit(root)
  return root


def git(root, *words):
  person = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
  line = ["git", "-C", str(root), *person, *words]
  return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout


def commit(root):
  git(root, "add", ".")
  git(root, "commit", "--quiet", "--message", "a change")


def test_the_tree_is_that_of_the_newest_commit(checkout):
  """Whatever was changed there, or removed."""
  tree = checkout / ".evidence" / "tree"
  queue_start.move(checkout, tree)
  (tree / "benchmarks" / "study/queue/supervisor.py").write_text("changed")
  (checkout / "new").write_text("not committed")
  assert queue_start.move(checkout, tree) == git(tree, "rev-parse", "HEAD").strip()
  assert not (tree / "new").exists()
  assert git(tree, "status", "--porcelain").split() == ["??", "datasets"]
  commit(checkout)
  queue_start.move(checkout, tree)
  assert (tree / "new").exists()
  git(checkout, "worktree", "remove", "--force", str(tree))
  queue_start.move(checkout, tree)
  assert (tree / "new").exists()
  assert (tree / "datasets").readlink() == checkout / "datasets"


def test_the_queue_starts_in_the_tree_and_keeps_the_lock(checkout, tmp_path):
  work = tmp_path / "work"
  code = f"""{queues.SETTINGS}
from pathlib import Path
from benchmarks.study.queue import start
folders = start.Folders(Path("records"), Path({str(work)!r}))
start.main(folders, Path({str(checkout)!r}))
"""
  line = [sys.executable, "-c", code, "--jobs", "1"]
  subprocess.run(line, check=True, stdout=subprocess.PIPE)
  where, kept = (work / "queue.txt").read_text().splitlines()
  tree = work / "tree"
  assert where == f"{tree} {tree} --records records --work {work} --jobs 1"
  assert kept == "locked"
  assert locks.holder(work / "queue.lock") is None


def test_a_second_queue_does_not_start(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["study/queue/start.py"])
  folders = Folders(tmp_path / "records", tmp_path / "work")
  folders.work.mkdir()
  held = locks.take(folders.lock)
  queue_start.main(folders, tmp_path)
  os.close(held)
  out = capsys.readouterr().out
  assert out.startswith(f"the queue runs already: process {os.getpid()}, ")


class Item:
  def __init__(self, launch, setting):
    self.launch, self.setting = launch, setting
    self.digest = self.title = f"{setting.codec}-{setting.seed}"
    self.cpu = 3600.0


def test_the_status_counts_by_launches(tmp_path, monkeypatch):
  """A step of 40 takes 90 s; of another network the launch says an hour."""
  monkeypatch.setenv("GRADCOMP_QUIET_LOCK", str(tmp_path / "quiet.lock"))
  folders = Folders(tmp_path / "records", tmp_path / "work")
  folders.records.mkdir()
  settings = [
    SETTING._replace(seed=x, codec=y) for x in (0, 1) for y in ("f32", "qsgd")
  ]
  other = SETTING._replace(network="mlp")
  items = [Item("lenets", x) for x in settings]
  items += [Item("lenets", TIMED), Item("others", other)]
  page = queue_status.page(items, folders, 2)
  assert page.endswith("the queue does not run: make evidence starts it")
  assert "5.0 h of CPU time to do: 2.5 h of 2 cores" in page

  path = folders.records / "lenets.jsonl"
  append(path, settings[0], {"points": [{"step": 40}], "cpu": 3600.0})
  append(path, settings[1], {"left": "slow", "cpu": 1800.0})
  state = folders.state(items[2].digest)
  state.mkdir(parents=True)
  (state / "heartbeat.json").write_text(
    '{"step": 10, "steps": 40, "cpu": 900, "estimate": 3600}'
  )
  folders.running.write_text(f'["{items[2].digest}"]')
  held, quiet = locks.take(folders.lock), locks.take(tmp_path / "quiet.lock")
  lines = queue_status.page(items, folders, 2).splitlines()
  os.close(held)
  os.close(quiet)
  assert [line.split() for line in lines[1:3]] == [
    ["lenets", *"1 1 1 1 1 1 of 2 1.8 1.8".split()],
    ["others", *"0 0 0 1 0 0 of 1 0.0 1.0".split()],
  ]
  assert lines[4] == "2.8 h of CPU time to do: 1.4 h of 2 cores"
  assert lines[5].startswith(f"the queue runs: process {os.getpid()}, ")
  assert lines[6].startswith("it waits for a benchmark that takes times: process ")
  assert lines[7] == "  f32-1: step 10 of 40 (25 %), 900 of about 3600 CPU s"
  assert max(map(len, lines[:5])) <= 88


def test_a_training_that_said_nothing_has_no_estimate(tmp_path):
  assert child.heartbeat(tmp_path) == (0, 0, 0.0, None)
