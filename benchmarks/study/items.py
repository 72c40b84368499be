"""Lists the runs of a study in their order.

A file of launches/ has them: questions, and the trainings that answer them. The
evidence queue is queue.toml, which says what all words mean.
"""

import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import cli
from benchmarks.study.settings import Setting

RECORDS = cli.RESULTS / "study" / "evidence"  # a file for each launch, which git has
WORK = cli.ROOT / ".evidence"  # all else, which git ignores
LAUNCHES = Path(__file__).with_name("launches")
QUEUE = LAUNCHES / "queue.toml"
_FIRST = 3  # seeds that come before the later ones of all launches


class Item(NamedTuple):
  """A training of a launch."""

  launch: str  # its name, which is that of the file of its records
  setting: Setting  # all that the results depend on
  cpu: float  # seconds of one core that it takes about

  @property
  def digest(self) -> str:
    """Twelve hexadecimal digits that all settings together make."""
    text = json.dumps(self.setting._asdict())
    return hashlib.sha256(text.encode()).hexdigest()[:12]

  @property
  def title(self) -> str:
    x = self.setting
    hosts = f"{x.hosts} hosts, {x.link}" if x.link else "one process"
    where = hosts if x.way == "timed" else f"seed {x.seed}"
    return f"{x.network} on {x.dataset}, {x.name}, N = {x.workers}, {where}"


def items(launches: Path = QUEUE) -> list[Item]:
  """Returns the runs of a file's launches, each in the first launch that has it."""
  named: dict[str, Setting] = {}
  read = tomllib.loads(launches.read_text())
  for name, changes in read["settings"].items():
    named[name] = _setting(named, changes)
  found: dict[Setting, Item] = {}
  for late in (False, True):
    for launch in read["launch"]:
      seeds = range(launch.get("seeds", 5))
      for seed in seeds[_FIRST:] if late else seeds[:_FIRST]:
        for arms in launch["arms"]:
          if seed >= arms.get("seeds", len(seeds)):
            continue
          for setting, codec in itertools.product(_each(named, arms), arms["codecs"]):
            own = setting._replace(codec=codec, seed=seed)
            item = Item(launch["name"], own, arms.get("cpu", 0.0) * own.steps)
            found.setdefault(own, item)
  return list(found.values())


def queued(items: list[Item]) -> list[Item]:
  """Returns the items of a queue: those that are timed need a quiet machine."""
  return [item for item in items if item.setting.way != "timed"]


def _each(named: dict[str, Setting], arms: dict[str, Any]) -> Iterator[Setting]:
  """Yields each setting of some arms with each change of each list of ``vary``."""
  for changes in arms["settings"]:
    for more in itertools.product(*arms.get("vary", [])):
      yield _setting(named, {k: v for x in (changes, *more) for k, v in x.items()})


def _setting(named: dict[str, Setting], changes: dict[str, Any]) -> Setting:
  own = {x: None if value == "none" else value for x, value in changes.items()}
  like = own.pop("like", None)
  return named[like]._replace(**own) if like else Setting(codec="f32", **own)
