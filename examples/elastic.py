"""Trains on the hosts that are there: some may die, and some may come again.

Start it once on every host, with one folder that all share. HOST is the host's number,
and ADDRESS is where the others reach it; on one machine, leave it out.

  python -m examples.elastic FOLDER HOST --hosts 4 --address ADDRESS

This is the supervisor, which knows nothing of JAX: a process that computes is ended by
JAX when another one dies. It starts elastic/worker.py, and again for each generation: a
fixed list of hosts, which lasts until one of them fails or another one wants to join.
Supervisors need no server. They know each other by files in the folder.

  host-HOST.json          the host lives, while this file keeps changing
  plan-GENERATION.json    who trains, and what they go on from; written once
  over-GENERATION         its workers must leave at once, and save what they have
  stop-GENERATION         they must leave at the next checkpoint, for somebody joins
  left-GENERATION-HOST    this worker has saved what it had
  parts-GENERATION-STEP-HOST.npz   what this worker had after that step
  record-GENERATION.json  what these parts belong to; done.json: the end
"""

import argparse
import dataclasses
import json
import pathlib
import socket
import subprocess
import sys
import time

from examples.lib.elastic.options import supervising
from examples.lib.shared_folder import parsed, publish, read

WORKER = ("-m", "examples.lib.elastic.worker")
TICK = 0.1  # seconds between two looks at the folder
SAVING = 60.0  # seconds for a worker to save what it has, before it is ended
ATTEMPTS = 5  # generations that may come no further, before all give up
# Parts of one step of which no more are missing are better than an older checkpoint:
# each is what one worker had not sent yet, and steps are time.
LOST = 1


@dataclasses.dataclass(frozen=True)
class Plan:
  """The hosts of a generation, and the parts that they go on from.

  Attributes:
    generation: counts from 0.
    hosts: in the order of JAX's processes. The first is the coordinator. Who was in the
      generation before comes first, in the old order.
    address: of the coordinator, with a port of this generation alone.
    source: generation and step of the parts to go on from; None for a new training.
    lost: hosts whose part is missing there.
    checkpoint: generation and step of the last parts of which none is missing, or None.
  """

  generation: int
  hosts: list[int]
  address: str
  source: list[int] | None
  lost: list[int]
  checkpoint: list[int] | None

  @property
  def step(self) -> int:
    return self.source[1] if self.source else 0


def plan_of(folder: pathlib.Path, generation: int) -> Plan:
  path = folder / f"plan-{generation}.json"
  try:
    return Plan(**read(path))
  except TypeError as error:
    raise SystemExit(f"{path} must be a plan: {error}; remove the folder.") from error


def newest_plan(folder: pathlib.Path) -> Plan | None:
  numbers = [int(path.stem.split("-")[1]) for path in folder.glob("plan-*.json")]
  return plan_of(folder, max(numbers)) if numbers else None


def parts_path(
  folder: pathlib.Path, generation: int, step: int, host: int
) -> pathlib.Path:
  return folder / f"parts-{generation}-{step}-{host}.npz"


def all_parts(folder: pathlib.Path) -> dict[tuple[int, int], set[int]]:
  """Returns the hosts that left parts, by generation and step."""
  found: dict[tuple[int, int], set[int]] = {}
  for path in folder.glob("parts-*.npz"):
    generation, step, host = map(int, path.stem.split("-")[1:])
    found.setdefault((generation, step), set()).add(host)
  return found


def next_plan(
  folder: pathlib.Path, last: Plan | None, hosts: list[int], address: str
) -> Plan:
  """Returns a plan for these hosts, from the best parts that there are."""
  source, lost, checkpoint = None, [], None
  for (generation, step), there in sorted(all_parts(folder).items(), reverse=True):
    missing = [x for x in plan_of(folder, generation).hosts if x not in there]
    if source is None and len(missing) <= LOST:
      source, lost = [generation, step], missing
    if not missing:
      checkpoint = [generation, step]
      break
  generation = last.generation + 1 if last else 0
  return Plan(generation, hosts, address, source, lost, checkpoint)


class Pulse:
  """Shows that this host lives, and watches the others.

  Nobody compares clocks of different hosts: a host lives while its file changes.

  Args:
    folder: where the files are.
    host: the number of this host.
    address: where others reach it.
    patience: seconds without a change after which a host is taken for dead.
  """

  def __init__(self, folder: pathlib.Path, host: int, address: str, patience: float):
    self._path = folder / f"host-{host}.json"
    self._address, self._patience = address, patience
    self._began = time.monotonic()
    self._seen: dict[str, tuple[bytes, float]] = {}

  @property
  def settled(self) -> bool:
    """True once every host that lives must have been seen."""
    return time.monotonic() > self._began + self._patience

  def beat(self, left: int) -> dict[int, tuple[int, str]]:
    """Returns the hosts that live: the last generation that each left, and address.

    Args:
      left: the last generation that this host is no longer in.
    """
    temporary = self._path.with_suffix(".new")
    temporary.write_text(json.dumps([left, self._address, time.time()]))
    temporary.replace(self._path)
    now, live = time.monotonic(), {}
    for path in self._path.parent.glob("host-*.json"):
      text = path.read_bytes()
      before, since = self._seen.get(path.name, (b"", 0.0))
      if text != before:
        # A file that nobody has changed yet may be that of a host long dead.
        since = now if before else now - self._patience
        self._seen[path.name] = text, since
      if now - since < self._patience:
        host_left, address, _ = parsed(path, text)
        live[int(path.stem.split("-")[1])] = host_left, address
    return live


class Supervisor:
  """Runs the workers of one host, one after the other."""

  def __init__(self, options: argparse.Namespace, arguments: list[str]):
    self._folder, self._host = options.folder, options.host
    self._hosts, self._address = options.hosts, options.address
    self._arguments = arguments
    self._pulse = Pulse(self._folder, self._host, self._address, options.patience)
    self._worker: subprocess.Popen[bytes] | None = None
    plan = newest_plan(self._folder)
    # The worker that an earlier start of this host had in it is gone.
    self._generation = self._left = plan.generation if plan else -1
    self._over_since = 0.0
    self._waiting: list[int] | None = None  # for others, when it was last said
    if plan and self._host in plan.hosts:
      self._mark("over")

  def run(self) -> None:
    """Watches until the training is done."""
    try:
      while not self._done():
        self._look()
        time.sleep(TICK)
    finally:
      self._end_worker()

  def _done(self) -> bool:
    """Returns True to end; SystemExit if the training has failed."""
    path = self._folder / "done.json"
    if not path.exists():
      return False
    if error := read(path).get("error"):
      raise SystemExit(error)
    return self._worker is None or self._left == self._generation

  def _look(self) -> None:
    plan = newest_plan(self._folder)
    if plan and plan.generation > self._generation:
      self._begin(plan)
    self._notice_end()
    live = self._pulse.beat(self._left)
    members = plan.hosts if plan else []
    order = [x for x in members if x in live]
    order += sorted(live.keys() - set(members))
    first = order[:1] == [self._host]
    if plan is None:
      if first and len(live) >= self._hosts:
        self._plan(plan, order)
      elif order and order != self._waiting:
        wanted = f"{self._hosts} hosts to begin with; here are {order}"
        print(f"host {self._host} waits for {wanted}", flush=True)
        self._waiting = order
      return
    if not self._pulse.settled:
      return  # others may live whom this host has not seen yet
    if set(members) - live.keys():
      self._mark("over")
    if first and all(live[x][0] >= plan.generation for x in order if x in members):
      self._plan(plan, order)
    elif first and set(order) - set(members):
      self._mark("stop")

  def _notice_end(self) -> None:
    """Notices that the worker has ended, or has to be ended."""
    if self._worker is None or self._left == self._generation:
      return
    code = self._worker.poll()
    mark = self._folder / f"left-{self._generation}-{self._host}"
    if code is not None or mark.exists():
      self._left = self._generation
    elif (self._folder / f"over-{self._generation}").exists():
      self._over_since = self._over_since or time.monotonic()
      if time.monotonic() > self._over_since + SAVING:
        self._worker.kill()  # it hangs
    if code:
      self._say(f"the worker has ended with {code}")
      self._mark("over")

  def _plan(self, last: Plan | None, hosts: list[int]) -> None:
    address = f"{self._address}:{free_port()}"
    plan = next_plan(self._folder, last, hosts, address)
    before = range(max(plan.generation - ATTEMPTS, 0), plan.generation)
    steps = [plan_of(self._folder, x).step for x in before]
    if steps == [plan.step] * ATTEMPTS:
      error = f"{ATTEMPTS} generations came no further than step {plan.step}"
      publish(self._folder / "done.json", {"error": error})
    else:
      publish(self._folder / f"plan-{plan.generation}.json", dataclasses.asdict(plan))

  def _begin(self, plan: Plan) -> None:
    """Starts the worker of a new generation, or sits it out."""
    self._end_worker()
    self._generation, self._over_since = plan.generation, 0.0
    if self._host not in plan.hosts:
      self._left = plan.generation
      return
    command = [sys.executable, *WORKER, self._folder, plan.generation, self._host]
    self._worker = subprocess.Popen(
      [*map(str, command), *self._arguments], stdin=subprocess.DEVNULL
    )

  def _end_worker(self) -> None:
    if self._worker:
      self._worker.kill()  # JAX takes SIGTERM for a notice
      self._worker.wait()
      self._worker = None

  def _mark(self, what: str) -> None:
    path = self._folder / f"{what}-{self._generation}"
    if not path.exists():
      path.touch()

  def _say(self, text: str) -> None:
    print(f"host {self._host}, generation {self._generation}: {text}", flush=True)


def free_port() -> int:
  with socket.socket() as reserved:
    reserved.bind(("", 0))
    return reserved.getsockname()[1]


def main() -> None:
  options, arguments = supervising()
  options.folder = options.folder.absolute()
  options.folder.mkdir(parents=True, exist_ok=True)
  Supervisor(options, arguments).run()


if __name__ == "__main__":
  main()
