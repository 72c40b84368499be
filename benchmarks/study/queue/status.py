"""Says how far the queue of trainings is: ``make evidence-status``.

Hours are those of CPU time. What a training will take is told by those that ran with
the same network, data, workers and batch, best also with the same codec, and else by
the launch.
"""

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.common import locks, quiet
from benchmarks.study import records as study_records
from benchmarks.study.queue import child
from benchmarks.study.queue.start import FOLDERS
from benchmarks.study.queue.supervisor import Folders, Item, queued
from benchmarks.study.records import Record
from benchmarks.study.settings import Setting

_SIZE = "way", "network", "dataset", "workers", "batch"
_ALIKE = (*_SIZE, "codec", "exchange"), _SIZE
_HEADER = "launch|done|left|runs|to do|timed|seeds|h done|h to do".split("|")


class Cost(NamedTuple):
  """Says what a step of a training took, in seconds of CPU time."""

  setting: Setting
  seconds: float


def costs(
  records: Iterable[Record], running: Iterable[tuple[Item, child.Heartbeat]]
) -> list[Cost]:
  """Returns what is known of steps, from records and from what running ones expect."""
  found = [
    Cost(record.setting, record.results["cpu"] / record.results["points"][-1]["step"])
    for record in records
    if record.lacking is None and "cpu" in record.results
  ]
  return found + [
    Cost(item.setting, beat.estimate / item.setting.steps)
    for item, beat in running
    if beat.estimate is not None
  ]


def expected(item: Item, known: Sequence[Cost]) -> float:
  """Returns the seconds of CPU time that a training will take."""
  for fields in _ALIKE:
    alike = [
      cost.seconds
      for cost in known
      if all(getattr(cost.setting, x) == getattr(item.setting, x) for x in fields)
    ]
    if alike:
      return statistics.fmean(alike) * item.setting.steps
  return item.cpu


class Row(NamedTuple):
  """A line of the table.

  Attributes:
    done: trainings with results.
    left: those that were given up.
    running: those that run.
    waiting: those that will.
    timed: runs that are not the queue's.
    seeds: those of which nothing is missing, and all.
    spent: hours of CPU time of what was done, left or runs.
    ahead: hours of CPU time of what runs and waits.
  """

  launch: str
  done: int
  left: int
  running: int
  waiting: int
  timed: int
  seeds: tuple[int, int]
  spent: float
  ahead: float


def row(
  launch: str,
  items: Sequence[Item],
  records: Mapping[Setting, Record],
  beats: Mapping[str, child.Heartbeat],
  known: Sequence[Cost],
) -> Row:
  """Counts the items of a launch."""
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
  return Row(
    launch=launch,
    done=sum(record.lacking is None for record in found),
    left=sum(record.lacking is not None for record in found),
    running=len(running),
    waiting=len(ahead) - len(running),
    timed=len(items) - len(own),
    seeds=(len(seeds - {item.setting.seed for item in ahead}), len(seeds)),
    spent=sum(spent) / 3600,
    ahead=sum(rest) / 3600,
  )


def page(items: Sequence[Item], folders: Folders, cores: int) -> str:
  """Writes the status of all launches, and of what runs on so many cores."""
  records = {x.setting: x for x in study_records.read(folders.records)}
  queue = locks.holder(folders.lock)
  digests = json.loads(folders.running.read_text()) if folders.running.exists() else []
  beats = {x: child.heartbeat(folders.state(x)) for x in digests if queue}
  known = costs(
    records.values(), [(x, beats[x.digest]) for x in items if x.digest in beats]
  )
  launches: dict[str, list[Item]] = {}
  for item in items:
    launches.setdefault(item.launch, []).append(item)
  rows = [row(name, own, records, beats, known) for name, own in launches.items()]
  lines = [_line(*_HEADER)]
  for x in rows:
    complete = f"{x.seeds[0]} of {x.seeds[1]}"
    counts = x.done, x.left, x.running, x.waiting, x.timed
    lines.append(_line(x.launch, *counts, complete, f"{x.spent:.1f}", f"{x.ahead:.1f}"))
  ahead = sum(x.ahead for x in rows)
  lines += [
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


def _line(launch: str, *cells: object) -> str:
  return f"{launch:24}" + "".join(f"{cell!s:>8}" for cell in cells)


def main() -> None:
  from benchmarks.study.queue import items as queue_items

  print(page(queue_items.items(), FOLDERS, len(os.sched_getaffinity(0))))


if __name__ == "__main__":
  main()
