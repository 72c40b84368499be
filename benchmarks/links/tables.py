"""Prints what was measured on links, and writes it as Markdown."""

from typing import Any

from benchmarks.links.results import is_theirs, speed_up

_FAR = 1.3  # times the wire bound: too far for a measurement of the link


def show(run: dict[str, Any]) -> None:
  """Prints the tables of a run."""
  rate = run["bits_per_second"]
  print(
    f"\n{run['hosts']} hosts, {run['rate']}, {run['mib']} MiB of f32 in "
    f"{leaves(run)}, {run['repeats']} repeats"
  )
  if run["probe"]:
    speed = ", ".join(f"{8e-6 * value:,.0f}" for value in run["probe"])
    of_rate = f": {8 * min(run['probe']) / rate:.2f} of the rate" if rate else ""
    print(f"raw TCP, all hosts sending and receiving: {speed} Mbit/s{of_rate}")
  if not run["steps"]:
    return
  print(
    f"{'':32}{'ms':>7}  {'(min - max)':>15}{'x f32':>7}{'wire ms':>9}{'CPU ms':>8}"
    f"{'MB sent':>9}{'/ formula':>11}{'/ HLO':>8}{'error':>9}"
  )
  for name, row in (run["steps"] | run["parts"]).items():
    median, seconds = row["median_seconds"], row["seconds"]
    spread = f"({1e3 * min(seconds):.0f} - {1e3 * max(seconds):.0f})"
    known = rate and row["bytes_wire_report"]
    bound = f"{8e3 * row['bytes_wire_report'] / rate:.1f}" if known else ""
    is_step = name in run["steps"]
    ratio = f"{speed_up(row):.2f}" if is_step else ""
    error = f"{row['error']:.4f}" if is_step else ""
    print(
      f"{name if is_step else '  part: ' + name:32}{1e3 * median:7.1f}  {spread:>15}"
      f"{ratio:>7}{bound:>9}{1e3 * row['cpu_seconds_a_host']:8.1f}"
      f"{row['bytes_sent'] / 1e6:9.3f}{_ratio(row, 'bytes_arithmetic'):>11}"
      f"{_ratio(row, 'bytes_wire_report'):>8}{error:>9}"
      f"{'' if row.get('same_bits', True) else '  THE HOSTS DIFFER'}"
    )
  for name, how in run["failed"].items():
    print(f"{name:32}{how}")
  if not rate:
    print("NOT A MEASUREMENT OF A LINK: nothing limits it, all is memory and cores.")
    return
  baseline = next(iter(run["steps"].values()))
  if baseline["bytes_wire_report"]:
    far = baseline["median_seconds"] * rate / 8 / baseline["bytes_wire_report"]
    verdict = "" if far < _FAR else ": TOO FAR FOR A MEASUREMENT OF THE LINK"
    print(f"plain f32 takes {far:.2f} x its wire bound{verdict}.")


def _ratio(row: dict[str, Any], key: str) -> str:
  return f"{row['bytes_sent'] / row[key]:.3f}" if row[key] else "-"


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
  """Writes a table for each gradient and number of hosts, with a column a rate.

  An entry is the median in milliseconds, and how many times as fast that is as f32 of
  the same framework.
  """
  groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
  for run in runs:
    key = (str(run["leaves"]), run["mib"], run["hosts"])
    groups.setdefault(key, []).append(run)
  lines = [
    "# Exchanges over limited links",
    "",
    "Medians in milliseconds, from the gradient to its mean; in brackets, how many",
    "times as fast that is as f32 of the same framework. *MB* is what a host sends.",
    "Rows that begin with *ddp* are PyTorch's DistributedDataParallel over gloo, the",
    "others ours.",
    "`python -m benchmarks.links.speed` writes this file.",
  ]
  for key in sorted(groups, key=lambda key: (key[0], key[1], key[2])):
    lines += ["", *_table(sorted(groups[key], key=_speed))]
  return "\n".join(lines) + "\n"


def _speed(run: dict[str, Any]) -> float:
  return run["bits_per_second"] or float("inf")


def _table(runs: list[dict[str, Any]]) -> list[str]:
  first = runs[0]
  rows = dict.fromkeys(name for run in runs for name in [*run["steps"], *run["failed"]])
  parts = dict.fromkeys(name for run in runs for name in run["parts"])
  measured = [run for run in runs if run["steps"] or run["failed"]]
  lines = [
    f"## {first['hosts']} hosts, {first['mib']} MiB in {leaves(first)}",
    "",
    *(_carried(run) for run in runs),
    "",
    f"| | MB | {' | '.join(run['rate'] for run in measured)} |",
    f"|---|---|{'---|' * len(measured)}",
  ]
  for name in sorted(rows, key=is_theirs):
    cells = [_entry(run, name) for run in measured]
    sent = [
      run["steps"][name]["bytes_sent"] for run in measured if name in run["steps"]
    ]
    megabytes = f"{min(sent) / 1e6:.2f}" if sent else ""
    lines.append(f"| {name} | {megabytes} | {' | '.join(cells)} |")
  for name in parts:
    cells = [
      f"{1e3 * run['parts'][name]['median_seconds']:.1f}"
      if name in run["parts"]
      else ""
      for run in measured
    ]
    lines.append(f"| *part:* {name} | | {' | '.join(cells)} |")
  return lines


def _entry(run: dict[str, Any], name: str) -> str:
  if step := run["steps"].get(name):
    milliseconds = 1e3 * step["median_seconds"]
    digits = 0 if milliseconds >= 10 else 1
    return f"{milliseconds:,.{digits}f} ({speed_up(step):.1f})"
  return run["failed"].get(name, "")


def _carried(run: dict[str, Any]) -> str:
  """Tells what raw TCP reached on the links of a run."""
  if not run["probe"]:
    return f"* {run['rate']}: not probed."
  least = 8e-6 * min(run["probe"])
  end = "" if run["steps"] else " This machine does not reach the rate."
  return f"* {run['rate']}: raw TCP carries {least:,.0f} Mbit/s or more.{end}"
