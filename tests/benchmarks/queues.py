"""Runs queues of trainings that are small scripts without JAX."""

import json
import os
import subprocess
import sys
import time

import psutil

from tests.support.pages import ROOT

# Settings without optax, which takes seconds to import.
SETTINGS = f"""
import sys, types
from typing import NamedTuple

class Setting(NamedTuple):
  codec: str
  seed: int
  way: str

sys.path.insert(0, {str(ROOT)!r})
settings = types.ModuleType("benchmarks.study.settings")
sys.modules[settings.__name__] = settings
settings.Setting = Setting
"""

QUEUE = f"""{SETTINGS}
import json
from pathlib import Path
from benchmarks.study.queue import supervisor

class Item(NamedTuple):
  launch: str
  setting: Setting

  @property
  def digest(self):
    return f"{{self.setting.codec}}-{{self.setting.seed}}"

  title = digest

def command(item):
  files = folders.records / f"{{item.launch}}.jsonl", folders.state(item.digest)
  return [sys.executable, "training.py", *map(str, files), *map(str, item.setting)]

names, cores, limits = map(json.loads, sys.argv[1:])
items = [
  Item("one", Setting(name, seed, "timed" if name == "timed" else "emulated"))
  for seed, name in names
]
folders = supervisor.Folders(Path("records"), Path("work"))
limits = supervisor.Limits(poll=0.05, **limits)
sys.exit(supervisor.Queue(items, folders, command, cores, limits=limits).run())
"""

# Writes its process, and a number that grows while it runs. Its codec says how it ends.
TRAINING = """
import json, os, signal, sys, time
from pathlib import Path

records, state, codec, seed, way = sys.argv[1:]
state = Path(state)

def write(name, text):
  (state / "new").write_text(str(text))
  os.replace(state / "new", state / name)

def starts():
  path = state / "starts"
  path.write_text(str(int(path.read_text()) + 1 if path.exists() else 1))

def save(number, frame):
  write("saved", "")
  sys.exit()

starts()
signal.signal(signal.SIGTERM, signal.SIG_IGN if codec == "deaf" else save)
write("process", os.getpid())
write("nice", os.nice(0))
group = Path("/proc/self/autogroup")
write("autogroup", group.read_text() if group.exists() else "nice 19")
write("cores", len(os.sched_getaffinity(0)))
estimate = {"slow": 0.001, "good": 1.0}.get(codec)
beat = {"step": 1, "steps": 4, "cpu": 0.0, "estimate": estimate}
write("heartbeat.json", json.dumps(beat))
if codec == "failing":
  sys.exit(f"there is a bug in {os.getcwd()}/script.py")
if codec == "silent":
  sys.exit()
if codec == "good":
  line = {"run": {"codec": codec, "seed": int(seed), "way": way}, "points": []}
  with open(records, "a") as file:
    file.write(json.dumps(line) + "\\n")
  sys.exit()
if codec == "idle":
  time.sleep(60)
count = 0
while True:
  count += 1
  write("count", count)
  if codec != "busy" and codec != "slow":
    time.sleep(0.01)
"""


class Queue:
  """A queue in a folder.

  Args:
    folder: of all its files.
    names: pairs of seeds and codecs.
    jobs: trainings at once, all on one core.
    limits: those of ``supervisor.Limits``.
  """

  def __init__(self, folder, *names, jobs=1, **limits):
    self.folder = folder
    (folder / "training.py").write_text(TRAINING)
    self.records = folder / "records" / "one.jsonl"
    self.lock = folder / "quiet.lock"
    core = min(os.sched_getaffinity(0))
    given = [names, [core] * jobs, limits]
    self.process = subprocess.Popen(
      [sys.executable, "-c", QUEUE, *map(json.dumps, given)],
      cwd=folder,
      env=os.environ | {"GRADCOMP_QUIET_LOCK": str(self.lock)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def ended(self):
    """Its exit status and the first words of what it printed of each training."""
    out, _ = self.process.communicate(timeout=30)
    return self.process.returncode, [line[20:] for line in out.splitlines()]

  def state(self, name, digest="endless-0"):
    path = self.folder / "work" / "states" / digest / name
    until(path.exists)
    return path.read_text()

  def lines(self):
    return [json.loads(line) for line in self.records.read_text().splitlines()]


def until(condition):
  deadline = time.monotonic() + 30
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def gone(process):
  """Says whether a process has ended, also one that nobody has waited for."""
  try:
    return psutil.Process(int(process)).status() == psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return True
