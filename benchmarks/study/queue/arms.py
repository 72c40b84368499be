"""Trains arms of the queue on a GPU: ``make evidence ARGS="--device gpu --minutes 8"``.

All seeds of an arm that have no record are one program. The order is the queue's, and
float32 comes before the codecs of a launch. Trainings that one device does not emulate
are left to CPUs. Records name the device, and have seconds in place of CPU seconds.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import jax

from benchmarks.study import records, runner
from benchmarks.study.items import Item
from benchmarks.study.queue import train
from benchmarks.study.settings import Setting


def arms(items: Iterable[Item], known: set[Setting]) -> list[list[Item]]:
  """Returns the items that are emulated and not known, those of an arm together."""
  found: dict[Setting, list[Item]] = {}
  for item in items:
    if item.setting.way == "emulated" and item.setting not in known:
      found.setdefault(item.setting._replace(seed=0), []).append(item)
  return list(found.values())


def run(items: Iterable[Item], folder: Path, minutes: float) -> None:
  """Trains until an arm ends after so many minutes; appends what has ended."""
  start = time.monotonic()
  for arm in arms(items, {x.setting for x in records.read(folder)}):
    if time.monotonic() - start > 60 * minutes:
      return
    began, made = time.monotonic(), train.made_with()
    trainer, size = runner.trainer_of(arm[0].setting)
    found = trainer.train_together([x.setting.seed for x in arm])
    seconds = time.monotonic() - began
    print(f"{arm[0].launch}: {arm[0].title} and {len(arm) - 1} more, {seconds:.0f} s")
    made |= {"seconds": round(seconds / len(arm), 1)}
    made |= {"device": jax.devices()[0].device_kind}
    sent = trainer.bytes()
    for item, own in zip(arm, found, strict=True):
      path = folder / f"{item.launch}.jsonl"
      records.append(path, item.setting, train.rounded(own) | sent | made | size)
