"""A small net that trains on a mesh, and goes on with another number of workers."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import gradcomp
from gradcomp.codecs import BlockTop

BATCH = 120  # of all workers together: one learning rate for any number of them
State = tuple[Any, Any]  # parameters, and the state of the optimizer
both = ocp.args.Composite


def first_params() -> dict[str, np.ndarray]:
  normal = np.random.default_rng(0).standard_normal
  return {
    "w": normal((16, 256), np.float32) / 4,
    "b": np.zeros(256, np.float32),
    "v": normal((256, 32), np.float32) / 16,
  }


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
    return optax.chain(
      gradcomp.qsgd(bits=4, axis_name="data", exchange="two_shot", feedback="error"),
      optax.adam(1e-2),
    )
  feedback = gradcomp.ErrorFeedback(residual_decay=0.95)
  return gradcomp.local.local_steps(
    optax.adam(3e-3),
    optax.sgd(1.0),  # momentum would need more rounds than this training has
    axis_name="data",
    every=local_steps,
    codec=BlockTop(),
    feedback=feedback,
    merge="senders",
  )


class Training:
  """Trains from the last checkpoint of a folder, which all workers share.

  Args:
    mesh: one device a worker.
    folder: of checkpoints, in which each process writes its own shards.
    save_every: steps between two checkpoints; a multiple of the local steps, for
      workers differ in the midst of a round.
    local_steps: before each exchange; 0 for none.

  Attributes:
    step: the number of steps that have been taken.
    state: parameters and the state of the optimizer.
  """

  def __init__(
    self, mesh: jax.sharding.Mesh, folder: pathlib.Path, save_every: int, local_steps=0
  ):
    self._save_every = save_every
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    self._checkpoints = ocp.CheckpointManager(folder, options=options)
    self._mesh, self._optimizer = mesh, make_optimizer(local_steps)
    self._record = self._record_of(mesh.size)
    self._train_step = gradcomp.make_train_step(
      loss_fn, self._optimizer, axis_name="data", mesh=mesh
    )
    self.step = self._checkpoints.latest_step() or 0
    state = self._restored() if self.step else self._first()
    specs = gradcomp.state_specs(state, axis_name="data")
    self.state = gradcomp.checkpoint.place(state, mesh, specs)

  def _record_of(self, workers: int, platform: str | None = None) -> dict[str, Any]:
    options: Any = {"workers": workers, "platform": platform}
    return gradcomp.checkpoint.record(self._optimizer, first_params(), **options)

  def _first(self) -> State:
    with jax.set_mesh(self._mesh):
      return first_params(), self._optimizer.init(first_params())

  def _restored(self) -> State:
    """Returns the state of the last checkpoint, for the workers that there are now."""
    read = lambda **args: self._checkpoints.restore(self.step, args=both(**args))
    saved = read(record=ocp.args.JsonRestore()).record
    (before,), platform = saved["workers"], saved["platform"]
    gradcomp.checkpoint.check_record(saved, self._record_of(before, platform))
    params = first_params()
    shapes = gradcomp.checkpoint.state_shapes(
      self._optimizer, params, axis_name="data", workers=before, platform=platform
    )
    like = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (params, shapes))
    params, opt_state = read(state=ocp.args.StandardRestore(like)).state
    opt_state = gradcomp.reshard_state(
      self._optimizer,
      params,
      opt_state,
      axis_name="data",
      old_workers=before,
      old_platform=platform,
      workers=self._mesh.size,
      keep="mean",  # for the batch and the learning rate stay
    )
    return params, opt_state

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
