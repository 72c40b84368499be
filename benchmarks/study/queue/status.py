"""Says how far the queue of trainings is: ``make evidence-status``.

Hours are those of CPU time. What a training will take is told by those that ran with
the same network, data, workers and batch, best also with the same codec, and else by
the launch.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.common import locks, quiet
from benchmarks.study import records as study_records
from benchmarks.study.queue import child
from benchmarks.study.queue.start import FOLDERS
from benchmarks.study.queue.supervisor import Folders, Item, queued
from benchmarks.study.records import Record
from benchmarks.study.settings import Setting, step_seconds

_SIZE = "way", "network", "dataset", "workers", "batch"
_ALIKE = (*_SIZE, "codec", "exchange"), _SIZE


Cost = tuple[Setting, float]  # what a step takes, in seconds of CPU time


def costs(
  records: Iterable[Record], running: Iterable[tuple[Item, child.Heartbeat]]
) -> list[Cost]:
  """Returns what is known of steps, from records and from what running ones expect."""
  found = [
    (record.setting, record.results["cpu"] / record.results["points"][-1]["step"])
    for record in records
    if record.lacking is None and "cpu" in record.results
  ]
  return found + [
    (item.setting, beat.estimate / item.setting.steps)
    for item, beat in running
    if beat.estimate is not None
  ]


def expected(item: Item, known: Sequence[Cost]) -> float:
  """Returns the seconds of CPU time that a training will take."""
  found = step_seconds(known, item.setting, *_ALIKE)
  return item.cpu if found is None else found * item.setting.steps


def row(
  items: Sequence[Item],
  records: Mapping[Setting, Record],
  beats: Mapping[str, child.Heartbeat],
  known: Sequence[Cost],
) -> dict[str, Any]:
  """Counts the items of a launch: done, given up, running, waiting, and not queued.

  Seeds are those of which nothing is missing, and all.
  """
  own = queued(items)
  found = [records[item.setting] for item in own if item.setting in records]
  ahead = [item for item in own if item.setting not in records]
  running = [item for item in ahead if item.digest in beats]
  seeds = {item.setting.seed for item in own}
  spent = [record.results.get("cpu", 0.0) for record in found]
  spent += [beats[item.digest].cpu for item in running]
  nothing = child.Heartbeat()
  rest = [
    max(0.0, expected(item, known) - beats.get(item.digest, nothing).cpu)
    for item in ahead
  ]
  return {
    "done": sum(record.lacking is None for record in found),
    "left": sum(record.lacking is not None for record in found),
    "runs": len(running),
    "to do": len(ahead) - len(running),
    "timed": len(items) - len(own),
    "seeds": f"{len(seeds - {x.setting.seed for x in ahead})} of {len(seeds)}",
    "h done": sum(spent) / 3600,
    "h to do": sum(rest) / 3600,
  }


def rows(
  items: Iterable[Item],
  records: Mapping[Setting, Record],
  beats: Mapping[str, child.Heartbeat],
  known: Sequence[Cost],
) -> dict[str, dict[str, Any]]:
  """Returns the row of each launch."""
  launches: dict[str, list[Item]] = {}
  for item in items:
    launches.setdefault(item.launch, []).append(item)
  return {name: row(own, records, beats, known) for name, own in launches.items()}


def page(items: Sequence[Item], folders: Folders, cores: int) -> str:
  """Writes the status of all launches, and of what runs on so many cores."""
  records = {x.setting: x for x in study_records.read(folders.records)}
  queue = locks.holder(folders.lock)
  digests = json.loads(folders.running.read_text()) if folders.running.exists() else []
  beats = {x: child.heartbeat(folders.state(x)) for x in digests if queue}
  known = costs(
    records.values(), [(x, beats[x.digest]) for x in items if x.digest in beats]
  )
  found = pd.DataFrame.from_dict(rows(items, records, beats, known), orient="index")
  ahead = found["h to do"].sum()
  lines = [
    found.to_string(float_format="{:.1f}".format),
    "",
    f"{ahead:.1f} h of CPU time to do: {ahead / cores:.1f} h of {cores} cores",
  ]
  if not queue:
    return "\n".join([*lines, "the queue does not run: make evidence starts it"])
  lines.append(f"the queue runs: {queue}")
  if by := quiet.holder():
    lines.append(f"it waits for a benchmark that takes times: {by}")
  titles = {item.digest: item.title for item in items}
  for digest, beat in beats.items():
    share = f" ({100 * beat.step / beat.steps:.0f} %)" if beat.steps else ""
    whole = "" if beat.estimate is None else f" of about {beat.estimate:.0f}"
    step = f"step {beat.step} of {beat.steps}{share}, {beat.cpu:.0f}{whole} CPU s"
    lines.append(f"  {titles.get(digest, digest)}: {step}")
  return "\n".join(lines)


def main() -> None:
  from benchmarks.study.queue import items as queue_items

  print(page(queue_items.items(), FOLDERS, len(os.sched_getaffinity(0))))


if __name__ == "__main__":
  main()
