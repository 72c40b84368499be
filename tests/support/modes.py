"""Runs N workers wherever a transformation runs: see `gradcomp._src.testing.modes`.

The tests look at residuals, name the exchanges of groups, and train with a user's step.
"""

import optax

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
