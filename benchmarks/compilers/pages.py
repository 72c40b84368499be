"""Writes the tables of the record in Markdown."""

import itertools
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.common.tables import page, table
from benchmarks.compilers import bars, record, targets

Row = Mapping[str, Any]

_BROKEN = "**does not compile**"


def head(kind: str, rows: Iterable[Row], **more: Any) -> str:
  """Returns the top of a page, with the versions of the compilers that made it."""
  found = {tuple(row["versions"].items()) for row in rows if "error" not in row}
  each = (", ".join(f"{k} {v}" for k, v in versions) for versions in sorted(found))
  return page(__file__, kind, versions="; ".join(each), **more) + "\n\n"


def line(kind: str, row: Row) -> str:
  if "error" in row:
    return f"{row['target']}, {row['case']}: {row['error']}"
  said = {"codecs": codec_cells, "steps": step_cells, "overlap": overlap_cells}
  cells = " | ".join(said[kind](row))
  return f"{row['target']}, {row['case']}: {cells} ({row['compile_seconds']} s)"


def write(folder: pathlib.Path, kind: str) -> None:
  rows = list(record.read(folder / f"{kind}.jsonl").values())
  pages = {"codecs": codecs, "steps": steps, "overlap": overlap}
  (folder / f"{kind}.md").write_text(pages[kind](rows))


def codecs(rows: list[Row]) -> str:
  groups: dict[str, dict[str, dict[str, Row]]] = {}
  for row in rows:
    codec, *title = row["case"].rsplit(", ", 2)
    groups.setdefault(", ".join(title), {}).setdefault(codec, {})[row["target"]] = row
  common = ", and ".join(
    f"{bar.cycles} x the cycles of `x + 1` and {bar.temporaries} x the leaf to {name}"
    for name, bar in bars.COMMON.items()
  )
  parts = [head("codecs", rows, bars=common)]
  for title, group in groups.items():
    here = [x for x in targets.TARGETS if any(x in found for found in group.values())]
    lines = []
    for codec, found in group.items():
      loops = (str(x["trips"] or "?") for x in found.get("v5e", {}).get("loops", ()))
      lines.append([codec, *(_cell(found.get(x)) for x in here), ", ".join(loops)])
    parts.append(f"## {title}\n\n{table(['codec', *here, 'loops'], lines)}\n\n")
  said = lambda bar: [f"{bar.cycles:g}", f"{bar.temporaries:g}", bar.reason]
  own = [[*name, *said(bar)] for name, bar in bars.own().items()]
  header = ["codec", "operation", "cycles", "temporaries", "why"]
  return "".join(parts) + f"## Bars of their own\n\n{table(header, own)}\n"


def _cell(row: Row | None) -> str:
  if row is None or "error" in row:
    return _BROKEN if row else ""
  (cell,) = codec_cells(row)
  high = any(bars.above(x, bars.COMMON[x["operation"]]) for x in bars.held([row]))
  return f"**{cell}**" if high else cell


def launches(row: Row) -> int:
  """Returns how often a device starts something whose result is an array."""
  return sum(v for k, v in row["launches"].items() if k != "scalars")


def codec_cells(row: Row) -> list[str]:
  kept = f"{row['temporaries'] / row['leaf_bytes']:.2f}"
  if row["cycles"] is None:
    return [f"{launches(row)}, {kept}"]
  moved = sum(row["moved"].values()) / row["leaf_bytes"]
  kernel = " K" * ("tpu_custom_call" in row["kernels"])
  return [f"{bars.taken(row).cycles:.1f}, {kept}, {moved:.1f}{kernel}"]


def steps(rows: list[Row]) -> str:
  size = next((row["gradient"] // 4 for row in rows if "gradient" in row), 0)
  parts = [head("steps", rows, size=size)]
  for target in targets.TARGETS:
    cells = lambda row: [_BROKEN] if "error" in row else step_cells(row)
    alike = [row for row in rows if row["target"] == target]
    if lines := [[row["case"], *cells(row)] for row in alike]:
      parts.append(f"## {target}\n\n{table(_HEAD, lines)}\n\n")
  return "".join(parts)


_HEAD = (
  "method, net and form|cycles|encode, decode, rest, %|moved|temporaries|launches|"
  "scalars|loops|collectives|padding, %|wire|compile, s"
).split("|")


def step_cells(row: Row) -> list[str]:
  unit, gradient = row["unit"], row["gradient"]
  cycles = parts = ""
  if row["cycles"] is not None:
    cycles = f"{sum(row['cycles'].values()) / unit['cycles']:.2f}"
    of = lambda part: f"{100 * row['cycles'].get(part, 0) / unit['cycles']:.0f}"
    parts = ", ".join(map(of, ("encode", "decode", "exchange")))
  sent, padded = row["sent"]["bytes"] or 1, row["sent"]["padded"]
  ratio, wire = row["wire"].get("ratio"), "refused"
  if "error" not in row["wire"]:
    wire = f"{row['wire']['bytes']:,} bytes" if ratio is None else f"{ratio:.4f}"
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
    wire,
    f"{row['compile_seconds']:.0f}",
  ]


def overlap_cells(row: Row) -> list[str]:
  """Returns what a row says of its collectives, and of the bytes of those exposed."""
  said = []
  for kind in dict.fromkeys(x["kind"] for x in row["overlaps"]):
    every = (_beside(x) for x in row["overlaps"] if x["kind"] == kind)
    counted = (f"{len([*run])} {text}" for text, run in itertools.groupby(every))
    said.append(f"{kind}: {', '.join(counted)}")
  return ["; ".join(said), f"{100 * row['exposed_share']:.0f} %"]


def _beside(x: Row) -> str:
  count = x["products"]
  beside = f"{count} product{'s' * (count > 1)}" if count else "work"
  exposed = "bare" if x["exposed"] else f"over {beside}"
  found = "synchronous" if x["synchronous"] else exposed
  return f"{found} ({x['times']} times each)" if x["times"] > 1 else found


def overlap(rows: list[Row]) -> str:
  """Returns the page of what computes beside collectives: targets in their order."""
  cells = lambda row: [_BROKEN, ""] if "error" in row else overlap_cells(row)
  ordered = sorted(rows, key=lambda row: [*targets.TARGETS].index(row["target"]))
  lines = [[row["target"], row["case"], *cells(row)] for row in ordered]
  header = ["target", "exchange", "collectives of each kind, in order", "exposed"]
  return head("overlap", rows) + table(header, lines) + "\n"
