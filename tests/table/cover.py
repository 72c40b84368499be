"""Completes ``rows.txt`` by rows for the pairs that no row has.

``python -m tests.table.cover`` keeps the rows that are there and are allowed, and adds
others by a greedy search. A plain run has each pair of a codec's family, exchange,
feedback, place and number of workers, and each plain setting; ``rows.txt`` marks the
other rows, which have each pair of settings, by ``slow``.
"""

import itertools
import random
from collections.abc import Callable, Iterable

import jax

from tests.support import laws
from tests.table import run
from tests.table.run import Row

_KINDS = {"nesterov": "momentum", "int8": "error", "bfloat16": "error"}


def rows() -> list[Row]:
  """Every row that the library allows."""
  every = itertools.product(
    laws.SETTINGS, run.EXCHANGES, run.FEEDBACK, run.PLACES, run.WORKERS
  )
  return [row for row in itertools.starmap(Row, every) if row.allowed]


def family(row: Row) -> tuple:
  return (type(row.codec).__name__, *row[1:])


def pairs(values: tuple) -> frozenset:
  return frozenset(itertools.combinations(enumerate(values), 2))


def plain(row: Row) -> frozenset:
  """What a plain run must have once: pairs of families, and plain settings."""
  slow = laws.SETTINGS[row.setting].slow
  return pairs(family(row)) | ({row.setting} if not slow else set())


def every(row: Row) -> frozenset:
  """What all rows together must have once: each setting, and pairs of plain ones.

  Kinds of storing and of momentum are one feedback here.
  """
  if laws.SETTINGS[row.setting].slow:
    return frozenset({row.setting})
  return pairs(tuple(row._replace(feedback=_KINDS.get(row.feedback, row.feedback))))


def completed(
  have: Iterable[Row], allowed: list[Row], facts: Callable[[Row], frozenset]
) -> list[Row]:
  """Adds rows until all facts that allowed rows have are there."""
  rng = random.Random(0)
  sets = {row: facts(row) for row in allowed}
  left = frozenset().union(*sets.values()) - frozenset().union(*map(facts, have))
  found, holders = [], {}
  for row, parts in sets.items():
    for part in parts & left:
      holders.setdefault(part, []).append(row)
  while left:
    # A fact that few rows have, and of its rows the one with the most that is missing.
    rarest = min(left, key=lambda part: (len(holders[part]), str(part)))
    candidates = holders[rarest]
    if len(candidates) > 300:
      candidates = rng.sample(candidates, 300)
    best = max(candidates, key=lambda row: len(sets[row] & left))
    found.append(best)
    left -= sets[best]
  return found


def main() -> None:
  jax.config.update("jax_platforms", "cpu")
  allowed = rows()
  known = set(allowed)
  wire, lines = run.read()
  lines = [line for line in lines if line.row in known]
  for facts, slow in ((plain, ""), (every, "slow")):
    have = [line.row for line in lines if slow or not line.slow]
    lines += [run.Line(row, "-", slow) for row in completed(have, allowed, facts)]
  run.write(wire, lines)
  print(f"{len(lines)} rows, {sum(not line.slow for line in lines)} of them plain")


if __name__ == "__main__":
  main()
