"""Bars: what a codec's program for a TPU may cost, and which may cost more, and why.

`python -m benchmarks.compilers --bars` writes the numbers of bars.toml anew from the
record, and keeps the reasons. A new bar has none, which a test refuses.
"""

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compilers import record, targets

FILE = Path(__file__).with_name("bars.toml")
_LEAF = "4096 x 4096"  # which the bars are for

Row = Mapping[str, Any]


class Bar(NamedTuple):
  """The most that a program may cost, both as multiples."""

  cycles: float  # of those of ``x + 1`` on the same leaf
  temporaries: float  # of the leaf's bytes
  reason: str = ""  # why it is not the common bar


COMMON = {"encode": Bar(4, 1), "decode": Bar(2, 1)}


def own() -> dict[tuple[str, str], Bar]:
  """Returns the bars of codecs and operations that are above the common ones."""
  found = tomllib.loads(FILE.read_text())
  return {(x, y): Bar(**bar) for x, of in found.items() for y, bar in of.items()}


def taken(row: Row) -> Bar:
  """Returns what a row's program costs."""
  cycles = sum(row["cycles"].values()) / row["unit"]
  return Bar(cycles, row["temporaries"] / row["leaf_bytes"])


def held(rows: Iterable[Row]) -> Iterator[Row]:
  """Yields the rows that have a bar: on TPUs, of the large leaf."""
  for row in rows:
    if "error" not in row and row["shape"] == _LEAF and row["operation"] in COMMON:
      if targets.TARGETS[row["target"]].platform == "tpu":
        yield row


def above(row: Row, bar: Bar) -> bool:
  cycles, kept, _ = taken(row)
  # A part of a tile is behind a leaf: 1 % of this one.
  return cycles > bar.cycles or kept > bar.temporaries + 0.01


def needed(rows: Iterable[Row]) -> dict[tuple[str, str], Bar]:
  """Returns the lowest bars that rows above the common ones need."""
  known, needing = own(), set[tuple[str, str]]()
  bars: dict[tuple[str, str], Bar] = {}
  for row in held(rows):
    name, common = (row["codec"], row["operation"]), COMMON[row["operation"]]
    least = [math.ceil(10 * x) / 10 for x in taken(row)[:2]]
    highest = map(max, bars.get(name, common), least)
    bars[name] = Bar(*highest, known[name].reason if name in known else "")
    needing |= {name} if above(row, common) else set()
  return {name: bar for name, bar in bars.items() if name in needing}


def write() -> None:
  lines = [FILE.read_text().partition("\n\n")[0].strip()]
  rows = record.read(record.FOLDER / "codecs.jsonl").values()
  for (codec, operation), bar in needed(rows).items():
    lines += ["", f'["{codec}".{operation}]', f"cycles = {bar.cycles}"]
    lines += [f"temporaries = {bar.temporaries}", f'reason = "{bar.reason}"']
  FILE.write_text("\n".join(lines) + "\n")
