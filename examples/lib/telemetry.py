"""Keeps the inspections of a run, and reports them as a table and plots."""

import argparse
from pathlib import Path
from typing import Any

import jax

from examples.lib import inspections
from examples.lib.parsing import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the options of a trainer that inspects the compression of each leaf."""
  group = parser.add_argument_group("telemetry")
  group.add_argument(
    "--inspect",
    type=positive,
    metavar="K",
    help="inspect what is sent every K steps: a table at the end, and two plots",
  )
  group.add_argument(
    "--output", type=Path, default=Path("results"), help="folder of the plots"
  )


def ends_round(number: int, round_steps: int, *, first: int, every: int) -> bool:
  """Returns True if a step ends the round of ``first``, ``first + every`` and so on."""
  if number % round_steps:
    return False
  after = number - first
  return after // every > (after - round_steps) // every


class Log:
  """Keeps the inspections of a run.

  Args:
    every: the steps from one inspection to the next; None for none.
    step: a train step that inspects itself.
    round_steps: the steps of a round, in whose last one something is sent.
  """

  def __init__(
    self, every: int | None = None, step: Any = None, *, round_steps: int = 1
  ):
    self.every = every
    self.step = step
    self.round_steps = round_steps
    self.steps: list[int] = []
    self.found: list[Any] = []

  def takes(self, number: int) -> bool:
    """Returns True for steps to inspect: the first, and every ``every`` steps from it.

    In place of such a step, the last of its round is.
    """
    every, steps = self.every, self.round_steps
    return every is not None and ends_round(number, steps, first=1, every=every)

  def keep(self, number: int, metrics: Any) -> None:
    """Keeps the inspection of a step, if there was one."""
    if self.takes(number):
      self.steps.append(number)
      self.found.append(jax.device_get(metrics["inspection"]))

  def write(self, folder: Path, name: str) -> list[Path]:
    """Prints the last inspection as a table, and draws two figures in the folder.

    Returns:
      The paths of the figures; none where nothing was inspected.
    """
    if not self.found:
      return []
    last = self.found[-1]
    print(f"step {self.steps[-1]} of {name}:\n{last}")
    figures = {
      "errors": inspections.errors(last),
      "telemetry": inspections.curves(self.found, self.steps),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, figure in figures.items():
      figure.suptitle(name)
      written.append(folder / f"{name}-{kind}.png")
      figure.savefig(written[-1], dpi=150)
    return written
