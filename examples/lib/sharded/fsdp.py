"""Shards parameters over workers, which gather them in few bits each step (FSDP)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from examples.lib.sharded import cut_gradients
from examples.lib.training import AXIS, Batch, Task
from gradcomp import parallel
from gradcomp.codecs import Codec


class State(NamedTuple):
  """The state of a worker, but for its shard of the parameters."""

  inner: Any  # of the optimizer, for the part
  residuals: Any  # what is lost of gradients, like whole parameters; None for no such
  key: jax.Array  # the same on all workers, as the count is
  count: jax.Array  # steps done


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fsdp:
  """Takes steps with parameters that are sharded by their first axis.

  Before each step the workers send their parts of the parameters to each other, and
  after it their gradients, each part to the worker that owns it. The optimizer works
  only on a worker's part. Parameters of one axis, like scales, travel in float32.

  Args:
    loss_fn: the mean loss of whole parameters on a worker's samples.
    optimizer: one that treats each element by itself, like Adam.
    weights: the codec of parameters.
    grads: the codec of gradients.
    feedback: whether workers keep residuals of their gradients.
  """

  loss_fn: Callable[[Any, Batch], jax.Array]
  optimizer: optax.GradientTransformation
  weights: Codec
  grads: Codec
  feedback: bool

  def init(self, shards: Any, seed: int = 0) -> State:
    """Makes the state, inside the map."""
    residual = lambda w: (
      parallel.gather_residual(w, axis_name=AXIS) if self._kept(w) else None
    )
    return State(
      inner=self.optimizer.init(shards),
      residuals=jax.tree.map(residual, shards),
      key=jax.random.key_data(jax.random.key(seed)),
      count=jnp.int32(0),
    )

  def specs(self, params: Any) -> State:
    """Returns the specs of the state on a mesh: all but scalars is sharded."""
    inner = jax.eval_shape(self.optimizer.init, params)
    return State(
      inner=jax.tree.map(lambda x: P(AXIS) if x.ndim else P(), inner),
      residuals=P(AXIS),
      key=P(),
      count=P(),
    )

  @property
  def exchange(self) -> optax.GradientTransformation:
    """An exchange of whole gradients with the loss of the gathers' backward pass."""
    return cut_gradients.exchange_of(self.grads, feedback=self.feedback)

  def step(
    self, shards: Any, state: State, batch: Batch, *, inspect: bool = False
  ) -> tuple[Any, State, Any]:
    """Takes a step inside the map, and returns the mean loss of all workers, too.

    With ``inspect``, gradients of whole parameters are computed, too, and inspected.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.count)

    def loss_fn(shards: Any, residuals: Any) -> jax.Array:
      params = self.whole(shards, residuals, key)
      # Gradients of all workers are added up, so each has an Nth of the loss.
      return self.loss_fn(params, batch) / lax.axis_size(AXIS)

    loss, (grads, residuals) = jax.value_and_grad(loss_fn, (0, 1))(
      shards, state.residuals
    )
    metrics = {"loss": lax.psum(loss, AXIS)}
    if inspect:
      whole = self.whole(shards, state.residuals, key)
      grad = jax.grad(lambda w: self.loss_fn(w, batch) / lax.axis_size(AXIS))
      found = cut_gradients.inspect(self.exchange, grad(whole), state.residuals)
      metrics["inspection"] = found
    updates, inner = self.optimizer.update(grads, state.inner, shards)
    shards = optax.apply_updates(shards, updates)
    state = State(inner, residuals, state.key, state.count + 1)
    return shards, state, metrics

  def whole(self, shards: Any, residuals: Any, key: jax.Array) -> Any:
    """Gathers all parameters; a gradient of them goes to the owners of the parts."""
    leaves, tree = jax.tree.flatten(shards)
    gathered = []
    for i, (w, kept) in enumerate(
      zip(leaves, tree.flatten_up_to(residuals), strict=True)
    ):
      small = w.ndim < 2
      gathered.append(
        parallel.gather(
          w,
          axis_name=AXIS,
          params=None if small else self.weights,
          grads=None if small else self.grads,
          residual=kept,
          key=jax.random.fold_in(key, i),
        )
      )
    return tree.unflatten(gathered)

  def _kept(self, w: jax.Array) -> bool:
    return self.feedback and w.ndim > 1


def compile_step(
  task: Task, fsdp: Fsdp, batch: Batch, *, inspect: bool = False
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Compiles a train step; returns a function that makes its state, and the step.

  Args:
    task: one with ``spec=P(AXIS)``.
    fsdp: takes the steps.
    batch: an example.
    inspect: whether the step shows what compression does to each leaf.
  """
  params = task.init_params(0)
  for path, leaf in jax.tree.leaves_with_path(params):
    if leaf.shape[0] % task.mesh.size:
      raise ValueError(
        f"the first axis of {jax.tree_util.keystr(path)} must be a multiple of the "
        f"{task.mesh.size} workers, got {leaf.shape}; choose other sizes or workers."
      )
  state = fsdp.specs(params)
  cut = lambda f, inputs, outputs: jax.jit(
    jax.shard_map(f, mesh=task.mesh, in_specs=inputs, out_specs=outputs),
    donate_argnums=(0, 1) if len(inputs) > 1 else (),
  )
  init = cut(fsdp.init, (P(AXIS),), state)
  step = functools.partial(fsdp.step, inspect=inspect)
  step = cut(step, (P(AXIS), state, P(AXIS)), (P(AXIS), state, P()))
  return init, step.lower(params, init(params), task.place(batch)).compile()
