"""Shards parameters over workers, which gather them in few bits each step (FSDP).

``parallel.gather`` compresses in its backward pass, out of which nothing comes but
cotangents. So another exchange is inspected, which does to whole gradients what that
one does: it encodes them with the same codec, on top of the same residuals. (A worker's
own part, which gather leaves as it is, is rounded there, too.)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import gradcomp
from examples.lib.methods import Prepared
from examples.lib.telemetry import Log
from examples.lib.training import AXIS, Batch, Task
from gradcomp import parallel
from gradcomp.codecs import Codec

SMALL = 1024  # elements of a leaf that travels in float32


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

  def specs(self, params: Any) -> State:
    """Returns the specs of the state on a mesh: all but scalars is sharded."""
    inner = jax.eval_shape(self.optimizer.init, params)
    inner = jax.tree.map(lambda x: P(AXIS) if x.ndim else P(), inner)
    return State(inner=inner, residuals=P(AXIS), key=P(), count=P())

  @property
  def exchange(self) -> optax.GradientTransformation:
    """An exchange of whole gradients with the loss of the gathers' backward pass."""
    return exchange_of(self.grads, feedback=self.feedback)

  def step(
    self, shards: Any, state: State, batch: Any, *, inspect: bool = False
  ) -> Any:
    """Takes a step inside the map; with ``inspect`` it has whole gradients, too."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.count)

    # Gradients of all workers are added up, so each has an Nth of the loss.
    def share(params: Any) -> jax.Array:
      return self.loss_fn(params, batch) / lax.axis_size(AXIS)

    loss_fn = lambda shards, residuals: share(self.whole(shards, residuals, key))
    grad_fn = jax.value_and_grad(loss_fn, (0, 1))
    loss, (grads, residuals) = grad_fn(shards, state.residuals)
    metrics = {"loss": lax.psum(loss, AXIS)}
    if inspect:
      grads_of_whole = jax.grad(share)(self.whole(shards, state.residuals, key))
      found = inspected(self.exchange, grads_of_whole, state.residuals)
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


def prepare(task: Task, batch: Batch, every: int | None, **options: Any) -> Prepared:
  """Compiles a step of ``Fsdp(**options)``, for a task with ``spec=P(AXIS)``."""
  fsdp, params = Fsdp(**options), task.init_params(0)
  for path, leaf in jax.tree.leaves_with_path(params):
    if leaf.shape[0] % task.mesh.size:
      axis, workers = f"first axis of {jax.tree_util.keystr(path)}", task.mesh.size
      said = f"must be a multiple of the {workers} workers, got {leaf.shape}"
      raise ValueError(f"the {axis} {said}; choose other sizes or workers.")
  state = fsdp.specs(params)
  over = functools.partial(jax.shard_map, mesh=task.mesh)
  init = jax.jit(over(fsdp.init, in_specs=P(AXIS), out_specs=state))

  def compiled(**options: bool) -> Any:
    step = functools.partial(fsdp.step, **options)
    given, taken = (P(AXIS), state, P(AXIS)), (P(AXIS), state, P())
    step = over(step, in_specs=given, out_specs=taken)
    step = jax.jit(step, donate_argnums=(0, 1))
    return step.lower(params, init(params), task.place(batch)).compile()

  step = compiled()
  wire = gradcomp.wire_report(step)
  log = Log(every, compiled(inspect=True)) if every else Log()
  start = lambda seed, params: (init(params), fsdp.exchange)
  return Prepared(step, (wire.bytes_sent, wire.dense_bytes), start, log)


def exchange_of(codec: Codec, *, feedback: bool = True) -> optax.GradientTransformation:
  """Makes the exchange to inspect; its state also has the residuals of gathers."""
  kept = "error" if feedback else None
  options = {"axis_name": AXIS, "exchange": "all_gather", "min_leaf_size": SMALL}
  return gradcomp.compress(codec, feedback=kept, **options)


def inspected(exchange: Any, grads: Any, residuals: Any) -> Any:
  """Inspects whole gradients of a worker, inside the map."""
  state = exchange.init(grads)
  if state.residual is not None:
    leaves, tree = jax.tree.flatten(grads)
    kept = [
      jnp.zeros_like(g, shape=g.shape or (1,)) if e is None else e
      for g, e in zip(leaves, tree.flatten_up_to(residuals), strict=True)
    ]
    state = state._replace(residual=tree.unflatten(kept))
  *_, found = gradcomp.telemetry.inspect_update(exchange, grads, state)

  def to_owners(metrics: Any) -> Any:
    # Each part goes to one worker here, where all_gather sends it to all others.
    return metrics._replace(bytes_sent=metrics.bytes_sent / lax.axis_size(AXIS))

  leaves = {path: to_owners(metrics) for path, metrics in found.leaves.items()}
  return found._replace(total=to_owners(found.total), leaves=leaves)
