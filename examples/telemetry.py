"""Keeps what steps show of the compression, and reports it as a table and plots."""

import argparse
from pathlib import Path
from typing import Any

import jax

from gradcomp import plots


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the options of a trainer that shows what compression does to each leaf."""
  group = parser.add_argument_group("telemetry")
  group.add_argument(
    "--inspect",
    type=int,
    metavar="K",
    help="inspect what is sent every K steps: a table at the end, and three plots",
  )
  group.add_argument(
    "--output", type=Path, default=Path("results"), help="folder of the plots"
  )


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
    """Returns True for steps that are inspected: the first, and each ``every`` on.

    In place of such a step, the last of its round is.
    """
    if self.every is None or number % self.round_steps:
      return False
    before = (number - 1 - self.round_steps) // self.every  # those in earlier rounds
    return (number - 1) // self.every > before

  def keep(self, number: int, metrics: Any) -> None:
    """Keeps what a step has shown, if it was inspected."""
    if self.takes(number):
      self.steps.append(number)
      self.found.append(jax.device_get(metrics["inspection"]))

  def write(self, folder: Path, name: str) -> list[Path]:
    """Prints the last inspection as a table, and draws three figures in the folder.

    Returns:
      The paths of the figures; none where nothing was inspected.
    """
    if not self.found:
      return []
    last = self.found[-1]
    print(f"step {self.steps[-1]} of {name}:\n{last}")
    figures = {
      "exponents": plots.exponents(last),
      "errors": plots.errors(last),
      "telemetry": plots.curves(self.found, self.steps),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, figure in figures.items():
      figure.suptitle(name)
      written.append(folder / f"{name}-{kind}.png")
      figure.savefig(written[-1], dpi=150)
    return written
