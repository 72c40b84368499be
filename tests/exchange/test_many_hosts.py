"""Processes have the bits of emulated devices, and a fault ends all of them.

The processes run tests/support/hosts/averaging.py. Starting them is what costs: those
of a plain run start once, for both of its tests.
"""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests.support import loopback, pages
from tests.support.hosts import averaging, sharded

PROGRAM = ("-m", averaging.__name__)
PAGE = pages.ROOT / "docs" / "operate" / "many-hosts.md"

# Seconds for processes that meet no fault; far more than they need on a busy machine.
PATIENCE = 180

pytestmark = pytest.mark.skipif(
  not loopback.hostname_resolves(), reason="gloo needs an address of the hostname"
)


@contextlib.contextmanager
def started(hosts, program, *arguments, folder, collective_timeout=60):
  """A process a host: ``*program *arguments`` with its own ADDRESS, HOSTS and HOST.

  No process outlives the context. What they write is in ``folder / "log.HOST"``.
  """
  processes = []
  with socket.socket() as reserved:
    # Bound and never listening: nobody else gets the port, and gRPC does, because it
    # sets this option too.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{reserved.getsockname()[1]}"
    options = {"cwd": folder, "env": loopback.environment(collective_timeout)}
    options |= {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    try:
      for i in range(hosts):
        own = {"ADDRESS": address, "HOSTS": str(hosts), "HOST": str(i)}
        words = [own.get(word, str(word)) for word in (*program, *arguments)]
        command = [sys.executable, "-W", "error", *words]
        with open(folder / f"log.{i}", "w") as log:
          processes.append(subprocess.Popen(command, stdout=log, **options))
      yield processes
    finally:
      for process in processes:
        process.kill()  # SIGKILL: JAX takes SIGTERM for a notice and goes on
      for process in processes:
        process.wait()


def said(folder):
  """What the processes wrote, for the message of a failure."""
  logs = sorted(folder.glob("log.*"))
  return "".join(f"\n--- {log.name}\n{log.read_text()[-6000:]}" for log in logs)


def codes(processes, folder, seconds=PATIENCE):
  """Exit codes of processes that must end by then."""
  deadline = time.monotonic() + seconds
  try:
    return [p.wait(max(0, deadline - time.monotonic())) for p in processes]
  except subprocess.TimeoutExpired:
    pytest.fail(f"after {seconds} s a host still runs{said(folder)}")


def run_task(task, hosts, folder, **options):
  arguments = (task, "ADDRESS", "HOSTS", "HOST", folder)
  return started(hosts, PROGRAM, *arguments, folder=folder, **options)


def emulated_training(hosts):
  training = averaging.Training(hosts)
  while training.step < averaging.STEPS:
    training.advance()
  return training.state


def assert_hosts_agree(folder, name, tree, hosts, bound=0.0):
  """Each host's file holds what the emulated device of that number does.

  What is replicated is the same on all hosts to the bit, whatever the bound.
  """
  first = averaging.load(folder / f"{name}.0.npz")
  replicated = [leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)]
  for i in range(hosts):
    got = averaging.load(folder / f"{name}.{i}.npz")
    for part, expected in zip(got, averaging.parts(tree, i), strict=True):
      np.testing.assert_allclose(part, expected, rtol=0, atol=bound)
    for part, other, same in zip(got, first, replicated, strict=True):
      if same:
        np.testing.assert_array_equal(part, other)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  """Two processes that compute a few cases and trace other steps, and their folder."""
  folder = tmp_path_factory.mktemp("two")
  with run_task("compare-few+differ", 2, folder) as processes:
    yield processes, folder


def assert_bits_of_emulated_devices(processes, hosts, task, folder, subtests):
  task, cases = task.split("-")
  alone = task == "compare"  # with all else that hosts do, and a training
  expected = {x: averaging.exchange(x, hosts) for x in averaging.compared(cases)}
  expected |= {name: f(hosts) for name, f in averaging.CUT.items() if alone}
  if alone and hosts == 2:
    expected[f"step-{averaging.STEPS}"] = emulated_training(hosts)
  assert codes(processes, folder) == [0] * hosts, said(folder)
  # Two orders of addition: each rounds N - 1 sums below 5 N, which are divided by N.
  rounding = 2 * (hosts - 1) * 5 * 2.0**-24
  for name, tree in expected.items():
    bound = rounding if name in averaging.TRANSPORT_ADDS else 0.0
    with subtests.test(name):
      assert_hosts_agree(folder, name, tree, hosts, bound)
  if alone:  # plans that differed would not end
    links = {(folder / f"link.{i}.json").read_text() for i in range(hosts)}
    assert len(links) == 1


def test_hosts_hold_the_bits_of_emulated_devices(two, subtests):
  processes, folder = two
  assert_bits_of_emulated_devices(processes, 2, "compare-few", folder, subtests)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("task", ["compare-all", "saved-all"])
def test_hosts_hold_the_bits_in_all_cases(task, hosts, tmp_path, subtests):
  """Also where they go on from what they saved together."""
  with run_task(task, hosts, tmp_path) as processes:
    assert_bits_of_emulated_devices(processes, hosts, task, tmp_path, subtests)


@pytest.mark.slow
def test_live_states_go_on_with_another_number_of_workers(tmp_path):
  """With two a host, and then one a host, to the bits of emulated devices."""
  with run_task("move", 2, tmp_path) as processes:
    expected = sharded.regrouped(2)
    assert codes(processes, tmp_path) == [0, 0], said(tmp_path)
  assert_hosts_agree(tmp_path, "moved", expected, 2)


def seconds_to_fail(folder, survivor):
  """From a survivor's last good step to its error."""
  left = folder / f"left.{survivor}.npz"
  last = averaging.saved_at(folder, averaging.FAULT_STEP, survivor)
  return left.stat().st_mtime - last.stat().st_mtime


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 3])
def test_a_killed_host_ends_all_and_nothing_is_lost(hosts, tmp_path):
  limit = 30
  with run_task("kill-1", hosts, tmp_path, collective_timeout=limit) as processes:
    assert codes(processes[1:2], tmp_path) == [-signal.SIGKILL], said(tmp_path)
    # The connections are closed, which is seen at once; nobody waits for the limit.
    first, *last = codes(processes[0::2], tmp_path, seconds=limit)
  # Host 2 raises the same error, unless the coordinator has gone before.
  assert first == averaging.FAILED, said(tmp_path)
  assert set(last) <= {averaging.FAILED, -signal.SIGABRT}, said(tmp_path)
  assert "Gloo" in (tmp_path / "log.0").read_text()
  assert seconds_to_fail(tmp_path, 0) < limit
  # The failed step has changed nothing, ...
  saved = averaging.saved_at(tmp_path, averaging.FAULT_STEP, 0)
  left = averaging.load(tmp_path / "left.0.npz")
  for part, expected in zip(left, averaging.load(saved), strict=True):
    np.testing.assert_array_equal(part, expected)
  # ... and a new start goes on from there and ends where an undisturbed one does.
  written = saved.stat().st_mtime_ns
  with run_task("train", hosts, tmp_path) as processes:
    trained = emulated_training(hosts)
    assert codes(processes, tmp_path) == [0] * hosts, said(tmp_path)
  assert saved.stat().st_mtime_ns == written
  assert_hosts_agree(tmp_path, f"step-{averaging.STEPS}", trained, hosts)


def test_hosts_that_trace_other_steps_are_told_so(two, subtests):
  """Both of them, and before either of them waits; core/test_agreement.py has more."""
  processes, folder = two
  assert codes(processes, folder) == [0, 0], said(folder)
  files = (folder / f"told.{i}.json" for i in range(2))
  first, second = (json.loads(file.read_text()) for file in files)
  same = "must be the same in all processes"
  values = {
    "order": ("leaves[0]", "['a'] float32[64]", "['b'] float32[64]"),
    "exchange": ("exchange", "TwoShot(feedback=True, in_turn=False)", "Ring()"),
  }
  for case, (name, *got) in values.items():
    with subtests.test(case):
      texts = [f"{value} in process {i}" for i, value in enumerate(got)]
      assert first[case].startswith(f"`{name}` {same}"), first
      assert " and ".join(texts) in first[case]
      assert " and ".join(reversed(texts)) in second[case]
  with subtests.test("failed"):
    assert "process 1 failed: ZeroDivisionError: of this process" in first["failed"]
    assert second["failed"] == "of this process alone"
  with subtests.test("kinds"):
    # Both know the devices of both, whose table says which kernels serve.
    assert first["kinds"] == second["kinds"]
    assert {process for process, _ in first["kinds"]} == {0, 1}
  with subtests.test("checked"):
    for told in (first["checked"], second["checked"]):
      assert "On cpu of process 1, the kernel " in told and ".encode_rows(" in told
      assert "gives other bits than the reference" in told
  with subtests.test("others"):
    assert first["same"] is second["same"] is second["silent"] is None
    assert "got nothing from process 1 in 1 s" in first["silent"]


@pytest.mark.slow
def test_a_killed_coordinator_ends_all(tmp_path):
  limit = 30
  with run_task("kill-0", 2, tmp_path, collective_timeout=limit) as processes:
    assert codes(processes[:1], tmp_path) == [-signal.SIGKILL], said(tmp_path)
    # gloo and the coordination service both notice; one of them is first.
    (other,) = codes(processes[1:], tmp_path, seconds=limit)
  assert other in (averaging.FAILED, -signal.SIGABRT), said(tmp_path)


@pytest.mark.slow
def test_a_stalled_host_is_an_error_after_the_configured_time(tmp_path):
  """It lives and sends heartbeats, so only the collective's own limit can end this."""
  limit = 10
  with run_task("stall-1", 2, tmp_path, collective_timeout=limit) as processes:
    assert codes(processes[:1], tmp_path) == [averaging.FAILED], said(tmp_path)
    # Asleep, it is aborted as soon as the coordinator is gone.
    assert codes(processes[1:], tmp_path, limit) == [-signal.SIGABRT], said(tmp_path)
  assert "Timed out waiting" in (tmp_path / "log.0").read_text()
  assert limit - 1 < seconds_to_fail(tmp_path, 0) < 2 * limit


@pytest.mark.slow
def test_the_script_of_the_page_trains_and_resumes(tmp_path):
  """A second start goes on from what the first has saved, to the same bits."""
  blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
  (script,) = [block for block in blocks if block.startswith('"""')]
  (tmp_path / "train.py").write_text(script)
  arguments = ("ADDRESS", "HOSTS", "HOST", "checkpoints")
  endings = []
  for start in (0, 30):
    with started(2, ["train.py"], *arguments, folder=tmp_path) as processes:
      assert codes(processes, tmp_path) == [0, 0], said(tmp_path)
    logs = [(tmp_path / f"log.{i}").read_text() for i in range(2)]
    assert all((f"after step {start}" in log) == (start > 0) for log in logs)
    endings += [re.search(r"step 40: loss (.*)", log)[1] for log in logs]
    shutil.rmtree(tmp_path / "checkpoints" / "40")  # what is left is of step 30
  assert len(set(endings)) == 1 and float(endings[0]) < 0.8
