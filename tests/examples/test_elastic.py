"""A training goes on while hosts die and come again, and says what was lost."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from examples import elastic
from examples.lib.elastic import training as elastic_training
from examples.lib.elastic import worker as elastic_worker
from examples.lib.shared_folder import publish
from tests.support import loopback, modes
from tests.support.hosts import averaging

PROGRAM = f"-m {elastic.__name__}"
STEPS, SAVE_EVERY = 80, 10
# Seconds between steps: a killed process has not saved the step that others have.
PAUSE = 0.05
LIMIT = 120  # seconds for what takes no more than 10 on an idle machine


def write_plan(folder, generation, hosts):
  plan = elastic.Plan(generation, hosts, "", None, [], None)
  (folder / f"plan-{generation}.json").write_text(json.dumps(vars(plan)))
  return plan


@pytest.mark.parametrize(
  "parts, source, lost, checkpoint",
  [
    ({}, None, [], None),
    ({(0, 8): [0, 1, 2]}, [0, 8], [], [0, 8]),
    # One worker is dead, and the others have saved two steps each.
    (
      {(0, 8): [0, 1, 2], (0, 9): [0, 2], (0, 10): [0, 2]},
      [0, 10],
      [1],
      [0, 8],
    ),
    # One of the others was a step ahead.
    ({(0, 8): [0, 1, 2], (0, 9): [0, 2], (0, 10): [2]}, [0, 9], [1], [0, 8]),
    # Two are missing: what they had not sent is worth more than the steps.
    ({(0, 8): [0, 1, 2], (0, 9): [0]}, [0, 8], [], [0, 8]),
    # The generation that went on from step 8 is the later one.
    ({(0, 8): [0, 1, 2], (0, 11): [0, 1], (1, 9): [0, 1]}, [1, 9], [], [1, 9]),
    ({(0, 8): [0, 1]}, [0, 8], [2], None),
  ],
)
def test_a_plan_goes_on_from_the_best_parts(parts, source, lost, checkpoint, tmp_path):
  write_plan(tmp_path, 0, [0, 1, 2])
  last = write_plan(tmp_path, 1, [0, 1])
  for (generation, step), there in parts.items():
    for x in there:
      elastic.parts_path(tmp_path, generation, step, x).touch()
  plan = elastic.next_plan(tmp_path, last, [0, 1], "here")
  assert plan == elastic.Plan(2, [0, 1], "here", source, lost, checkpoint)


def test_the_first_plan_of_a_generation_is_the_only_one(tmp_path):
  for content in ("first", "second"):
    publish(tmp_path / "plan-0.json", content)
  (file,) = tmp_path.iterdir()
  assert json.loads(file.read_text()) == "first"


def test_a_host_lives_while_its_file_changes(tmp_path):
  """Whatever its clock says; a file of an earlier run is no sign of life."""
  patience = 0.5
  (tmp_path / "host-7.json").write_text(json.dumps([0, "there", time.time()]))
  mine, other = (elastic.Pulse(tmp_path, x, f"at {x}", patience) for x in (0, 1))
  for left in (3, 4):
    live = other.beat(left), mine.beat(-1)
  assert live[1] == {0: (-1, "at 0"), 1: (4, "at 1")} and not mine.settled
  deadline = time.monotonic() + 2 * patience
  while time.monotonic() < deadline:
    live = mine.beat(-1)
    time.sleep(patience / 10)
  assert live == {0: (-1, "at 0")} and mine.settled


def test_the_last_step_of_a_round_is_inspected():
  inspected = elastic_worker.inspected
  assert [x for x in range(1, 9) if inspected(x, 3, 1)] == [3, 6]
  assert [x for x in range(1, 13) if inspected(x, 3, 4)] == [4, 8, 12]
  assert [x for x in range(1, 25) if inspected(x, 10, 4)] == [12, 20]
  assert not any(inspected(x, 0, 4) for x in range(9))


def trained(workers, steps, *local_steps):
  training = elastic_training.Training(modes.mesh(workers), *local_steps)
  while training.step < steps:
    training.advance()
  return training


def test_survivors_keep_what_they_had_not_sent():
  """The share of a mean that each worker's residual has, and their owned rows."""
  hosts, stay = [0, 1, 2, 3], [0, 2, 3]
  four = trained(4, 3)
  parts = {x: averaging.parts(four.kept[-1][1], x) for x in stay}
  lost = averaging.parts(four.kept[-1][1], 1)
  three = elastic_training.Training(modes.mesh(3))
  three.resume(3, parts, hosts, [*stay, 1])
  assert three.step == 3
  kinds = three.kinds()
  assert set(kinds) == {"", "rows", "residual"}
  for i, kind in enumerate(kinds):
    before = [parts[x][i] for x in stay]
    after = [averaging.parts(three.kept[-1][1], x)[i] for x in range(3)]
    if kind == "rows":
      assert np.any(lost[i])
      # The same numbers, cut elsewhere; zeros are padding and the share of host 1.
      cells = [np.concatenate([x.ravel() for x in rows]) for rows in (before, after)]
      np.testing.assert_array_equal(*(np.sort(x[x != 0]) for x in cells))
    else:
      factor = np.float32(3 / 4 if kind else 1)
      np.testing.assert_array_equal(after, factor * np.array(before))
  three.advance()
  assert three.step == 4


@pytest.mark.parametrize("codec", elastic_training.CODECS)
def test_local_steps_go_on_from_the_last_exchange_with_fewer_workers(codec):
  """With what was not sent before it; a worker that comes again has another's state."""
  hosts, stay = [0, 1, 2, 3], [0, 2, 3]
  four = trained(4, 6, 4, codec)
  parts = {x: averaging.parts(four.kept[-1][1], x) for x in stay}
  three = elastic_training.Training(modes.mesh(3), 4, codec)
  three.resume(6, parts, hosts, [*stay, 1])
  assert three.step == 4
  params, state = three.kept[-1][1]
  before, old = four.kept[-1][1]
  for name in params:
    np.testing.assert_array_equal(params[name], before[name])
    assert np.any(old.own.moved[name]) and not np.any(state.own.moved[name])
    own, kept = (
      np.split(x.fragments[0].exchange.residual[name], n)
      for x, n in ((state, 3), (old, 4))
    )
    np.testing.assert_array_equal(own, np.float32(3 / 4) * np.array(kept)[stay])
  assert int(state.count) == 4
  leaves = jax.tree.leaves(old.fragments[0].exchange.residual)
  unsent = np.concatenate([np.split(np.array(x), 4)[0].ravel() for x in leaves])
  assert f"residual of norm {np.linalg.norm(unsent):.2g}" in four.unsent(parts[0])
  while three.step < 8:
    three.advance()
  again = elastic_training.Training(modes.mesh(4), 4, codec)
  parts = {x: averaging.parts(three.kept[-1][1], i) for i, x in enumerate(stay)}
  again.resume(8, parts, stay, stay)
  assert again.step == 8
  for _ in range(4):
    again.advance()
  assert loss(jax.device_get(again.params)) < loss(elastic_training.first_params())


def test_owners_rows_stay_with_their_elements():
  """Whoever is missing: the order of owners is that of those that were."""
  hosts = [0, 1, 2, 3]
  four = trained(4, 3)
  parts = {x: averaging.parts(four.kept[-1][1], x) for x in hosts}
  again = elastic_training.Training(modes.mesh(4))
  again.resume(3, parts, hosts, [2, 3, 1, 0])
  for i, kind in enumerate(again.kinds()):
    order = [2, 3, 1, 0] if kind == "residual" else hosts
    after = [averaging.parts(again.kept[-1][1], x)[i] for x in hosts]
    np.testing.assert_array_equal(after, [parts[x][i] for x in order])


class Hosts:
  """Supervisors of hosts on this machine, each with its workers."""

  def __init__(self, folder, more=""):
    self.folder = folder
    self.more = more
    self.running = {}

  def start(self, number):
    options = f"--hosts 4 --patience 3 --steps {STEPS} --save-every {SAVE_EVERY}"
    options += self.more or f" --inspect {STEPS}"  # the last step
    command = f"{PROGRAM} {self.folder / 'run'} {number} {options} --pause {PAUSE}"
    with open(self.folder / f"log.{number}", "a") as log:
      self.running[number] = subprocess.Popen(
        [sys.executable, "-W", "error", *command.split()],
        env=loopback.environment(collective_timeout=30),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )

  def kill(self, number):
    """Kills the supervisor and its worker at once, as if the power failed."""
    process = self.running.pop(number)
    with contextlib.suppress(ProcessLookupError):  # it may have ended
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()

  def said(self):
    logs = sorted(self.folder.glob("log.*"))
    return "".join(f"\n--- {log.name}\n{log.read_text()[-6000:]}" for log in logs)

  def wait_for(self, what, found):
    deadline = time.monotonic() + LIMIT
    while not found():
      if time.monotonic() > deadline:
        pytest.fail(f"{what}: not within {LIMIT} s{self.said()}")
      time.sleep(PAUSE / 2)

  def trained_in(self, generation):
    """Waits until a generation is a few steps behind a checkpoint."""
    pattern = f"run/parts-{generation}-*.npz"
    found = lambda: any(self.folder.glob(pattern))
    self.wait_for(f"a checkpoint of generation {generation}", found)
    time.sleep(6 * PAUSE)


@contextlib.contextmanager
def started(folder, more=""):
  hosts = Hosts(folder, more)
  try:
    yield hosts
  finally:
    for number in list(hosts.running):
      hosts.kill(number)


def loss(params):
  batch = elastic_training.read_batch(STEPS)
  return float(elastic_training.loss_fn(params, batch))


@pytest.mark.slow
@pytest.mark.skipif(
  not loopback.hostname_resolves(), reason="gloo needs an address of the hostname"
)
def test_a_training_outlives_its_hosts(tmp_path):
  """Four, three, four again with the one that was killed, three without the first."""
  with started(tmp_path) as hosts:
    for number in range(4):
      hosts.start(number)
    undisturbed = trained(4, STEPS)
    hosts.trained_in(0)
    hosts.kill(1)
    hosts.trained_in(1)
    hosts.start(1)
    hosts.trained_in(2)
    hosts.kill(0)
    done = tmp_path / "run" / "done.json"
    hosts.wait_for("the end", done.exists)
    codes = [process.wait(LIMIT) for process in hosts.running.values()]
    said = hosts.said()
  assert codes == [0, 0, 0], said
  plans = [elastic.plan_of(tmp_path / "run", generation) for generation in range(4)]
  members = [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3, 1], [2, 3, 1]]
  assert [plan.hosts for plan in plans] == members, said
  # The coordinator's end may abort the others before they save: then, no part is lost,
  # but steps since the checkpoint.
  lost = [plan.lost for plan in plans]
  assert lost[:3] == [[], [1], []] and lost[3] in ([0], []), said
  assert len({plan.address for plan in plans}) == 4
  for plan in plans[1:]:
    assert f"hosts {plan.hosts} go on after step {plan.source[1]}: from" in said
  assert re.search(
    r"lost: the part of host 1 \(residual of norm [\d.e-]+ and rows", said
  )
  assert "the parameters are equal on all 3 workers" in said
  assert re.search(r"step \d+:\nleaf +bytes sent", said)
  # Each has the same parameters, and they are as good as they would have been.
  last = [
    np.load(elastic.parts_path(tmp_path / "run", 3, STEPS, x)) for x in members[3]
  ]
  names = sorted(elastic_training.first_params())  # the order of leaves
  ends = [{name: part[f"arr_{i}"] for i, name in enumerate(names)} for part in last]
  for end in ends[1:]:
    for name in names:
      np.testing.assert_array_equal(end[name], ends[0][name])
  before = loss(elastic_training.first_params())
  # Trainings with other random bits differ by a standard deviation of 0.3 %.
  assert loss(ends[0]) < min(0.1 * before, 1.03 * loss(undisturbed.params)), said


@pytest.mark.slow
@pytest.mark.skipif(
  not loopback.hostname_resolves(), reason="gloo needs an address of the hostname"
)
def test_local_steps_outlive_a_host_that_comes_again(tmp_path):
  """It is killed in the midst of a round; the others do that round again without it."""
  with started(tmp_path, " --local-steps 5") as hosts:
    for number in range(4):
      hosts.start(number)
    hosts.trained_in(0)
    hosts.kill(1)
    hosts.trained_in(1)
    hosts.start(1)
    done = tmp_path / "run" / "done.json"
    hosts.wait_for("the end", done.exists)
    codes = [process.wait(LIMIT) for process in hosts.running.values()]
    said = hosts.said()
  assert codes == [0, 0, 0, 0], said
  plans = [elastic.plan_of(tmp_path / "run", generation) for generation in range(3)]
  assert [x.hosts for x in plans] == [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3, 1]], said
  assert plans[1].lost == [1]
  if again := plans[1].step % 5:
    assert f"{again} steps of a round, which are done again" in said
  assert f"hosts [0, 2, 3] go on after step {plans[1].step - again}: from" in said
  assert "the part of host 1" in said
  assert "the parameters are equal on all 4 workers" in said
  part = np.load(elastic.parts_path(tmp_path / "run", 2, STEPS, 0))
  names = sorted(elastic_training.first_params())  # the order of leaves
  end = {name: part[f"arr_{i}"] for i, name in enumerate(names)}
  # It has the steps of a training that nobody left, of batches in another division.
  undisturbed = loss(jax.device_get(trained(4, STEPS, 5).params))
  assert loss(end) < 1.1 * undisturbed, said
