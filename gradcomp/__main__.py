"""Answers on the command line whether compression is worth it.

  python -m gradcomp plan --params 25e6 --workers 8 --gbit 10

prints what each codec and exchange would take, and what to do. --help of it lists the
options. `gradcomp.plan` does the same for the parameters of a program.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import gradcomp
from gradcomp.cost import CodecSpeed, Link
from gradcomp.planner import packaged_speeds


def main(arguments: Sequence[str] | None = None) -> None:
  """Runs a command, or says which there are."""
  parser = argparse.ArgumentParser(
    prog="python -m gradcomp",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--version", action="version", version=gradcomp.__version__)
  commands = parser.add_subparsers()
  plan = commands.add_parser(
    "plan",
    help="compare codecs and exchanges for a model and a link",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  plan.set_defaults(run=_plan)
  add = plan.add_argument
  add("--params", type=float, required=True, help="parameters, such as 25e6")
  add("--workers", type=_workers, required=True, help="8, or 4x2 for hosts x chips")
  add("--gbit", type=float, required=True, help="Gbit/s of each worker's link")
  add("--inside-gbit", type=float, help="Gbit/s inside a host, for 4x2")
  add("--latency", type=float, default=50e-6, help="seconds of a message")
  add("--forward", type=float, help="seconds of the forward pass")
  add("--backward", type=float, help="seconds of the backward pass")
  add("--budget", type=_budget, default="paper", help=_BUDGETS)
  add("--steps", type=int, help="steps of the training, for sparse codecs")
  add(
    "--slower",
    type=float,
    default=1.0,
    help="times that codecs are slower here than on two cores",
  )
  options = parser.parse_args(arguments)
  if not hasattr(options, "run"):
    parser.print_help()
    return
  try:
    print(options.run(options))
  except ValueError as error:
    parser.exit(2, f"{error}\n")


_BUDGETS = "none, tight, paper, aggressive, or a bound on the error over the workers"


def _plan(options: argparse.Namespace) -> gradcomp.Plan:
  pair = isinstance(options.workers, tuple)
  if pair != (options.inside_gbit is not None):
    raise ValueError("`--inside-gbit` must be given with hosts x chips, and only then.")
  if not 1 <= options.params < 2**53:
    raise ValueError(f"`--params` must be 1 or more, got {options.params}.")
  link = _link(options.latency, options.gbit)
  return gradcomp.plan(
    jax.ShapeDtypeStruct((int(options.params),), jnp.float32),
    workers=options.workers,
    link=(link, _link(options.latency, options.inside_gbit)) if pair else link,
    forward=options.forward,
    backward=options.backward,
    speeds=_speeds(options.slower),
    steps=options.steps,
    budget=options.budget,
  )


def _link(latency: float, gbit: float) -> Link:
  return Link(latency=latency, bytes_per_second=gbit * 1e9 / 8)


def _speeds(slower: float) -> dict[str, CodecSpeed]:
  packaged = packaged_speeds("cpu")
  return {name: speed.times(slower) for name, speed in packaged.items()}


def _workers(text: str) -> int | tuple[int, int]:
  sizes = [int(part) for part in text.split("x")]
  return sizes[0] if len(sizes) == 1 else (sizes[0], sizes[1])


def _budget(text: str) -> str | float:
  try:
    return float(text)
  except ValueError:
    return text


if __name__ == "__main__":
  main()
