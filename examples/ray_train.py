"""Trains on the nodes of a Ray cluster that are there: some may die, others may come.

    pip install . --group ray
    python -m examples.ray_train --nodes 4 --kill-after 10 --add-after 10
    python -m examples.ray_train --address HOST:6379 --folder /shared/run --nodes 16

Without an address the nodes are processes of this machine, and one of them dies and
comes again. Ray starts a worker on each node, and a new group of workers when nodes
have gone or come. A group goes on from the last checkpoint, with the residuals of all
workers that wrote it. Orbax writes checkpoints, each worker its own shards, in a folder
that all nodes share.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import gradcomp
from examples.lib import elastic
from gradcomp import codecs, local, telemetry

BATCH = 120  # of all workers together: one learning rate for any number of them
both = ocp.args.Composite


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
  options = {"codec": codecs.BlockTop(), "merge": "senders", "axis_name": "data"}
  options["feedback"] = gradcomp.ErrorFeedback(residual_decay=0.95)
  return local.local_steps(inner, outer, every=local_steps, **options)


class Training:
  """Trains from the last checkpoint of a folder, which all workers share.

  Each process writes its own shards. ``save_every`` is a multiple of ``local_steps``,
  for workers differ in the midst of a round.
  """

  def __init__(
    self, mesh: jax.sharding.Mesh, folder: Path, save_every: int, local_steps=0
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
    self.state = gradcomp.checkpoint.put_on_mesh(state, mesh, specs)

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
    like = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (first_params(), shapes))
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


def train(config: dict[str, Any]) -> None:
  """Trains as one worker of a group; Ray calls it in each of them."""
  with elastic.joined(config) as note:
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    saved = Path(config["folder"]) / "checkpoints", config["save_every"]
    training = Training(mesh, *saved, config["local_steps"])
    note("restored", step=training.step)
    for loss in training.losses(config["steps"]):
      if jax.process_index() == 0:
        note("step", step=training.step, loss=loss, workers=mesh.size)
        print(f"step {training.step}: loss {loss:.4f}, {mesh.size} workers")
      time.sleep(config["pause"])
    telemetry.compare_replicas(training.state[0], axis_name="data").require_equal()


def main(arguments: Sequence[str] | None = None) -> None:
  options = elastic.parse(__doc__.splitlines()[0], arguments)
  elastic.run(train, options)
  print("\n".join(elastic.told(elastic.read(options.folder))))


if __name__ == "__main__":
  main()
