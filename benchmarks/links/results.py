"""Makes results of links from the hosts' reports, and joins what runs have measured.

A run is what was measured with one number of hosts, rate and gradient. Its steps may be
from several calls of links/speed.py. So each step keeps the load of the machine before
it, and the time of the plain f32 mean that was measured with it.
"""

import json
import operator
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.links import launch

_key = operator.itemgetter("hosts", "rate", "mib", "leaves")


def combine(reports: list[Any], kind: str, interface: str) -> dict[str, dict[str, Any]]:
  """Makes one entry a program: the slowest host's time; the first is the baseline."""
  results: dict[str, dict[str, Any]] = {}
  for name, first in reports[0][kind].items():
    entries = [report[kind][name] for report in reports]
    seconds = list(map(max, zip(*(e["seconds"] for e in entries), strict=True)))
    sent = max(statistics.median(e["sent"]) for e in entries)
    cpu = [statistics.median(e["cpu_seconds"]) for e in entries]
    results[name] = {
      "seconds": seconds,
      "median_seconds": statistics.median(seconds),
      "cpu_seconds_a_host": statistics.mean(cpu),
      "bytes_sent": sent / len(reports) if interface == "lo" else sent,
      "bytes_wire_report": first["wire_report"],
    }
    if "crc32" in first:
      results[name]["error"] = first["error"]
      results[name]["same_bits"] = len({e["crc32"] for e in entries}) == 1
      baseline = next(iter(results.values()))["median_seconds"]
      results[name]["baseline_seconds"] = baseline
  return results


def merge(found: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
  """Returns results with a new run, whose steps join those of the same cell.

  A step, a part or a failure that was there before is replaced, and so is the probe, if
  there is a new one.
  """
  runs = {_key(run): run for run in found["runs"]}
  if old := runs.get(_key(new)):
    joined = old | new | {"probe": new["probe"] or old["probe"]}
    joined |= {kind: old[kind] | new[kind] for kind in ("steps", "parts", "failed")}
    for name in new["steps"]:
      joined["failed"].pop(name, None)
    new = joined
  return found | {"runs": [*(runs | {_key(new): new}).values()]}


def find(
  runs: list[dict[str, Any]], hosts: int, rate: str, leaves: int | str, mib: float = 64
) -> dict[str, Any]:
  """Returns the run of a cell, or raises KeyError."""
  return {_key(run): run for run in runs}[hosts, rate, mib, leaves]


def read(path: pathlib.Path | None) -> dict[str, Any]:
  """Returns the results in a file, to join new ones of this machine and JAX to."""
  here = launch.machine()
  if path is None or not path.exists():
    return {"machine": here, "runs": []}
  found = json.loads(path.read_text())
  for name in ("jax", "cpu", "cores"):
    if found["machine"][name] != here[name]:
      raise ValueError(
        f"`output` must have results of this machine: its `{name}` is "
        f"{found['machine'][name]}, and here it is {here[name]}; choose another folder."
      )
  return found | {"machine": here}


def replaced(found: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
  """Returns results with a run in place of the one of its rate and hosts."""
  key = operator.itemgetter("rate", "hosts")
  runs = [run for run in found["runs"] if key(run) != key(new)]
  return found | {"runs": [*runs, new]}


def page(
  found: dict[str, Any], head: str, kind: str, tables: Callable, what: str = ""
) -> str:
  """Says of each run what links carried, and how busy the machine was; then tables."""
  parts = [head]
  for run in found["runs"]:
    load, cores = run["load_and_cores"]
    parts += [
      f"## {run['hosts']} hosts, {run['rate']}",
      f"{what.format(**run)}Raw TCP carries {8e-6 * min(run['probe']):,.0f} Mbit/s or "
      f"more. {run['repeats']} calls of each program. The load of the machine's "
      f"{cores:.0f} cores was {load:.1f} before.",
    ]
    parts += tables(run) if run[kind] else ["This machine does not reach the rate."]
  return "\n\n".join(parts) + "\n"


def speed_up(step: dict[str, Any]) -> float:
  """Returns how many times as fast a step is as its framework's f32."""
  return step["baseline_seconds"] / step["median_seconds"]
