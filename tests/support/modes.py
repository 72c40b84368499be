"""Runs N workers wherever a transformation runs: see `gradcomp._src.testing.modes`.

The tests look at residuals, name the exchanges of groups, and train with a user's step.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.testing import modes as kit
from gradcomp._src.testing.modes import AUTO as AUTO
from gradcomp._src.testing.modes import EXPLICIT as EXPLICIT
from gradcomp._src.testing.modes import MODES as MODES
from gradcomp._src.testing.modes import mesh as mesh
from gradcomp._src.testing.modes import modes_for as modes_for
from gradcomp._src.testing.modes import started as started


def grouped(exchange, group_size=2):
  """The exchange by its short form; of groups of one axis, if it needs some."""
  if exchange == "hierarchical":
    return gradcomp.exchange.Hierarchical(group_size=group_size)
  return exchange


class Ran(NamedTuple):
  """The outputs of each step and the last state, leaves ``[N, ...]``."""

  outputs: list
  state: Any


def run_with_state(mode, transformation, gradients):
  found = kit.run(mode, transformation, gradients)
  return Ran(found.outputs, found.state)


def run(mode, transformation, gradients):
  """The outputs, leaves ``[N, ...]``, and the residuals, ``[N, ...]`` or None."""
  return run_all(mode, transformation, gradients)[:2]


def run_all(mode, transformation, gradients):
  """Like :func:`run`, and the residuals of the second stage ``[N, share, tile]``."""
  outputs, state = run_with_state(mode, transformation, gradients)
  return outputs, state.residual, state.server_residual


def of_each(state, workers):
  """Each worker's part of a state on a mesh, ``[N, ...]``."""
  return kit.of_each(("data",), workers, state)


def words(x):
  """An array of NumPy: of a typed key, what it consists of."""
  typed = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return np.asarray(jax.random.key_data(x) if typed else x)


def placed(transformation, params, mesh):
  """Equal parameters on all devices of a mesh, and the state that is made there."""
  params = jax.device_put(params, NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    return params, jax.jit(transformation.init)(params)


def on_mesh(transformation, devices, state, **options):
  """``update(gradients, state)`` of all workers, whose gradients are ``[N, ...]``."""
  specs = gradcomp.state_specs(state, axis_name="data")

  def local(gradients, state):
    return transformation.update(jax.tree.map(lambda x: x[0], gradients), state)

  options |= {"in_specs": (P("data"), specs), "out_specs": (P(), specs)}
  return jax.jit(jax.shard_map(local, mesh=devices, **options))


def traced(transformation, like, workers):
  """A step of all workers, each with a gradient like this tree of shapes."""
  devices = mesh(workers)
  with jax.set_mesh(devices):
    state = jax.eval_shape(transformation.init, like)
  stack = lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype)
  update = on_mesh(transformation, devices, state)
  return update.trace(jax.tree.map(stack, like), state)


def training(optimizer):
  """A transformation whose state has the parameters, too, as a checkpoint has."""
  optimizer = optax.with_extra_args_support(optimizer)

  def update(updates, state, _=None):
    params, inner = state
    updates, inner = optimizer.update(updates, inner, params)
    return updates, (optax.apply_updates(params, updates), inner)

  return optax.GradientTransformation(lambda p: (p, optimizer.init(p)), update)


def collectives(transformation, params, gradients):
  """What an update of gradients, leaves ``[N, ...]``, sends between N devices."""
  devices = mesh(len(jax.tree.leaves(gradients)[0]))
  with jax.set_mesh(devices):
    state = transformation.init(params)
  update = on_mesh(transformation, devices, state)
  return gradcomp.wire_report(update.lower(gradients, state)).collectives


def user_step(loss_fn, optimizer, axis_name="data"):
  """The step that a user writes around `value_and_grad` and `update`."""
  grad_fn = gradcomp.value_and_grad(loss_fn, axis_name=axis_name)

  def step(params, state, batch):
    loss, grads = grad_fn(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, {"loss": loss}

  return step


def train(step, params, state, batch, steps=5):
  losses = []
  for _ in range(steps):
    # Emulated devices share few threads, which two steps at once may all hold.
    params, state, metrics = jax.block_until_ready(step(params, state, batch))
    losses.append(float(metrics["loss"]))
  return params, state, losses
