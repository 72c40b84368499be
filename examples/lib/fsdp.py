"""Shards parameters over workers, which gather them in few bits each step (FSDP)."""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import P, lax

from examples.lib import runs
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

  The optimizer works only on a worker's part. Those of one axis travel in float32.
  """

  loss_fn: Callable[[Any, Batch], jax.Array]
  optimizer: optax.GradientTransformation
  weights: Codec
  grads: Codec
  feedback: bool

  def init(self, shards: Any, seed: int = 0) -> State:
    """Makes the state, inside the map."""
    keeps = lambda w: self.feedback and w.ndim > 1
    zeros = functools.partial(parallel.gather_residual, axis_name=AXIS)
    residuals = jax.tree.map(lambda w: zeros(w) if keeps(w) else None, shards)
    key = jax.random.key_data(jax.random.key(seed))
    return State(self.optimizer.init(shards), residuals, key, count=jnp.int32(0))

  @property
  def exchange(self) -> optax.GradientTransformation:
    """An exchange of whole gradients with the loss of the gathers' backward pass."""
    return runs.exchange_of(self.grads, feedback=self.feedback)

  def step(self, shards: Any, state: State, batch: Any, *, inspect=False) -> Any:
    """Takes a step inside the map; with ``inspect`` it has whole gradients, too."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.count)
    # Gradients of all workers are added up, so each has an Nth of the loss.
    share = lambda params: self.loss_fn(params, batch) / lax.axis_size(AXIS)
    loss_fn = lambda shards, residuals: share(self.whole(shards, residuals, key))
    grad_fn = jax.value_and_grad(loss_fn, (0, 1))
    loss, (grads, residuals) = grad_fn(shards, state.residuals)
    metrics = {"loss": lax.psum(loss, AXIS)}
    if inspect:
      grads_of_whole = jax.grad(share)(self.whole(shards, state.residuals, key))
      found = runs.inspected(self.exchange, grads_of_whole, state.residuals)
      metrics["inspection"] = found
    updates, inner = self.optimizer.update(grads, state.inner, shards)
    shards = optax.apply_updates(shards, updates)
    return shards, State(inner, residuals, state.key, state.count + 1), metrics

  def whole(self, shards: Any, residuals: Any, key: jax.Array) -> Any:
    """Gathers all parameters; a gradient of them goes to the owners of the parts."""
    leaves, tree = jax.tree.flatten(shards)
    pairs = zip(leaves, tree.flatten_up_to(residuals), strict=True)
    codecs = {"params": self.weights, "grads": self.grads}
    whole = []
    for i, (w, kept) in enumerate(pairs):
      given = {"residual": kept, "key": jax.random.fold_in(key, i)}
      given |= codecs if w.ndim > 1 else dict.fromkeys(codecs)
      whole.append(parallel.gather(w, axis_name=AXIS, **given))
    return tree.unflatten(whole)


def on_mesh(task: Task, **options: Any) -> SimpleNamespace:
  """Makes what ``Fsdp(**options)`` does jitted, for a task with ``spec=P(AXIS)``."""
  fsdp, params = Fsdp(loss_fn=task.loss_fn, **options), task.init_params(0)
  for path, leaf in jax.tree.leaves_with_path(params):
    if leaf.shape[0] % task.mesh.size:
      axis, workers = f"first axis of {jax.tree_util.keystr(path)}", task.mesh.size
      said = f"must be a multiple of the {workers} workers, got {leaf.shape}"
      raise ValueError(f"the {axis} {said}; choose other sizes or workers.")
  inner = jax.eval_shape(fsdp.optimizer.init, params)
  inner = jax.tree.map(lambda x: P(AXIS) if x.ndim else P(), inner)
  state = State(inner, residuals=P(AXIS), key=P(), count=P())
  over = functools.partial(jax.shard_map, mesh=task.mesh)
  init = jax.jit(over(fsdp.init, in_specs=P(AXIS), out_specs=state))
  given, taken = (P(AXIS), state, P(AXIS)), (P(AXIS), state, P())

  def step(*args: Any, inspect: bool = False) -> Any:
    own = functools.partial(fsdp.step, inspect=inspect)
    return over(own, in_specs=given, out_specs=taken)(*args)

  step = jax.jit(step, donate_argnums=(0, 1), static_argnames="inspect")
  return SimpleNamespace(init=init, step=step, exchange=fsdp.exchange)
