"""The options of elastic.py, and the options that it hands on to its workers.

It needs no JAX, so that a wrong option ends the supervisor and not its workers.
"""

import argparse
import pathlib
from collections.abc import Sequence

from examples.lib.parsing import at_least_0, natural, positive, positive_float

CODECS = ("qsgd-4", "blocktop")


def training() -> argparse.ArgumentParser:
  """Makes the parser of the training options, for workers of all generations."""
  parser = argparse.ArgumentParser(add_help=False)
  add = parser.add_argument_group("training").add_argument
  add("--steps", type=positive, default=500, help="of the whole training")
  add(
    "--local-steps", type=natural, default=0, help="that workers take alone in a round"
  )
  add("--codec", choices=CODECS, default="qsgd-4", help="of a round")
  add("--save-every", type=positive, default=20, help="steps between two checkpoints")
  add("--inspect", type=natural, default=0, help="steps between two tables of errors")
  add("--pause", type=at_least_0, default=0.1, help="seconds after each step")
  return parser


def supervising(
  arguments: Sequence[str] | None = None,
) -> tuple[argparse.Namespace, list[str]]:
  """Reads the options of a supervisor; returns its workers' options behind them."""
  parser = argparse.ArgumentParser(
    parents=[training()], formatter_class=argparse.ArgumentDefaultsHelpFormatter
  )
  add = parser.add_argument
  add("folder", type=pathlib.Path, help="a folder that all hosts share")
  add("host", type=natural, help="the number of this host, of which no other has it")
  add("--hosts", type=positive, default=4, help="how many to begin with")
  add("--address", default="127.0.0.1", help="where the others reach this host")
  add(
    "--patience",
    type=positive_float,
    default=5.0,
    help="seconds without a sign of life",
  )
  options = parser.parse_args(arguments)
  if options.local_steps > options.steps:
    parser.error(
      f"--local-steps must be at most the {options.steps} steps, or nothing is ever "
      f"sent, got {options.local_steps}"
    )
  names = vars(training().parse_args([]))
  given = ((f"--{x.replace('_', '-')}", str(getattr(options, x))) for x in names)
  return options, [part for pair in given for part in pair]
