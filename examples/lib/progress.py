"""Progress of a run: a bar on a terminal, or at most ten lines in a log."""

import sys
from typing import Any

from tqdm import tqdm


class Progress:
  """Counts the steps of a run, and shows the count on the standard error.

  Args:
    title: of the run.
    steps: how many there will be.
    shown: whether this process shows anything.
  """

  def __init__(self, title: str, steps: int, *, shown: bool = True):
    terminal = sys.stderr.isatty()
    self._title, self._steps, self._done = title, steps, 0
    self._facts: dict[str, str] = {}
    self._lines = shown and not terminal
    self._bar = tqdm(total=steps, desc=title, disable=not (shown and terminal))

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *_: Any) -> None:
    self._bar.close()

  def skip(self, steps: int) -> None:
    """Counts steps that an earlier run did."""
    self._done += steps
    self._bar.update(steps)

  def step(self, **facts: str) -> None:
    """Counts one more step, and shows ``facts`` behind the count from now on."""
    self._facts |= facts
    if facts:
      self._bar.set_postfix(facts, refresh=False)
    self._bar.update()
    tenths = 10 * self._done // self._steps
    self._done += 1
    if self._lines and 10 * self._done // self._steps > tenths:
      known = "".join(f", {name} {value}" for name, value in self._facts.items())
      print(f"{self._title}: {self._done} of {self._steps}{known}", file=sys.stderr)
