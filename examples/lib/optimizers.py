"""Makes the optimizer that the options name, with the exchange in front of it."""

import argparse
from typing import Any

import jax
import optax

import gradcomp
from examples.lib.averaging import average_params
from examples.lib.methods import Method, Redsync, make_exchange, make_local_steps
from examples.lib.plateau import scale_by_plateau
from examples.lib.training import AXIS

SCHEDULES = ("cosine", "polynomial", "plateau", "constant")


def make_schedule(args: argparse.Namespace) -> optax.ScalarOrSchedule:
  """Makes the learning rate of a step. A plateau is ``scale_by_plateau``'s."""
  if args.schedule == "cosine":
    return optax.cosine_decay_schedule(args.learning_rate, args.steps)
  if args.schedule == "polynomial":  # that of Wen et al.
    return optax.polynomial_schedule(args.learning_rate, 0.0, 0.5, args.steps)
  return args.learning_rate


def make_optimizer(
  method: Method, args: argparse.Namespace, *, seed: int
) -> optax.GradientTransformation:
  """Chains the exchange, clipping, the optimizer and the average of the parameters.

  The norm that is clipped is that of the mean gradient, and of local steps that of the
  worker's own. RedSync has momentum in its exchange, so there each worker clips its own
  gradient before, of all leaves together. The seed goes only into the state.
  """
  if args.local_steps:
    clip = optax.identity()
    if args.clip is not None:
      clip = optax.clip_by_global_norm(args.clip)
    inner = optax.chain(clip, _descent(method, args))
    local = make_local_steps(method, inner, args, seed=seed)
    return optax.chain(local, *_averaging(args))
  chain = [make_exchange(method, args, seed=seed)]
  if args.clip is not None:
    if isinstance(method, Redsync):
      chain.insert(0, gradcomp.wrappers.clip_by_local_norm(args.clip, axis_name=AXIS))
    else:
      chain.append(optax.clip_by_global_norm(args.clip))
  chain.append(_descent(method, args))
  if args.schedule == "plateau":
    chain.append(scale_by_plateau())
  return optax.chain(*chain, *_averaging(args))


def _averaging(args: argparse.Namespace) -> list[optax.GradientTransformation]:
  return [] if args.ema is None else [average_params(args.ema)]


def _descent(method: Method, args: argparse.Namespace) -> optax.GradientTransformation:
  """Makes SGD or Adam. Matrices and kernels decay, and biases do not."""
  rate = make_schedule(args)
  if args.optimizer == "adam":
    if not args.weight_decay:
      return optax.adam(rate)
    return optax.adamw(rate, weight_decay=args.weight_decay, mask=weights)
  momentum = None if isinstance(method, Redsync) else args.momentum
  sgd = optax.sgd(rate, momentum=momentum, nesterov=args.nesterov)
  if not args.weight_decay:
    return sgd
  return optax.chain(optax.add_decayed_weights(args.weight_decay, weights), sgd)


def weights(params: Any) -> Any:
  """Masks the parameters that decay: matrices and kernels."""
  is_stacked = lambda path: "'blocks'" in jax.tree_util.keystr(path)
  decays = lambda path, x: x.ndim - is_stacked(path) > 1
  return jax.tree.map_with_path(decays, params)
