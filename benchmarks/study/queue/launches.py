"""Reads which trainings the evidence queue runs, from launches.toml."""

import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.study.settings import Setting


class Arms(NamedTuple):
  """Trainings that are compared: settings, each with each codec.

  Attributes:
    settings: without codecs and seeds.
    codecs: by their names.
    cpu: seconds of one core that a step takes about, which say how long the queue is
      before there are records.
  """

  settings: tuple[Setting, ...]
  codecs: tuple[str, ...]
  cpu: float


class Launch(NamedTuple):
  """A question, and the trainings that answer it.

  Attributes:
    name: a number and a word, which is the name of the file of its records.
    decides: the question.
    arms: that are compared.
    seeds: of each.
  """

  name: str
  decides: str
  arms: tuple[Arms, ...]
  seeds: int = 5


def read(path: Path) -> tuple[Launch, ...]:
  """Reads the launches of a file."""
  found = tomllib.loads(path.read_text())
  named: dict[str, Setting] = {}
  for name, changes in found["settings"].items():
    named[name] = _setting(named, changes)
  return tuple(
    Launch(**entry | {"arms": tuple(_arms(named, **x) for x in entry["arms"])})
    for entry in found["launch"]
  )


def _setting(named: dict[str, Setting], changes: dict[str, Any]) -> Setting:
  own = {x: None if value == "none" else value for x, value in changes.items()}
  like = own.pop("like", None)
  return named[like]._replace(**own) if like else Setting(codec="f32", **own)


def _arms(
  named: dict[str, Setting],
  settings: list[dict[str, Any]],
  codecs: list[str],
  cpu: float,
  vary: list[list[dict[str, Any]]] | None = None,
) -> Arms:
  def each() -> Iterator[Setting]:
    for changes in settings:
      for more in itertools.product(*(vary or [])):
        yield _setting(named, {k: v for x in (changes, *more) for k, v in x.items()})

  return Arms(tuple(each()), tuple(codecs), cpu)


LAUNCHES = read(Path(__file__).with_name("launches.toml"))
