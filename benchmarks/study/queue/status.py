"""Says how far the queue of trainings is: ``make evidence-status``.

Hours are those of CPU time. What a training will take is told by those that ran with
the same network, data, workers and batch, best also with the same codec, and else by
the launch.
"""

import collections
import itertools
import json
import operator
import os
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from benchmarks.common import locks, quiet
from benchmarks.study import items as study_items
from benchmarks.study import records as study_records
from benchmarks.study.analysis import in_groups
from benchmarks.study.items import Item
from benchmarks.study.records import Record

_SIZE = "way", "network", "dataset", "workers", "batch"
_ALIKE = operator.attrgetter(*_SIZE, "codec", "exchange"), operator.attrgetter(*_SIZE)
Beats = Mapping[str, Mapping[str, float]]  # steps done, all, and CPU seconds, by digest


def rows(
  items: Iterable[Item],
  records: Iterable[Record],
  beats: Beats = {},  # noqa: B006
) -> dict[str, dict[str, Any]]:
  """Returns of each launch how many items are done, left, begun, waiting and timed."""
  by_setting = {x.setting: x for x in records}
  known: dict[Any, list[float]] = collections.defaultdict(list)  # seconds a step
  for x in by_setting.values():
    if x.lacking is None and x.setting.way != "timed" and "cpu" in x.results:
      for alike in _ALIKE:
        seconds = x.results["cpu"] / x.results["points"][-1]["step"]
        known[alike(x.setting)].append(seconds)

  def expected(item: Item) -> float:
    found = [known[x] for alike in _ALIKE if (x := alike(item.setting)) in known]
    whole = statistics.fmean(found[0]) * item.setting.steps if found else item.cpu
    return max(0.0, whole - beats.get(item.digest, {}).get("cpu", 0.0))

  result = {}
  for name, every in in_groups(items, lambda item: item.launch).items():
    own = study_items.queued(every)
    found = [by_setting[x.setting] for x in own if x.setting in by_setting]
    ahead = [x for x in own if x.setting not in by_setting]
    begun = [beats[x.digest] for x in ahead if x.digest in beats]
    seeds, unseen = ({x.setting.seed for x in some} for some in (own, ahead))
    spent = itertools.chain((x.results for x in found), begun)
    result[name] = {
      "done": sum(x.lacking is None for x in found),
      "left": sum(x.lacking is not None for x in found),
      "begun": len(begun),
      "to do": len(ahead) - len(begun),
      "timed": len(every) - len(own),
      "seeds": f"{len(seeds - unseen)} of {len(seeds)}",
      "h done": sum(x.get("cpu", 0.0) for x in spent) / 3600,
      "h to do": sum(map(expected, ahead)) / 3600,
    }
  return result


def main() -> None:
  work, items = study_items.WORK, study_items.items()
  paths = work.glob("states/*/heartbeat.json")
  beats = {path.parent.name: json.loads(path.read_text()) for path in paths}
  found = rows(items, study_records.read(study_items.RECORDS), beats)
  table = pd.DataFrame.from_dict(found, orient="index")
  ahead, cores = table["h to do"].sum(), len(os.sched_getaffinity(0))
  print(table.to_string(float_format="{:.1f}".format))
  print(f"\n{ahead:.1f} h of CPU time to do: {ahead / cores:.1f} h of {cores} cores")
  queue = locks.holder(work / "queue.lock")
  print(f"the queue runs: {queue}" if queue else "make evidence starts the queue")
  if by := quiet.holder():
    print(f"a benchmark takes times, and trainings wait: {by}")
  titles = {item.digest: item.title for item in items}
  for digest, x in beats.items():
    done = f"step {x['step']} of {x['steps']}, {x['cpu']:.0f} CPU s"
    print(f"  {titles.get(digest, digest)}: {done}")


if __name__ == "__main__":
  main()
