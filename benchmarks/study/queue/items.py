"""Lists the trainings of the evidence queue in the order in which they run."""

import hashlib
import json
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.study.queue.launches import LAUNCHES, Launch
from benchmarks.study.settings import Setting


class Item(NamedTuple):
  """A training of a launch.

  Attributes:
    launch: its name.
    setting: all that the results depend on.
    cpu: seconds of one core that it takes about.
  """

  launch: str
  setting: Setting
  cpu: float

  @property
  def digest(self) -> str:
    """Twelve hexadecimal digits that all settings together make."""
    text = json.dumps(self.setting._asdict())
    return hashlib.sha256(text.encode()).hexdigest()[:12]

  @property
  def title(self) -> str:
    """Says in a line what is trained."""
    x = self.setting
    where = f"{x.link}, {x.hosts} hosts" if x.way == "timed" else f"seed {x.seed}"
    return f"{x.network} on {x.dataset}, {x.name}, N = {x.workers}, {where}"


_FIRST = 3  # seeds that come before the later ones of all launches


def items() -> list[Item]:
  """Returns the trainings of all launches, each in the first that has it."""
  found: dict[Setting, Item] = {}
  for late in (False, True):
    for launch in LAUNCHES:
      seeds = range(launch.seeds)
      for item in _of(launch, seeds[_FIRST:] if late else seeds[:_FIRST]):
        found.setdefault(item.setting, item)
  return list(found.values())


def _of(launch: Launch, seeds: range) -> Iterator[Item]:
  for seed in seeds:
    for arms in launch.arms:
      for setting in arms.settings:
        for codec in arms.codecs:
          cpu = arms.cpu * setting.steps
          yield Item(launch.name, setting._replace(codec=codec, seed=seed), cpu)
