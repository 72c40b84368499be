"""Makes results of links from the hosts' reports, and joins what runs have measured.

A run is what was measured with one number of hosts, rate and gradient. Its steps may be
from several calls of links/speed.py. So each step keeps the load of the machine before
it, and the time of the plain f32 mean that was measured with it.
"""

import json
import os
import pathlib
import statistics
from typing import Any

from benchmarks.links import launch

_KEY = ("hosts", "rate", "mib", "leaves")


def combine(
  reports: list[dict[str, Any]], kind: str, shared: bool
) -> dict[str, dict[str, Any]]:
  """Makes one entry a program: the slowest host's time; the first is the baseline."""
  results: dict[str, dict[str, Any]] = {}
  for name, first in reports[0][kind].items():
    entries = [report[kind][name] for report in reports]
    seconds = list(map(max, zip(*(e["seconds"] for e in entries), strict=True)))
    sent = max(statistics.median(e["sent"]) for e in entries)
    results[name] = {
      "seconds": seconds,
      "median_seconds": statistics.median(seconds),
      "cpu_seconds_a_host": statistics.mean(
        statistics.median(e["cpu_seconds"]) for e in entries
      ),
      "bytes_sent": sent / len(reports) if shared else sent,
      "bytes_wire_report": first["wire_report"],
    }
    if "crc32" in first:
      results[name]["error"] = first["error"]
      results[name]["same_bits"] = len({e["crc32"] for e in entries}) == 1
      baseline = next(iter(results.values()))["median_seconds"]
      results[name]["baseline_seconds"] = baseline
  return results


def load_note() -> list[float]:
  """Returns the machine's load of the last minute, and its cores."""
  return [os.getloadavg()[0], float(os.cpu_count() or 1)]


def merge(runs: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns the runs with a new one, whose steps join those of the same cell.

  A step, a part or a failure that was there before is replaced, and so is the probe, if
  there is a new one.

  >>> cell = {"hosts": 2, "rate": "1gbit", "mib": 1, "leaves": 1}
  >>> cell |= {"parts": {}}
  >>> old = cell | {"probe": [9.0], "steps": {"a": 1, "b": 1}, "failed": {}}
  >>> new = cell | {"probe": [], "steps": {"b": 2}, "failed": {"c": "hung"}}
  >>> [run] = merge([old], new)
  >>> run["probe"], run["steps"], run["failed"]
  ([9.0], {'a': 1, 'b': 2}, {'c': 'hung'})
  """
  runs = [dict(run) for run in runs]
  for i, old in enumerate(runs):
    if _key(old) != _key(new):
      continue
    joined = old | new | {"probe": new["probe"] or old["probe"]}
    for kind in ("steps", "parts", "failed"):
      joined[kind] = old[kind] | new[kind]
    joined["failed"] = {
      k: v for k, v in joined["failed"].items() if k not in new["steps"]
    }
    runs[i] = joined
    return runs
  return [*runs, new]


def _key(run: dict[str, Any]) -> tuple[Any, ...]:
  return tuple(run[name] for name in _KEY)


def find(
  runs: list[dict[str, Any]], hosts: int, rate: str, leaves: int | str, mib: float = 64
) -> dict[str, Any]:
  """Returns the run of a cell, or raises KeyError."""
  wanted = (hosts, rate, mib, leaves)
  for run in runs:
    if _key(run) == wanted:
      return run
  raise KeyError(wanted)


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
  key = lambda run: (run["rate"], run["hosts"])
  runs = [run for run in found["runs"] if key(run) != key(new)]
  return found | {"runs": [*runs, new]}


def about(run: dict[str, Any]) -> str:
  """Says what links carried, and how busy the machine was."""
  load, cores = run["load_and_cores"]
  return (
    f"Raw TCP carries {8e-6 * min(run['probe']):,.0f} Mbit/s or more. "
    f"{run['repeats']} calls of each program. The load of the machine's {cores:.0f} "
    f"cores was {load:.1f} before."
  )


def speed_up(step: dict[str, Any]) -> float:
  """Returns how many times as fast a step is as its framework's f32."""
  return step["baseline_seconds"] / step["median_seconds"]
