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
from benchmarks.study.items import Item
from benchmarks.study.queue import run as queue_run
from tests.benchmarks.study.records import SETTING
from tests.support.pages import ROOT


def item(codec, seed=0):
  return Item("lenets", SETTING._replace(codec=codec, seed=seed), 3600.0)


class Training:
  """In place of a process: its codec says how it goes."""

  def __init__(self, folder, item, core):
    self.item, self.core, self.did, self.folder = item, core, [], folder
    self.codec = item.setting.codec
    for part, name in (("states", item.digest), ("log", "")):
      (folder / "work" / part / name).mkdir(parents=True, exist_ok=True)
    log = folder / "work" / "log" / f"{item.digest}.txt"
    log.write_text(f"begins\nthere is a bug in {folder}/script.py\n")

  def poll(self):
    if self.codec == "good":
      path = self.folder / "records" / f"{self.item.launch}.jsonl"
      records.append(path, self.item.setting, {"points": []})
    ends = {"good": 0, "silent": 0, "failing": 1, "slow": -signal.SIGXCPU}
    return ends.get(self.codec)

  def send_signal(self, number):
    self.did.append(number.name)

  def __getattr__(self, name):  # what else is done to it
    return lambda: self.did.append(name)


@pytest.fixture
def queue(tmp_path, monkeypatch):
  started = []
  (tmp_path / "records").mkdir()

  def start(item, core):
    started.append(Training(tmp_path, item, core))
    return started[-1]

  monkeypatch.setattr(queue_run, "ENDING", 0.0)
  monkeypatch.setattr(quiet, "holder", lambda: None)

  def run(*items, cores=(0,)):
    folders = tmp_path / "records", tmp_path / "work"
    handlers = {x: signal.getsignal(x) for x in (signal.SIGTERM, signal.SIGINT)}
    try:
      return queue_run.Queue(items, *folders, start, cores, "a commit", poll=0.0).run()
    finally:
      for number, handler in handlers.items():
        signal.signal(number, handler)

  return run, tmp_path / "records", started


def test_each_training_without_a_record_runs_once_and_in_order(queue):
  """One that fails twice is left, and so is one that takes too much."""
  run, folder, started = queue
  path = folder / "other.jsonl"
  records.append(path, item("good", 1).setting, {"points": []})
  path.write_text(f"{path.read_text()}{path.read_text()[:40]}")
  codecs = "failing silent good slow".split()
  assert run(item("good", 1), *map(item, codecs), item("good")) == 0
  assert [x.codec for x in started] == "failing failing silent silent good slow".split()
  found = {x.setting.codec: x.results for x in records.read(folder)}
  assert "left" not in found.pop("good")
  last, bug = "failed 2 times; last it", "there is a bug in script.py"
  assert {codec: x["left"] for codec, x in found.items()} == {
    "failing": f"{last} ended with 1: {bug}",
    "silent": f"{last} ended with 0: {bug}",
    "slow": "took more than 18600 CPU s",
  }


def test_a_queue_whose_trainings_all_fail_ends(queue):
  """The machine is at fault then: few trainings are left, and not all."""
  run, folder, _ = queue
  assert run(*(item("failing", seed) for seed in range(9))) == 1
  assert len(records.read(folder)) == 2


def test_trainings_stop_for_a_quiet_machine_and_end_with_the_queue(queue, monkeypatch):
  run, _, started = queue

  def holders():
    yield from (None, "a benchmark", "a benchmark", None)
    os.kill(os.getpid(), signal.SIGTERM)
    yield None

  monkeypatch.setattr(quiet, "holder", holders().__next__)
  assert run(*(item("endless", seed) for seed in range(3)), cores=(0, 1)) == 143
  did = ["SIGSTOP", "SIGCONT", "SIGTERM", "SIGCONT", "kill", "wait"]
  assert [(x.core, x.did) for x in started] == [(0, did), (1, did)]


TRAINING = (
  "import os, resource as r; place = os.nice(0), len(os.sched_getaffinity(0)); "
  "print(os.getpid(), *place, *r.getrlimit(r.RLIMIT_CPU))"
)
QUEUE = f"""
import os, signal, sys
from pathlib import Path
from benchmarks.study.queue.run import start
line = [sys.executable, "-uc", "{TRAINING}\\nwhile True: pass"]
core = min(os.sched_getaffinity(0))
training = start(line, Path("log"), core, 60, dict(os.environ))
input()
training.send_signal(signal.SIGSTOP)
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
  log = tmp_path / "log"
  until(lambda: log.exists() and log.read_text().endswith("\n"))
  number, *place = map(int, log.read_text().split())
  training = psutil.Process(number)
  if stopped:
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "stopped\n"
  process.kill()
  process.communicate()
  until(lambda: not training.is_running() or training.status() == "zombie")
  # At the second limit of its CPU time the kernel kills it, if it is there by then.
  assert place == [19, 1, 60, 65]


def test_a_second_queue_does_not_start(tmp_path, capsys, monkeypatch):
  """The tree of the first is that of the newest commit, whatever was changed there."""
  monkeypatch.setattr(sys, "argv", ["study/queue/run.py"])
  work = tmp_path / "work"
  work.mkdir()
  held = locks.take(work / "queue.lock")
  queue_run.main(work)
  os.close(held)
  out = capsys.readouterr().out
  assert out.startswith(f"the queue runs already: process {os.getpid()}, ")
  root, tree = tmp_path / "checkout", work / "tree"
  person = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
  root.mkdir()
  for text in ("one", "two"):
    (root / "a").write_text(text)
    for command in (["init", "-q"], ["add", "a"], [*person, "commit", "-qm", text]):
      subprocess.run(["git", *command], check=True, cwd=root)
    (root / "a").write_text("not committed")
    queue_run.move(root, tree)
    assert (tree / "a").read_text() == text
    assert (tree / "datasets").readlink() == root / "datasets"
    (tree / "a").write_text("changed")
