"""Runs N workers wherever a transformation runs: see `gradcomp._src.testing.modes`.

The tests look at residuals, name the exchanges of groups, and train with a user's step.
"""

import jax
import optax
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp._src.testing.modes import AUTO as AUTO
from gradcomp._src.testing.modes import EXPLICIT as EXPLICIT
from gradcomp._src.testing.modes import MODES as MODES
from gradcomp._src.testing.modes import mapped as mapped
from gradcomp._src.testing.modes import mesh as mesh
from gradcomp._src.testing.modes import modes_for as modes_for
from gradcomp._src.testing.modes import run as run_with_state


def grouped(exchange, group_size=2):
  """The exchange by its short form; of groups of one axis, if it needs some."""
  if exchange == "hierarchical":
    return gradcomp.exchange.Hierarchical(group_size=group_size)
  return exchange


def run(mode, transformation, gradients):
  """The outputs, leaves ``[N, ...]``, and the residuals, ``[N, ...]`` or None."""
  outputs, residual, _ = run_all(mode, transformation, gradients)
  return outputs, residual


def run_all(mode, transformation, gradients):
  """Like :func:`run`, and the residuals of the second stage ``[N, share, tile]``."""
  outputs, state = run_with_state(mode, transformation, gradients)
  return outputs, state.residual, state.server_residual


def collectives(transformation, params, gradients):
  """What an update of gradients, leaves ``[N, ...]``, sends between N devices."""
  workers = len(jax.tree.leaves(gradients)[0])
  devices = mesh(workers)
  with jax.set_mesh(devices):
    state = transformation.init(params)
  specs = gradcomp.state_specs(state, axis_name="data")

  def local(gradients, state):
    return transformation.update(jax.tree.map(lambda x: x[0], gradients), state)

  places = dict(in_specs=(P("data"), specs), out_specs=(P(), specs))
  update = jax.jit(jax.shard_map(local, mesh=devices, **places))
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
    params, state, metrics = step(params, state, batch)
    losses.append(float(metrics["loss"]))
  return params, state, losses
