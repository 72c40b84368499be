"""Methods that the command line names, and their optimizers."""

import dataclasses
import functools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import gradcomp
from examples.lib.training import AXIS
from gradcomp import codecs

Transformation = optax.GradientTransformation
Compress = Callable[..., Transformation]  # from a codec, and options of an exchange
SCHEDULES = ("cosine", "polynomial", "plateau", "constant")
# After three means in a row that are not a thousandth below the least so far.
PLATEAU = contrib.reduce_on_plateau(factor=0.5, patience=3, rtol=1e-3)


class Redsync(NamedTuple):
  """Fang et al.'s recipe, with the momentum of SGD in the exchange."""

  asq: bool = False  # whether all layers but the last send one mean for their values


class LowRank(NamedTuple):
  """PowerSGD, which averages two thin matrices in place of a leaf."""

  rank: int  # the columns of both


Method = codecs.Codec | Redsync | LowRank | None
KEEPING = Redsync | LowRank | codecs.TopK  # with a memory, which no loop carries
FORMATS = ((5, 2), (4, 3), (3, 0))
_BITS = {f"{e}-{m}": {"exponent_bits": e, "mantissa_bits": m} for e, m in FORMATS}
WIDTHS, FITTED = (2, 3, 4, 5, 6, 7, 8, 16), (2, 3, 4)
TYPES = ("dynamic_tree", "dynamic_map", "static_tree", "linear", "mantissa")
# What crosses the wire; None is JAX's own mean.
METHODS: dict[str, Method] = {
  "none": None,
  "f32": codecs.Dense(),
  "bf16": codecs.Dense(dtype=jnp.bfloat16),
  **{f"qsgd-{n}": codecs.QSGD(bits=n) for n in WIDTHS},
  **{f"qsgd-{n}-nonuniform": codecs.QSGD(bits=n, levels="nonuniform") for n in FITTED},
  "onebit-64": codecs.OneBit(),
  "onebit-512": codecs.OneBit(bucket_size=512),
  "onebit-column": codecs.OneBit(per_column=True),
  "terngrad": codecs.Ternary(),
  "terngrad-base3": codecs.Ternary(packing="base3"),
  "terngrad-noclip": codecs.Ternary(clip_sigmas=None),
  **{name.replace("_", "-"): codecs.EightBit(dtype=name) for name in TYPES},
  **{f"aps-{name}": codecs.FloatCast(**bits) for name, bits in _BITS.items()},
  **{f"cast-{x}": codecs.FloatCast(**bits, scale=1.0) for x, bits in _BITS.items()},
  "natural": codecs.Natural(),
  "topk-1": codecs.TopK(density=0.01),
  "topk-1-asq": codecs.TopK(density=0.01, quantize="asq"),
  "blocktop": codecs.BlockTop(),
  "randomk-1": codecs.RandomK(density=0.01),
  **{f"powersgd-{n}": LowRank(n) for n in (1, 2, 4)},
  "redsync": Redsync(),
  "redsync-asq": Redsync(asq=True),
}
EXCHANGES = ("auto", "all_gather", "two_shot", "psum", "ring")


def choose(parser: ArgumentParser, args: Namespace) -> dict[str, Method]:
  """Returns the methods that the options name; QSGD's with their bucket size."""
  if args.parallel != "data":
    return {args.parallel: args.parallel}  # of Adam
  one = f"qsgd-{args.bits}" if args.codec == "qsgd" else args.codec
  names = [one] if args.compare is None else args.compare or args.compared
  methods = {name: METHODS[name] for name in names}
  if args.inspect and None in methods.values():
    parser.error("--inspect shows what gradcomp sends: leave out none")
  for name, method in methods.items():
    if isinstance(method, codecs.OneBit | LowRank) and args.feedback == "none":
      said = "which leaves much of a gradient out, that later steps must make up for"
      parser.error(f"--feedback none does not go with {name}, {said}")
    if args.local_steps and isinstance(method, Redsync | LowRank | None):
      parser.error(f"--local-steps does not go with {name}, but with all codecs")
    fitted = isinstance(method, codecs.QSGD) and method.levels == "nonuniform"
    if args.scan and (fitted or isinstance(method, KEEPING | None)):
      parser.error(f"--scan does not go with {name}, but with codecs without a memory")
    if isinstance(method, Redsync):
      if args.optimizer == "adam":
        parser.error(f"{name} has the momentum of SGD in it: choose f32 for Adam")
      if args.warmup >= args.steps:
        parser.error(f"--warmup must leave some of the {args.steps} steps")
    if isinstance(method, codecs.QSGD):
      methods[name] = dataclasses.replace(method, bucket_size=args.bucket_size)
  return methods


def make_exchange(
  method: Method, args: Namespace, compress: Compress, *, seed: int
) -> Transformation:
  """Makes the transformation that averages the gradients of the workers."""
  if method is None:
    return optax.stateless(lambda grads, _: jax.lax.pmean(grads, AXIS))
  if isinstance(method, Redsync):
    return make_redsync(method, args)
  kept = None if args.feedback == "none" else args.feedback
  options: Any = {"exchange": args.exchange, "feedback": kept, "key": seed}
  if isinstance(method, LowRank):
    return gradcomp.powersgd(method.rank, axis_name=AXIS, **options)
  return compress(method, **options)


def make_local_steps(
  method: codecs.Codec, inner: Transformation, args: Namespace, *, seed: int
) -> Transformation:
  """Makes SparseLoCo for codecs that drop elements, and DiLoCo for all others."""
  # An element that few workers send is their mean, if all payloads come to everybody.
  drops = isinstance(method, codecs.TopK | codecs.BlockTop)
  gathers = args.exchange in ("auto", "all_gather")
  kept = {"auto": "error", "none": None}.get(args.feedback, args.feedback)
  if drops and kept == "error":
    kept = gradcomp.ErrorFeedback(residual_decay=0.95)
  outer = optax.sgd(1.0) if drops else optax.sgd(0.7, 0.9, nesterov=True)
  options = {"every": args.local_steps, "exchange": args.exchange, "feedback": kept}
  options |= {"merge": "senders" if drops and gathers else "mean", "key": seed}
  options |= {"axis_name": AXIS, "codec": method}
  return gradcomp.local.local_steps(inner, outer, **options)


def make_redsync(method: Redsync, args: Namespace) -> Transformation:
  """Makes RedSync with a dense warm-up, and with ASQ on all layers but the last."""
  options = {"axis_name": AXIS, "momentum": args.momentum}

  def warmed(**more: Any) -> Transformation:
    sparse = gradcomp.redsync(args.density, **options, **more)
    if not args.warmup:
      return sparse
    dense = gradcomp.redsync(1.0, **options)
    return gradcomp.wrappers.switch([args.warmup], [dense, sparse])

  parts = {"rest": warmed(quantize="asq"), "output": warmed()}
  return optax.partition(parts, output_layer) if method.asq else parts["output"]


def output_layer(params: Any) -> Any:
  """Labels the head or, where there is none, the embedding as the output layer."""
  name = "'head'" if "head" in params else "'embed'"
  of_path = lambda path, _: "output" if name in jax.tree_util.keystr(path) else "rest"
  return jax.tree.map_with_path(of_path, params)


def make_schedule(args: Namespace) -> optax.ScalarOrSchedule:
  """Makes the learning rate of a step. A plateau is ``scale_by_plateau``'s."""
  if args.schedule == "cosine":
    return optax.cosine_decay_schedule(args.learning_rate, args.steps)
  if args.schedule == "polynomial":  # that of Wen et al.
    return optax.polynomial_schedule(args.learning_rate, 0.0, 0.5, args.steps)
  return args.learning_rate


def make_optimizer(
  method: Method, args: Namespace, compress: Compress, *, seed: int
) -> Transformation:
  """Chains the exchange, clipping, the optimizer and the average of the parameters."""
  clip, descent = optax.identity(), _descent(method, args)
  if args.clip is not None:
    clip = optax.clip_by_global_norm(args.clip)
  mean = [] if args.ema is None else [average_params(args.ema)]
  if args.local_steps:
    inner = optax.chain(clip, descent)
    return optax.chain(make_local_steps(method, inner, args, seed=seed), *mean)
  chain = [make_exchange(method, args, compress, seed=seed), clip]
  # With its momentum in the exchange, each worker clips its own gradient before.
  if args.clip is not None and isinstance(method, Redsync):
    chain = [gradcomp.wrappers.clip_by_local_norm(args.clip, axis_name=AXIS), chain[0]]
  if args.schedule == "plateau":
    mean = [scale_by_plateau(), *mean]
  return optax.chain(*chain, descent, *mean)


def _descent(method: Method, args: Namespace) -> Transformation:
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
  return jax.tree.map_with_path(lambda path, x: x.ndim - is_stacked(path) > 1, params)


class AverageState(NamedTuple):
  """The state of ``average_params``, equal on all workers."""

  averaged_params: Any
  count: jax.Array  # steps


def average_params(decay: float) -> Transformation:
  """Keeps the exponential moving average of the parameters, as Wen et al. test it.

  All weights are divided by their sum, so that short runs are not drawn to the first
  parameters. It is the last of a chain, for it must see the updates that are added.
  """
  if not 0 < decay < 1:
    raise ValueError(f"`decay` must be in (0, 1), got {decay}.")

  def init_fn(params: Any) -> AverageState:
    return AverageState(optax.tree.zeros_like(params), jnp.zeros([], jnp.int32))

  def update_fn(updates: Any, state: AverageState, params: Any = None) -> Any:
    count = optax.safe_increment(state.count)
    # (1 - decay) / (1 - decay ** count), to the last digits of float32.
    weight = (1 - decay) / -jnp.expm1(count * jnp.log1p(decay - 1))
    after = optax.apply_updates(params, updates)
    closer = lambda mean, new: mean + weight * (new - mean)
    averaged = jax.tree.map(closer, state.averaged_params, after)
    return updates, AverageState(averaged, count)

  return Transformation(init_fn, update_fn)


def averaged(opt_state: Any, params: Any) -> Any:
  """Returns the average that a state holds, or ``params`` if it holds none."""
  return optax.tree.get(opt_state, "averaged_params", default=params)


class PlateauState(NamedTuple):
  """The state of ``scale_by_plateau``, equal on all workers."""

  plateau: contrib.ReduceLROnPlateauState


def scale_by_plateau() -> Transformation:
  """Scales updates by 1, and by half as much after each plateau of the loss."""
  scaled = lambda x, s, params=None: (optax.tree.scale(s.plateau.scale, x), s)
  return Transformation(lambda params: PlateauState(PLATEAU.init(params)), scaled)


def observe(opt_state: Any, loss: float) -> Any:
  """Records the mean loss of some steps in a state that looks for a plateau."""
  state = optax.tree.get(opt_state, "plateau")
  if state is None:
    return opt_state
  # Where the next step, which was compiled for these places, looks for it.
  places = jax.tree.map(lambda x: x.sharding, state)
  return optax.tree.set(opt_state, plateau=_observe(places)(state, loss))


@functools.cache
def _observe(places: Any) -> Any:
  update = lambda state, loss: PLATEAU.update({}, state, value=loss)[1]
  return jax.jit(update, out_shardings=places)
