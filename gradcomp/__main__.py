"""The command line: ``plan`` for a model and a link.

  python -m gradcomp plan --params 25M --workers 8 --gbit 10

prints the seconds of each codec and exchange, and a recommendation. --help of it lists
the options. `gradcomp.cost.plan` does this for the parameters of a program. With

  python -m gradcomp plan --gradients step.npz --workers 8 --gbit 10 --budget 0.01

bits for each leaf are one of the candidates, see `gradcomp.cost.allocate`.
"""

import argparse
import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

import gradcomp
from gradcomp._src.cost.planner import candidates
from gradcomp._src.cost.planner.choice import Plan
from gradcomp._src.cost.planner.errors import BudgetName, Optimizer, checked_budget
from gradcomp.cost import Link, PlanOptions

_SUFFIXES = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
_BUDGETS = "none, tight, paper, aggressive, or a bound on the error over the workers"


def main(arguments: Sequence[str] | None = None) -> None:
  """Runs the command of the arguments; prints the help if they name none."""
  parser = argparse.ArgumentParser(
    prog="python -m gradcomp",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--version", action="version", version=gradcomp.__version__)
  parser.set_defaults(run=lambda _: parser.format_help().rstrip())
  commands = parser.add_subparsers()
  plan = commands.add_parser(
    "plan",
    help="compare codecs and exchanges for a model and a link",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  plan.set_defaults(run=functools.partial(_plan, plan))
  add = plan.add_argument
  add("--params", type=_params, help="parameters: 25M, 7B or 25e6")
  files = "in their place files of numpy.savez, each the gradients of a step"
  more = "their leaves count, and bits for each of them are a candidate"
  add("--gradients", nargs="+", metavar="FILE", help=f"{files}: {more}")
  add("--workers", type=_sizes, required=True, help="8, or 4x2 for hosts x chips")
  add("--gbit", type=_rate, required=True, help="Gbit/s of each worker's link")
  add("--inside-gbit", type=_rate, help="Gbit/s inside a host, for 4x2")
  add("--latency", type=_seconds, default=50e-6, help="seconds of a message")
  add("--forward", type=_seconds, help="seconds of the forward pass")
  add("--backward", type=_seconds, help="seconds of the backward pass")
  add("--budget", type=_bound, default="paper", help=_BUDGETS)
  add("--steps", type=_steps, help="steps of the training, for sparse codecs")
  add("--optimizer", choices=get_args(Optimizer), help="the optimizer of the training")
  add("--device", default="cpu", help='its codec speeds: cpu, H100, or "TPU v5e"')
  slower = "times that codecs are slower here than on that device"
  add("--slower", type=_times, default=1.0, help=slower)
  options = parser.parse_args(arguments)
  print(options.run(options))


def _plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Plan | str:
  pair = isinstance(options.workers, tuple)
  if pair != (options.inside_gbit is not None):
    parser.error(
      "argument --inside-gbit: must be given with hosts x chips, and only then"
    )
  if (options.forward is None) != (options.backward is None):
    parser.error("argument --forward: must be given with --backward, and only then")
  if (options.params is None) == (options.gradients is None):
    parser.error("argument --params: must be given, or --gradients, and not both")
  link = lambda gbit: Link(latency=options.latency, bytes_per_second=gbit * 1e9 / 8)
  names = "forward", "backward", "optimizer"
  given: dict[str, Any] = {name: getattr(options, name) for name in names}
  params: Any = jax.ShapeDtypeStruct((round(options.params or 0),), jnp.float32)
  allocation = None
  try:
    if options.gradients:
      steps = [dict(np.load(name)) for name in options.gradients]
      allocation = gradcomp.cost.allocate(steps)
      params = given["gradients"] = steps[0]
      given["candidates"] = [*candidates.CANDIDATES, allocation.candidate]
    packaged = candidates.packaged_speeds(options.device)
    source, platform = candidates.SOURCES[options.device]
    speeds = {x: speed.times(options.slower) for x, speed in packaged.items()}
    outer = link(options.gbit)
    found = gradcomp.cost.plan(
      params,
      workers=options.workers,
      link=(outer, link(options.inside_gbit)) if pair else outer,
      budget=options.budget,
      steps=options.steps and int(options.steps),
      options=PlanOptions(**given, speeds=speeds, platform=platform),
    )
  except (OSError, TypeError, ValueError) as error:
    parser.error(str(error))
  own = source if options.slower == 1 else f"{source} Times {options.slower:g}."
  notes = tuple(own if x == candidates.GIVEN else x for x in found.notes)
  found = found._replace(notes=notes)
  return f"{allocation}\n\n{found}" if allocation else found


def _parser(
  rule: str, read: Callable[[str], Any], fits: Callable[[Any], bool] = lambda x: True
) -> Callable[[str], Any]:
  """Returns a parser that states the rule for texts without a value."""

  def parse(text: str) -> Any:
    with contextlib.suppress(ValueError):
      if fits(value := read(text)):
        return value
    raise argparse.ArgumentTypeError(f"must be {rule}, got {text}")

  return parse


def _magnitude(text: str) -> float:
  """Parses 25000000, 25_000_000, 25e6 or 25M."""
  text = text.strip().lower()
  power = _SUFFIXES.get(text[-1:], 0)
  return float(text[:-1] if power else text) * 10**power


def _workers(text: str) -> int | tuple[int, int]:
  count = lambda part: int(part) if re.fullmatch(r"\d{1,9}", part) else 0
  sizes = [count(part) for part in text.lower().split("x")]
  if len(sizes) > 2 or min(sizes) < 1:
    raise ValueError
  return sizes[0] if len(sizes) == 1 else (sizes[0], sizes[1])


_rule = "a number of parameters from 1 to 1e15, such as 25M or 25e6"
_params = _parser(_rule, _magnitude, lambda value: 1 <= value <= 1e15)
_sizes = _parser("a number of workers, as 8, or hosts x chips, as 4x2", _workers)
_in_range = lambda value: 1e-6 <= value <= 1e6
_rate = _times = _parser("a number from 1e-06 to 1e+06", float, _in_range)
_seconds = _parser("seconds from 0 to 1e+06", float, lambda value: 0 <= value <= 1e6)
_named = lambda text: text if text in get_args(BudgetName) else float(text)
_bound = _parser(f"{_BUDGETS}, above 0", lambda text: checked_budget(_named(text)))
_count = _parser("a number of steps from 1 to 1e+12", float, lambda x: 1 <= x <= 1e12)
_steps = _parser("a whole number of steps", _count, float.is_integer)  # also 1e5


if __name__ == "__main__":
  main()
