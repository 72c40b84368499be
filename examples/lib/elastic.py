"""A small net that trains on as many workers as there are, and a diary of them.

Processes write what happens into files of a folder that all share.
"""

import argparse
import json
import os
import pathlib
import socket
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import gradcomp
from examples.lib.parsing import at_least_0, natural, positive
from gradcomp.codecs import BlockTop

BATCH = 120  # of all workers together: one learning rate for any number of them
both = ocp.args.Composite
# What happens between a change of the nodes and the next step, in this order.
STAGES = {
  "failed": "the first worker fails in an exchange",
  "step": "the last step of the old group",
  "started": "the last worker of a new group has started",
  "connected": "JAX has connected them",
  "restored": "all have their state",
  "next": "step {step}, by {workers} workers",
}
Entry = dict[str, Any]


def first_params() -> dict[str, np.ndarray]:
  normal = np.random.default_rng(0).standard_normal
  w, v = normal((16, 256), np.float32) / 4, normal((256, 32), np.float32) / 16
  return {"w": w, "b": np.zeros(256, np.float32), "v": v}


def loss_fn(params: Any, batch: Any) -> jax.Array:
  hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
  return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def read_batch(step: int) -> dict[str, np.ndarray]:
  """Returns the batch of all workers, with the outputs of a net to be learned."""
  x = np.random.default_rng([0, step]).standard_normal((BATCH, 16), np.float32)
  net = np.random.default_rng(1).standard_normal((16, 32), np.float32) / 4
  return {"x": x, "y": np.tanh(x @ net)}


def make_optimizer(local_steps: int = 0) -> optax.GradientTransformation:
  """Returns Adam with 4 bits, or SparseLoCo in rounds of so many local steps."""
  if not local_steps:
    options: Any = {"axis_name": "data", "exchange": "two_shot", "feedback": "error"}
    return optax.chain(gradcomp.qsgd(bits=4, **options), optax.adam(1e-2))
  inner, outer = optax.adam(3e-3), optax.sgd(1.0)  # momentum would need more rounds
  options = {"codec": BlockTop(), "merge": "senders", "axis_name": "data"}
  options["feedback"] = gradcomp.ErrorFeedback(residual_decay=0.95)
  return gradcomp.local.local_steps(inner, outer, every=local_steps, **options)


class Training:
  """Trains from the last checkpoint of a folder, which all workers share.

  Each process writes its own shards. ``save_every`` is a multiple of ``local_steps``,
  for workers differ in the midst of a round.
  """

  def __init__(
    self, mesh: jax.sharding.Mesh, folder: pathlib.Path, save_every: int, local_steps=0
  ):
    self._save_every = save_every
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    self._checkpoints = ocp.CheckpointManager(folder, options=options)
    self._mesh, self._optimizer = mesh, make_optimizer(local_steps)
    self._record = self._record_of(mesh.size)
    over: Any = {"axis_name": "data", "mesh": mesh}
    self._train_step = gradcomp.make_train_step(loss_fn, self._optimizer, **over)
    self.step = self._checkpoints.latest_step() or 0  # that has been taken
    if self.step:
      state = self._restored()
    else:
      with jax.set_mesh(mesh):
        state = first_params(), self._optimizer.init(first_params())
    specs = gradcomp.state_specs(state, axis_name="data")
    self.state = gradcomp.checkpoint.put_on_mesh(
      state, mesh, specs
    )  # and the parameters

  def _record_of(self, workers: int, platform: str | None = None) -> dict[str, Any]:
    options: Any = {"workers": workers, "platform": platform}
    return gradcomp.checkpoint.make_record(self._optimizer, first_params(), **options)

  def _restored(self) -> tuple[Any, Any]:
    """Returns the state of the last checkpoint, for the workers that there are now."""
    read = lambda **args: self._checkpoints.restore(self.step, args=both(**args))
    saved = read(record=ocp.args.JsonRestore()).record
    (before,), platform = saved["workers"], saved["platform"]
    gradcomp.checkpoint.check_record(saved, self._record_of(before, platform))
    given: Any = {"axis_name": "data", "workers": before, "platform": platform}
    shapes = gradcomp.checkpoint.state_shapes(self._optimizer, first_params(), **given)
    zeros = lambda x: np.zeros(x.shape, x.dtype)
    like = jax.tree.map(zeros, (first_params(), shapes))
    params, opt_state = read(state=ocp.args.StandardRestore(like)).state
    # The mean is kept, for the batch and the learning rate stay.
    given = {"axis_name": "data", "workers": self._mesh.size, "keep": "mean"}
    given |= {"old_workers": before, "old_platform": platform}
    return params, gradcomp.reshard_state(self._optimizer, params, opt_state, **given)

  def losses(self, steps: int) -> Iterator[float]:
    """Trains until so many steps have been taken; yields the loss of each."""
    cut = jax.NamedSharding(self._mesh, jax.P("data"))
    rows = BATCH // self._mesh.size * jax.local_device_count()
    own = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    while self.step < steps:
      batch = {name: x[own] for name, x in read_batch(self.step).items()}
      batch = jax.make_array_from_process_local_data(cut, batch)
      *state, metrics = self._train_step(*self.state, batch)
      self.state, self.step = tuple(state), self.step + 1
      loss = metrics["loss"]  # with local steps, each worker's own
      loss = float(np.mean([part.data for part in loss.addressable_shards]))
      if self.step % self._save_every == 0:
        saved = ocp.args.StandardSave(self.state)
        record = ocp.args.JsonSave(self._record)
        self._checkpoints.save(self.step, args=both(state=saved, record=record))
      yield loss
    self._checkpoints.close()


def note(folder: pathlib.Path, what: str, **more: Any) -> None:
  """Writes down what this process does now, in a file of its own."""
  path = folder / f"diary-{socket.gethostname()}-{os.getpid()}.jsonl"
  with open(path, "a") as file:
    print(json.dumps({"time": time.time(), "what": what, **more}), file=file)


def read(folder: pathlib.Path) -> list[Entry]:
  """Returns the entries of all processes in the order of time, by their own clocks."""
  lines = (x for path in folder.glob("diary-*") for x in path.read_text().splitlines())
  return sorted(map(json.loads, lines), key=lambda entry: entry["time"])


def began(folder: pathlib.Path, workers: int) -> float | None:
  """Returns when so many workers took their first step; None if they have not."""
  steps = (entry for entry in read(folder) if entry["what"] == "step")
  return next((entry["time"] for entry in steps if entry["workers"] == workers), None)


def told(entries: list[Entry]) -> Iterator[str]:
  """Yields lines on each change of the nodes: its stages, and the seconds until then.

  A change is an entry with ``node`` in it. The next step is one by another number of
  workers. Of each kind of entries it is the last one, but of failures the first.
  """
  for i, change in enumerate(entries):
    if "node" not in change["what"]:
      continue
    before = [entry for entry in entries[:i] if entry["what"] == "step"][-1]
    found = {}
    for entry in entries[i + 1 :]:
      if entry["what"] == "step" and entry["workers"] != before["workers"]:
        found["next"] = entry
        break
      if entry["what"] != "failed" or "failed" not in found:
        found[entry["what"]] = entry
    yield f"{change['what']} after step {before['step']}"
    for stage, words in STAGES.items():
      if entry := found.get(stage):
        yield f"{entry['time'] - change['time']:7.1f} s  {words.format(**entry)}"


def parse(title: str, arguments: Sequence[str] | None) -> Namespace:
  """Reads the options, and makes the folder."""
  form = argparse.ArgumentDefaultsHelpFormatter
  parser = ArgumentParser(description=title, formatter_class=form)
  add = parser.add_argument
  add("--address", help="of a cluster that runs; by default nodes are emulated here")
  add("--folder", type=pathlib.Path, help="that all nodes share; needed by --address")
  add("--nodes", type=positive, default=4, help="at most, a worker each")
  add("--least", type=positive, default=2, help="workers to train with")
  add("--kill-after", type=at_least_0, help="seconds of training; then a node dies")
  add("--add-after", type=at_least_0, help="seconds of training without it")
  add("--failures", type=natural, default=5, help="after which Ray gives up")
  add("--steps", type=positive, default=400, help="of the whole training")
  add("--save-every", type=positive, default=10, help="steps between two checkpoints")
  add("--local-steps", type=natural, default=0, help="of a round; 0: 4 bits each step")
  add("--pause", type=at_least_0, default=0.1, help="seconds after each step")
  options = parser.parse_args(arguments)
  changes = options.kill_after is not None or options.add_after is not None
  if options.address and (changes or not options.folder):
    parser.error("--address needs --folder, and kills and adds no nodes")
  if options.add_after is not None and options.kill_after is None:
    parser.error("--add-after needs --kill-after, for all nodes are there before")
  if options.least > options.nodes - (options.kill_after is not None):
    parser.error("--least must be at most the --nodes that live, or all wait for more")
  if options.local_steps and options.save_every % options.local_steps:
    parser.error("--save-every must be a multiple of --local-steps, whole rounds")
  options.folder = (options.folder or pathlib.Path(tempfile.mkdtemp())).absolute()
  options.folder.mkdir(parents=True, exist_ok=True)
  return options
