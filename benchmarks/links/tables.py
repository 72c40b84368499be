"""Prints what was measured on links, and writes it as Markdown."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmarks.common.tables import table
from benchmarks.links.results import is_theirs, speed_up

_ABOUT = (
  "Medians in milliseconds, from the gradient to its mean; in brackets, how many times "
  "as fast that is as f32 of the same framework. *MB* is what a host sends. Rows that "
  "begin with *ddp* are PyTorch's DistributedDataParallel over gloo, the others ours. "
  "`python -m benchmarks.links speed` writes this file."
)


def show(run: dict[str, Any]) -> None:
  """Prints the steps and the parts of a run beside what their bytes need."""
  rows = run["steps"] | {f"part: {name}": x for name, x in run["parts"].items()}
  found = pd.DataFrame.from_dict(rows, orient="index")
  known = found[["bytes_arithmetic", "bytes_wire_report"]].astype(float)
  formula, report = (known[name].where(known[name] > 0) for name in known)
  shown = pd.DataFrame(
    {
      "ms": 1e3 * found["median_seconds"],
      "least": 1e3 * found["seconds"].map(min),
      "most": 1e3 * found["seconds"].map(max),
      "x f32": found["baseline_seconds"] / found["median_seconds"],
      "wire ms": 8e3 * report / (run["bits_per_second"] or math.nan),
      "CPU ms": 1e3 * found["cpu_seconds_a_host"],
      "MB sent": found["bytes_sent"] / 1e6,
      "/ formula": found["bytes_sent"] / formula,
      "/ HLO": found["bytes_sent"] / report,
      "error": found["error"],
    }
  )
  print(f"\n{run['hosts']} hosts, {run['rate']}, {run['mib']} MiB in {leaves(run)}")
  print(shown.to_string(float_format="{:,.4g}".format, na_rep=""))


def leaves(run: dict[str, Any]) -> str:
  """Names the gradient's leaves.

  Example:
    >>> leaves({"leaves": 1}), leaves({"leaves": "resnet50"})
    ('1 leaf', "ResNet-50's 161 leaves")
  """
  count = run["leaves"]
  if count == "resnet50":
    return "ResNet-50's 161 leaves"
  return f"{count} leaf" if count == 1 else f"{count} leaves"


def markdown(runs: list[dict[str, Any]]) -> str:
  """Writes a table for each gradient and number of hosts, with a column a rate."""
  groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
  for run in sorted(runs, key=lambda run: run["bits_per_second"] or math.inf):
    key = (str(run["leaves"]), run["mib"], run["hosts"])
    groups.setdefault(key, []).append(run)
  paragraphs = ["# Exchanges over limited links", _ABOUT]
  for _, group in sorted(groups.items()):
    first = group[0]
    title = f"## {first['hosts']} hosts, {first['mib']} MiB in {leaves(first)}"
    paragraphs += [title, "\n".join(map(_carried, group)), _by_rates(group)]
  return "\n\n".join(paragraphs) + "\n"


def _by_rates(runs: list[dict[str, Any]]) -> str:
  measured = [run for run in runs if run["steps"] or run["failed"]]
  cells = pd.DataFrame({run["rate"]: dict(_cells(run)) for run in measured}).fillna("")
  sent = pd.DataFrame(
    {
      run["rate"]: {name: x["bytes_sent"] / 1e6 for name, x in run["steps"].items()}
      for run in measured
    }
  ).min(axis=1)
  lines = []
  for name in sorted(cells.index, key=lambda x: (x.startswith("*part"), is_theirs(x))):
    megabytes = f"{sent[name]:.2f}" if name in sent else ""
    lines.append([name, megabytes, *cells.loc[name]])
  return table(["", "MB", *cells.columns], lines)


def _cells(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
  for name, step in run["steps"].items():
    milliseconds = 1e3 * step["median_seconds"]
    digits = 0 if milliseconds >= 10 else 1
    yield name, f"{milliseconds:,.{digits}f} ({speed_up(step):.1f})"
  yield from run["failed"].items()
  for name, part in run["parts"].items():
    yield f"*part:* {name}", f"{1e3 * part['median_seconds']:.1f}"


def _carried(run: dict[str, Any]) -> str:
  """States what raw TCP reached on the links of a run."""
  if not run["probe"]:
    return f"* {run['rate']}: not probed."
  least = 8e-6 * min(run["probe"])
  end = "" if run["steps"] else " This machine does not reach the rate."
  return f"* {run['rate']}: raw TCP carries {least:,.0f} Mbit/s or more.{end}"
