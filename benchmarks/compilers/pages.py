"""Writes the tables of the record in Markdown."""

import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.common.tables import table
from benchmarks.compilers import bars, record, targets

Row = Mapping[str, Any]

_CODECS = """\
# What compilers make of the codecs

`make aot`. Nothing ran: these are properties of scheduled programs, and the compilers'
estimates. {versions}.

A cell is `cycles, temporaries, moved`. Cycles are the compiler's estimate for the
program, as a multiple of that for `x + 1` on the same leaf. Temporaries are bytes as a
multiple of the leaf's. *Moved* are the bytes that copies, reshapes and other
instructions write which carry no estimate, as a multiple of the leaf's, so that cycles
are a lower bound. K stands behind them where a kernel of Pallas is in the program: of
that the compiler estimates nothing, and half of what it reads and writes is *moved*.
Programs for GPUs have no estimate: there a cell is `launches, temporaries`. Two slices
have the chips of v5e.

*encode* is a leaf to its payload, *keep* the same and what is left of the leaf,
*decode* a payload to the leaf, and *add* the payloads of eight workers for an eighth of
the leaf to their mean. Loops are those of v5e, by their trips, where the program says
them.

Bars on TPUs are {bars}. A cell above its bar is bold, with a bar of its own below.

"""

_STEPS = """\
# What compilers make of train steps

`make aot`. Nothing ran: these are properties of scheduled programs, and the compilers'
estimates. {versions}.

A transformer of four layers and {size:,} parameters, eight devices, SGD with momentum.
*Cycles* are the compiler's estimate of the whole step, as a multiple of that with JAX's
own mean of gradients in the same net; then the cycles in encoding, decoding and the
rest of the exchange, in percent of the plain step. *Moved* are the bytes without an
estimate that gradcomp's copies and reshapes write, and *temporaries* those of the step
less those of the plain step, both as multiples of the float32 gradient. *Launches* are
what a device starts in a step, and in brackets those of the plain step; *scalars* are
those whose result is no array. *Loops* are those of gradcomp, by their trips.
Collectives with ~ are asynchronous. *Padding* is what the tiles of sent arrays add to
them. *Wire* is what `gradcomp.wire_report` says, as a multiple of float32's, or in
bytes where XLA has left no names that show what float32 would send.

"""


_OVERLAP = """\
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


def line(kind: str, row: Row) -> str:
  """Returns a row as one line of text."""
  if "error" in row:
    return f"{row['target']}, {row['case']}: {row['error']}"
  said: dict[str, Callable[[Row], list[str]]] = {
    "codecs": lambda row: [codec_cell(row)],
    "steps": step_cells,
    "overlap": overlap_cells,
  }
  cells = " | ".join(said[kind](row))
  return f"{row['target']}, {row['case']}: {cells} ({row['compile_seconds']} s)"


def write(folder: pathlib.Path, kind: str) -> None:
  """Writes the page of a table from its record."""
  rows = list(record.read(folder / f"{kind}.jsonl").values())
  pages: dict[str, Callable[[list[Row]], str]] = {
    "codecs": codecs,
    "steps": steps,
    "overlap": overlap,
  }
  (folder / f"{kind}.md").write_text(pages[kind](rows))


def versions(rows: Iterable[Row]) -> str:
  """Returns the versions of the compilers that made the rows."""
  found = {tuple(row["versions"].items()) for row in rows if "error" not in row}
  return "; ".join(", ".join(f"{k} {v}" for k, v in each) for each in sorted(found))


def codecs(rows: list[Row]) -> str:
  """Returns the page of codecs: a table for each operation and leaf."""
  groups: dict[tuple[str, str], dict[str, dict[str, Row]]] = {}
  for row in rows:
    codec, operation, shape = row["case"].rsplit(", ", 2)
    group = groups.setdefault((operation, shape), {})
    group.setdefault(codec, {})[row["target"]] = row
  parts = [_CODECS.format(versions=versions(rows), bars=bars_said())]
  for (operation, shape), group in groups.items():
    here = [x for x in targets.TARGETS if any(x in found for found in group.values())]
    lines = [
      [codec, *(_cell(found.get(x)) for x in here), _loops(found.get("v5e", {}))]
      for codec, found in group.items()
    ]
    parts.append(f"## {operation}, {shape}\n\n")
    parts.append(table(["codec", *here, "loops"], lines) + "\n\n")
  parts.append("## Bars of their own\n\n")
  own = [
    [*name, f"{bar.cycles:g}", f"{bar.temporaries:g}", bar.reason]
    for name, bar in bars.own().items()
  ]
  parts.append(table(["codec", "operation", "cycles", "temporaries", "why"], own))
  return "".join(parts) + "\n"


def bars_said() -> str:
  """Returns the common bars in words."""
  each = [
    f"{bar.cycles} x the cycles of `x + 1` and {bar.temporaries} x the leaf to {name}"
    for name, bar in bars.COMMON.items()
  ]
  return ", and ".join(each)


def _cell(row: Row | None) -> str:
  if row is None:
    return ""
  if "error" in row:
    return "**does not compile**"
  cell = codec_cell(row)
  high = any(bars.above(x, bars.COMMON[x["operation"]]) for x in bars.held([row]))
  return f"**{cell}**" if high else cell


def launches(row: Row) -> int:
  """Returns how often a device starts something whose result is an array."""
  return sum(v for k, v in row["launches"].items() if k != "scalars")


def codec_cell(row: Row) -> str:
  """Returns the numbers of a codec's row."""
  kept = f"{row['temporaries'] / row['leaf_bytes']:.2f}"
  if row["cycles"] is None:
    return f"{launches(row)}, {kept}"
  moved = sum(row["moved"].values()) / row["leaf_bytes"]
  kernel = " K" if "tpu_custom_call" in row["kernels"] else ""
  return f"{bars.cycles(row):.1f}, {kept}, {moved:.1f}{kernel}"


def _loops(row: Row) -> str:
  return ", ".join(str(x["trips"] or "?") for x in row.get("loops", ()))


def steps(rows: list[Row]) -> str:
  """Returns the page of train steps: a table for each target."""
  size = next((row["gradient"] // 4 for row in rows if "gradient" in row), 0)
  parts = [_STEPS.format(versions=versions(rows), size=size)]
  for target in targets.TARGETS:
    own = [row for row in rows if row["target"] == target]
    if not own:
      continue
    lines = [
      [row["case"], *(["**does not compile**"] if "error" in row else step_cells(row))]
      for row in own
    ]
    parts.append(f"## {target}\n\n{table(_HEAD, lines)}\n\n")
  return "".join(parts)


_HEAD = [
  "method, net and form",
  "cycles",
  "encode, decode, rest, %",
  "moved",
  "temporaries",
  "launches",
  "scalars",
  "loops",
  "collectives",
  "padding, %",
  "wire",
  "compile, s",
]


def step_cells(row: Row) -> list[str]:
  """Returns the numbers of a train step's row."""
  unit, gradient = row["unit"], row["gradient"]
  cycles = parts = ""
  if row["cycles"] is not None:
    cycles = f"{sum(row['cycles'].values()) / unit['cycles']:.2f}"
    of = lambda part: f"{100 * row['cycles'].get(part, 0) / unit['cycles']:.0f}"
    parts = ", ".join(map(of, ("encode", "decode", "exchange")))
  sent, padded = row["sent"]["bytes"] or 1, row["sent"]["padded"]
  return [
    cycles,
    parts,
    f"{sum(row['moved'].values()) / gradient:.2f}",
    f"{(row['temporaries'] - unit['temporaries']) / gradient:+.2f}",
    f"{launches(row)} ({unit['launches']})",
    str(row["launches"].get("scalars", 0)),
    ", ".join(str(x or "?") for x in row["loops"]),
    ", ".join(f"{count} {name}" for name, count in row["collectives"].items()),
    f"{100 * (padded - sent) / sent:.0f}" if padded else "",
    _wire(row["wire"]),
    f"{row['compile_seconds']:.0f}",
  ]


def _wire(wire: Row) -> str:
  if "error" in wire:
    return "refused"
  ratio = wire["ratio"]
  return f"{wire['bytes']:,} bytes" if ratio is None else f"{ratio:.4f}"


def overlap_cells(row: Row) -> list[str]:
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


def overlap(rows: list[Row]) -> str:
  """Returns the page of what computes beside collectives: targets in their order."""
  order = list(targets.TARGETS)
  broken = ["**does not compile**", ""]
  lines = [
    [row["target"], row["case"], *(broken if "error" in row else overlap_cells(row))]
    for row in sorted(rows, key=lambda row: order.index(row["target"]))
  ]
  header = ["target", "exchange", "collectives of each kind, in order", "exposed"]
  return _OVERLAP.format(versions=versions(rows)) + table(header, lines) + "\n"
