"""The queue trains what no record has, gives way, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.common import locks, quiet
from benchmarks.study import records
from benchmarks.study.queue import child, supervisor
from benchmarks.study.queue import start as queue_start
from tests.benchmarks.study.records import SETTING, TIMED
from tests.support.pages import ROOT


class Item:
  def __init__(self, codec, seed=0, setting=SETTING, launch="lenets"):
    self.setting = setting._replace(codec=codec, seed=seed)
    self.launch, self.cpu = launch, 3600.0
    self.digest = self.title = f"{codec}-{seed}"


class Training:
  """In place of a process: its codec says how it goes."""

  def __init__(self, folders, command, state, log, core):
    (self.item,), self.core, self.did = command, core, []
    self.codec, self.folders = self.item.setting.codec, folders
    (state / "saved-1").mkdir(parents=True)

  def ended(self):
    path = self.folders.records / f"{self.item.launch}.jsonl"
    if self.codec == "good":
      records.append(path, self.item.setting, {"points": []})
    return {"good": 0, "silent": 0, "failing": 1}.get(self.codec)

  def heartbeat(self):
    return child.Heartbeat(estimate=0.001 if self.codec == "slow" else None)

  def cpu(self):
    return 2e3 if self.codec in ("slow", "busy") else 0.0

  def idle(self):
    return 1e3 if self.codec == "idle" else 0.0

  def last_line(self):
    return f"there is a bug in {self.folders.work.parent}/script.py"

  def __getattr__(self, name):  # what else is done to it
    return lambda: self.did.append(name)


@pytest.fixture
def queue(tmp_path, monkeypatch):
  folders = supervisor.Folders(tmp_path / "records", tmp_path / "work")
  folders.records.mkdir()
  folders.work.mkdir()
  started = []

  def training(*given):
    started.append(Training(folders, *given))
    return started[-1]

  monkeypatch.setattr(child, "Child", training)
  monkeypatch.setattr(signal, "signal", lambda *given: None)
  monkeypatch.setattr(quiet, "holder", lambda: None)

  def make(*items, cores=(0,)):
    limits = supervisor.Limits(poll=0.0, ending=0.0)
    return supervisor.Queue(items, folders, lambda x: [x], cores, limits=limits)

  return make, folders, started


def test_each_training_without_a_record_runs_once_and_in_order(queue):
  """One that fails twice is left, and so is one that takes too much or nothing."""
  make, folders, started = queue
  path = folders.records / "other.jsonl"
  records.append(path, Item("good", 1).setting, {"points": []})
  path.write_text(f"{path.read_text()}{path.read_text()[:40]}")
  codecs = "failing silent good slow busy idle".split()
  items = [Item("good", 1), Item("timed", 0, TIMED), *map(Item, codecs), Item("good")]
  assert make(*items).run() == 0
  twice = "failing failing silent silent good slow busy idle idle"
  assert [x.codec for x in started] == twice.split()
  found = {x.setting.codec: x.results for x in records.read(folders.records)}
  assert "left" not in found.pop("good")
  last, bug = "failed 2 times; last it", "there is a bug in script.py"
  assert {codec: x["left"] for codec, x in found.items()} == {
    "failing": f"{last} ended with 1: {bug}",
    "silent": f"{last} ended with 0: {bug}",
    "slow": "slower than 5 times its estimate of 0 CPU s",
    "busy": "no estimate after 2000 CPU s",
    "idle": f"{last} took no CPU time for 1000 s: {bug}",
  }
  assert all(x.did == ["kill"] for x in started[-4:])


def test_a_queue_whose_trainings_all_fail_ends(queue):
  """The machine is at fault then: few trainings are left, and not all."""
  make, folders, _ = queue
  assert make(*(Item("failing", seed) for seed in range(9))).run() == 1
  assert len(records.read(folders.records)) == 2


def test_trainings_stop_for_a_quiet_machine_and_end_with_the_queue(queue, monkeypatch):
  make, _, started = queue
  one = make(*(Item("endless", seed) for seed in range(3)), cores=(0, 1))

  def holders():
    yield from (None, "a benchmark", "a benchmark", None)
    yield one._note(signal.SIGTERM, None)

  monkeypatch.setattr(quiet, "holder", holders().__next__)
  assert one.run() == 143
  did = ["stop", "go_on", "end", "kill"]
  assert [(x.core, x.did) for x in started] == [(0, did), (1, did)]


TRAINING = "import os; print(os.getpid(), os.nice(0), len(os.sched_getaffinity(0)))"
QUEUE = f"""
import sys
from pathlib import Path
from benchmarks.study.queue import child
training = child.Child(
  [sys.executable, "-uc", "{TRAINING}\\nwhile True: pass"],
  Path("state"), Path("log"), min(__import__("os").sched_getaffinity(0)),
)
input()
training.stop()
print("stopped", flush=True)
input()
"""


def until(condition):
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_killed_queue_leaves_no_training(stopped, tmp_path):
  env = os.environ | {"PYTHONPATH": str(ROOT)}
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  command = [sys.executable, "-c", QUEUE]
  process = subprocess.Popen(command, cwd=tmp_path, env=env, **pipes)
  until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text()[-1:])
  number, *place = map(int, (tmp_path / "log").read_text().split())
  training = psutil.Process(number)
  if stopped:
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "stopped\n"
  process.kill()
  process.communicate()
  until(lambda: not training.is_running() or training.status() == "zombie")
  assert place == [19, 1]


def test_a_second_queue_does_not_start(tmp_path, capsys, monkeypatch):
  """The tree of the first is that of the newest commit, whatever was changed there."""
  monkeypatch.setattr(sys, "argv", ["study/queue/start.py"])
  folders = supervisor.Folders(tmp_path / "records", tmp_path / "work")
  folders.work.mkdir()
  held = locks.take(folders.lock)
  queue_start.main(folders, tmp_path)
  os.close(held)
  out = capsys.readouterr().out
  assert out.startswith(f"the queue runs already: process {os.getpid()}, ")
  root, tree = tmp_path / "checkout", folders.work / "tree"
  person = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
  root.mkdir()
  for text in ("one", "two"):
    (root / "a").write_text(text)
    for command in (["init", "-q"], ["add", "a"], [*person, "commit", "-qm", text]):
      subprocess.run(["git", *command], check=True, cwd=root)
    (root / "a").write_text("not committed")
    queue_start.move(root, tree)
    assert (tree / "a").read_text() == text
    assert (tree / "datasets").readlink() == root / "datasets"
    (tree / "a").write_text("changed")
