"""Writes the table of what computes beside collectives in Markdown."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.compilers import targets

Row = Mapping[str, Any]

HEAD = ["target", "exchange", "collectives of each kind, in order", "exposed"]
_PAGE = """\
# What computes beside the collectives of a train step

`make aot`. Nothing ran: this is the order of scheduled programs. {versions}.

Four dense layers of 2048 in bfloat16, unrolled, eight devices with a batch of 2048
each, QSGD with 4 bits in one message, or in one for each layer. Or eight such layers
in a loop, with the exchange behind it, or inside by `parallel.scan`. A name behind them
is an exchange, or a flag of the compiler. A collective is *over* the matrix products
between its start and its end, or over other *work* of more bytes than it sends; with
less it is *bare*, and *synchronous* ones have nothing. The last column is the share of
the bytes sent that is bare or synchronous.

"""


def cells(row: Row) -> list[str]:
  """Returns what a row says of its collectives, and of the bytes of those exposed."""
  kinds: dict[str, list[str]] = {}
  for x in row["overlaps"]:
    kinds.setdefault(x["kind"], []).append(_beside(x))
  said = [f"{kind}: {', '.join(_counted(every))}" for kind, every in kinds.items()]
  return ["; ".join(said), f"{100 * row['exposed_share']:.0f} %"]


def _beside(x: Row) -> str:
  if x["synchronous"]:
    found = "synchronous"
  elif x["exposed"]:
    found = "bare"
  elif x["products"]:
    found = f"over {x['products']} product{'s' * (x['products'] > 1)}"
  else:
    found = "over work"
  return f"{found} ({x['times']} times each)" if x["times"] > 1 else found


def _counted(every: Iterable[str]) -> list[str]:
  """Returns texts with the number of equal ones in a row in front."""
  return [f"{len(list(run))} {text}" for text, run in itertools.groupby(every)]


def page(rows: list[Row], versions: str) -> str:
  """Returns the page: a table with the targets in their order."""
  order = list(targets.TARGETS)
  found = sorted(rows, key=lambda row: order.index(row["target"]))
  lines = [
    [
      row["target"],
      row["case"],
      *(["**does not compile**", ""] if "error" in row else cells(row)),
    ]
    for row in found
  ]
  every = [HEAD, ["---"] * len(HEAD), *lines]
  table = "\n".join(f"| {' | '.join(line)} |" for line in every)
  return _PAGE.format(versions=versions) + table + "\n"
