"""Is one host of many: the program that each process of test_many_hosts.py runs.

  python -m tests.support.hosts.averaging TASK ADDRESS HOSTS HOST FOLDER

What it computes is in functions that run on emulated devices as well, for the tests to
compare with. Every host saves its own part of every array in the folder.
"""

import functools
import os
import pathlib
import signal
import sys
import time
import traceback

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import QSGD, Dense, FloatCast, Sign, Ternary
from tests.support import laws, modes
from tests.support.cases import steps
from tests.support.hosts.sharded import CUT, gradients, regrouped

# In seconds: no wait is endless, and none ends early where many processes share a core.
LIMITS = {
  "initialization_timeout": 60,
  "heartbeat_timeout_seconds": 20,
  "shutdown_timeout_seconds": 20,
}

# Codecs by names that end with an exchange; all cases keep residuals.
QSGD4 = QSGD(bits=4, bucket_size=32)
CASES = {
  **{f"qsgd4-{x}": QSGD4 for x in ("all_gather", "two_shot", "ring", "hierarchical")},
  "qsgd4-shared-psum": QSGD(bits=4, bucket_size=32, share_scale=True),
  "nonuniform-two_shot": QSGD(bits=3, bucket_size=32, levels="nonuniform"),
  "votes-two_shot": Sign(scale="one", vote="majority"),
  "terngrad-psum": Ternary(),
  "aps-ring": FloatCast(accumulate="kahan"),
  "float32-psum": Dense(),
}
# One of each kind of sum, beside those of the training.
FEW = ("terngrad-psum", "aps-ring", "float32-psum")
# Cases whose sum the transport computes, in an order of its own: around a ring of hosts
# by gloo, from the first to the last on emulated devices. Floats round differently.
TRANSPORT_ADDS = {"float32-psum"}

STEPS = 6
FAULT_STEP = 3
FAILED = 3  # the exit code after an exception, which is not Python's own 1


def exchange(name, hosts, between=lambda state: state):
  """Outputs and the state of two steps of a case; it passes ``between`` them."""
  mesh = modes.mesh(hosts)
  transformation = laws.compressed(CASES[name], name.split("-")[-1], "error")
  given = [gradients(hosts, step) for step in range(2)]
  params = jax.tree.map(lambda leaf: leaf[0], given[0])
  state = modes.placed(transformation, params, mesh)[1]
  update = modes.on_mesh(transformation, mesh, state)
  outputs = []
  for gradient in given:
    output, state = update(gradient, between(state) if outputs else state)
    outputs.append(output)
  return outputs, state


class Training:
  """A training: its parameters and state, and the steps behind it."""

  def __init__(self, hosts):
    self.mesh = modes.mesh(hosts)
    tx = gradcomp.qsgd(bits=4, exchange="two_shot", feedback="error", **steps.OVER)
    optimizer = optax.chain(tx, optax.adam(1e-2))
    self.state = steps.begun(optimizer, self.mesh)
    # Without donation: a step that fails leaves what it was given.
    self._step = gradcomp.make_train_step(
      steps.loss_fn, optimizer, mesh=self.mesh, donate=False, **steps.OVER
    )
    self.step = 0

  def advance(self):
    cut = NamedSharding(self.mesh, P("data"))

    def read(targets):
      """A batch, of which this process provides its own part."""
      own = np.split(targets, jax.process_count())[jax.process_index()]
      return jax.make_array_from_process_local_data(cut, own)

    batch = jax.tree.map(read, steps.normal(1000 + self.step, self.mesh.size))
    *state, metrics = self._step(*self.state, batch)
    # JAX runs ahead of the devices: the errors of this step must be raised here.
    self.state = jax.block_until_ready(tuple(state))
    if jax.process_index() == 0:  # alone, as a process that logs does
      assert gradcomp.telemetry.scalars(metrics)["loss"] > 0
    self.step += 1

  def restore(self, saved):
    """Takes up a state of which ``saved`` are this host's parts."""
    saved = jax.tree.unflatten(jax.tree.structure(self.state), saved)
    specs = gradcomp.state_specs(self.state, axis_name="data")

    def place(like, part, spec):
      sharding = NamedSharding(self.mesh, spec)
      return jax.make_array_from_process_local_data(sharding, part, like.shape)

    self.state = jax.tree.map(place, self.state, saved, specs)


def parts(tree, device=0):
  """What one of the process's devices holds of every array."""
  return [np.asarray(leaf.addressable_data(device)) for leaf in jax.tree.leaves(tree)]


def saved_at(folder, step, host):
  return folder / f"step-{step}.{host}.npz"


def save(path, tree):
  np.savez(path, *parts(tree))


def load(path):
  with np.load(path) as arrays:
    return list(arrays.values())


def compared(cases):
  """The names of ``"few"`` cases, or of ``"all"``."""
  return CASES if cases == "all" else FEW


def compare(task, cases, hosts, host, folder):
  """Saves what cases give; with a state that all hosts saved together by Orbax, too."""
  from tests.support.saved import through_orbax

  for name in compared(cases):
    between = functools.partial(through_orbax, folder=folder / f"{name}.saved")
    options = {"between": between} if task == "saved" else {}
    save(folder / f"{name}.{host}.npz", exchange(name, hosts, **options))
  if task == "saved":
    return
  for name, function in CUT.items():
    save(folder / f"{name}.{host}.npz", function(hosts))
  sizes = (1 << 10, 1 << 14)
  link = gradcomp.cost.Link.measure(modes.mesh(hosts), sizes=sizes, repeats=1)
  link.save(folder / f"link.{host}.json")
  if hosts == 2:
    train(hosts, host, folder)


def train(hosts, host, folder, fault=None):
  """Goes on after the last step that all have saved; meets the fault on its way."""
  training = Training(hosts)
  saved = lambda step: all(saved_at(folder, step, i).exists() for i in range(hosts))
  if step := max(filter(saved, range(1, STEPS)), default=0):
    training.restore(load(saved_at(folder, step, host)))
    training.step = step
  try:
    while training.step < STEPS:
      if fault and training.step == FAULT_STEP:
        time.sleep(1)  # the others wait in the exchange by now
        fault()
      training.advance()
      save(saved_at(folder, training.step, host), training.state)
  except Exception:
    save(folder / f"left.{host}.npz", training.state)
    raise


FAULTS = {
  "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
  "stall": lambda: time.sleep(3600),
}


def run(task, which, hosts, host, folder):
  if task in ("compare", "saved"):
    compare(task, which, hosts, host, folder)
  elif task == "move":
    save(folder / f"moved.{host}.npz", regrouped(hosts))
  elif task == "differ":
    from tests.support.hosts.differ import differ

    differ(host, folder)
  else:
    train(hosts, host, folder, FAULTS[task] if which == str(host) else None)


def main(task, address, hosts, host, folder):
  """Runs tasks, joined by "+": "compare-few", or what host 1 spoils: "kill-1"."""
  hosts, host, folder = int(hosts), int(host), pathlib.Path(folder)
  if task == "move":
    jax.config.update("jax_num_cpu_devices", 2)
  jax.distributed.initialize(address, hosts, host, **LIMITS)
  try:
    for each in task.split("+"):
      run(*each.partition("-")[::2], hosts, host, folder)
  except Exception:
    traceback.print_exc()
    sys.stderr.flush()
    # At once, for Python's own way out waits for all hosts, dead ones too. But without
    # the coordinator the others are aborted: let them report first.
    time.sleep(2 if host == 0 else 0)
    os._exit(FAILED)


if __name__ == "__main__":
  main(*sys.argv[1:])
