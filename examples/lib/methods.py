"""The methods that the command line names: codecs, and recipes with options."""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradcomp
from examples.lib.training import AXIS
from gradcomp.codecs import (
  QSGD,
  BlockTop,
  Dense,
  EightBit,
  FloatCast,
  LeafCodec,
  Natural,
  OneBit,
  RandomK,
  Ternary,
  TopK,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Redsync:
  """Fang et al.'s recipe, with the momentum of SGD in the exchange.

  Args:
    asq: whether all layers but the output layer send one mean for their values.
  """

  asq: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank:
  """PowerSGD, which averages two thin matrices in place of a leaf.

  Args:
    rank: the columns of both.
  """

  rank: int


Method = LeafCodec | Redsync | LowRank | None
KEEPING = Redsync | LowRank | TopK  # with a memory, which no loop carries
FORMATS = ((5, 2), (4, 3), (3, 0))
WIDTHS = (2, 3, 4, 5, 6, 7, 8, 16)
TYPES = ("dynamic_tree", "dynamic_map", "static_tree", "linear", "mantissa")
# What crosses the wire; None is JAX's own mean.
METHODS: dict[str, Method] = {
  "none": None,
  "f32": Dense(),
  "bf16": Dense(dtype=jnp.bfloat16),
  **{f"qsgd-{n}": QSGD(bits=n) for n in WIDTHS},
  **{f"qsgd-{n}-nonuniform": QSGD(bits=n, levels="nonuniform") for n in (2, 3, 4)},
  "onebit-64": OneBit(),
  "onebit-512": OneBit(bucket_size=512),
  "onebit-column": OneBit(per_column=True),
  "terngrad": Ternary(),
  "terngrad-base3": Ternary(packing="base3"),
  "terngrad-noclip": Ternary(clip_sigmas=None),
  **{name.replace("_", "-"): EightBit(dtype=name) for name in TYPES},
  **{f"aps-{e}-{m}": FloatCast(exponent_bits=e, mantissa_bits=m) for e, m in FORMATS},
  **{
    f"cast-{e}-{m}": FloatCast(exponent_bits=e, mantissa_bits=m, scale=1.0)
    for e, m in FORMATS
  },
  "natural": Natural(),
  "topk-1": TopK(density=0.01),
  "topk-1-asq": TopK(density=0.01, quantize="asq"),
  "blocktop": BlockTop(),
  "randomk-1": RandomK(density=0.01),
  **{f"powersgd-{n}": LowRank(rank=n) for n in (1, 2, 4)},
  "redsync": Redsync(),
  "redsync-asq": Redsync(asq=True),
}
EXCHANGES = ("auto", "all_gather", "two_shot", "psum", "ring")


def choose(
  parser: argparse.ArgumentParser, args: argparse.Namespace, compared: Sequence[str]
) -> dict[str, Method]:
  """Returns the methods that the options name; QSGD's with their bucket size.

  Args:
    parser: reports options that do not go together.
    args: the options.
    compared: the names that ``--compare`` without names stands for.
  """
  if args.compare is None:
    names = [f"qsgd-{args.bits}" if args.codec == "qsgd" else args.codec]
  else:
    names = args.compare or compared
  methods = {name: METHODS[name] for name in names}
  if args.inspect and None in methods.values():
    parser.error("--inspect shows what gradcomp sends: leave out none")
  for name, method in methods.items():
    if isinstance(method, OneBit | LowRank) and args.feedback == "none":
      parser.error(
        f"--feedback none does not go with {name}: it leaves much of a gradient out, "
        "which later steps must make up for"
      )
    if args.local_steps and isinstance(method, Redsync | LowRank | None):
      parser.error(f"--local-steps does not go with {name}, but with all codecs")
    fitted = isinstance(method, QSGD) and method.levels == "nonuniform"
    if args.scan and (fitted or isinstance(method, KEEPING | None)):
      parser.error(f"--scan does not go with {name}, but with codecs without a memory")
    if isinstance(method, Redsync):
      if args.optimizer == "adam":
        parser.error(f"{name} has the momentum of SGD in it: choose f32 for Adam")
      if args.warmup >= args.steps:
        parser.error(f"--warmup must leave some of the {args.steps} steps")
    if isinstance(method, QSGD):
      methods[name] = dataclasses.replace(method, bucket_size=args.bucket_size)
  return methods


def make_exchange(
  method: Method, args: argparse.Namespace, *, seed: int
) -> optax.GradientTransformation:
  """Makes the transformation that averages the gradients of the workers."""
  if method is None:
    return optax.stateless(lambda grads, _: jax.lax.pmean(grads, AXIS))
  if isinstance(method, Redsync):
    return make_redsync(method, args)
  options: dict[str, Any] = dict(
    axis_name=AXIS,
    exchange=args.exchange,
    feedback=None if args.feedback == "none" else args.feedback,
    key=seed,
  )
  if isinstance(method, LowRank):
    return gradcomp.powersgd(method.rank, **options)
  rest = gradcomp.compress(method, **options)
  if not args.scan:
    return rest
  layers = gradcomp.parallel.compress_in_scan(method, **options)
  return optax.partition({"blocks": layers, "rest": rest}, in_blocks)


def in_blocks(params: Any) -> Any:
  """Labels the stacked blocks of a transformer, and the rest."""
  of_path = lambda path, _: "blocks" if path[0].key == "blocks" else "rest"
  return jax.tree.map_with_path(of_path, params)


def make_local_steps(
  method: LeafCodec,
  inner: optax.GradientTransformation,
  args: argparse.Namespace,
  *,
  seed: int,
) -> optax.GradientTransformation:
  """Makes SparseLoCo for codecs that drop elements, and DiLoCo for all others.

  An element that few workers send is their mean, if all payloads come to everybody.
  """
  drops = isinstance(method, TopK | BlockTop)
  gathers = args.exchange in ("auto", "all_gather")
  kept = {"auto": "error", "none": None}.get(args.feedback, args.feedback)
  if drops and kept == "error":
    kept = gradcomp.ErrorFeedback(residual_decay=0.95)
  return gradcomp.local.local_steps(
    inner,
    optax.sgd(1.0) if drops else optax.sgd(0.7, 0.9, nesterov=True),
    axis_name=AXIS,
    every=args.local_steps,
    codec=method,
    exchange=args.exchange,
    feedback=kept,
    merge="senders" if drops and gathers else "mean",
    key=seed,
  )


def make_redsync(
  method: Redsync, args: argparse.Namespace
) -> optax.GradientTransformation:
  """Makes RedSync with a dense warm-up, and with ASQ on all layers but the last."""

  def warmed(**options: Any) -> optax.GradientTransformation:
    redsync = functools.partial(
      gradcomp.redsync, axis_name=AXIS, momentum=args.momentum
    )
    sparse = redsync(args.density, **options)
    if not args.warmup:
      return sparse
    return gradcomp.wrappers.switch([args.warmup], [redsync(1.0), sparse])

  if not method.asq:
    return warmed()
  parts = {"rest": warmed(quantize="asq"), "output": warmed()}
  return optax.partition(parts, output_layer)


def output_layer(params: Any) -> Any:
  """Labels the output layer, to leave its values unquantized.

  It is the head or, where there is none, the embedding.
  """
  name = "'head'" if "head" in params else "'embed'"
  return jax.tree.map_with_path(
    lambda path, _: "output" if name in jax.tree_util.keystr(path) else "rest", params
  )
