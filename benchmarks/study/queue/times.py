"""Times the steps of the evidence queue's launches on hosts, on a quiet machine.

  make evidence-times     (as root, an hour or two)

The queue leaves them out, for it runs beside other work. It stands still while these
run. What has a record is not timed again.
"""

import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.common import cli
from benchmarks.study import records
from benchmarks.study.queue import items
from benchmarks.study.settings import Setting
from benchmarks.study.tasks import TEXTS

_DATA = {
  True: ("--text", "brown", "--batch-size", "32"),
  False: ("--dataset", "fashion-mnist", "--pixels", "14"),
}


def lines(left: Iterable[Setting]) -> Iterator[tuple[str, str, int, list[str]]]:
  """Yields a network, a rate, hosts, and a study's options that time what is left."""
  cells: dict[tuple[str, str, int, int], list[str]] = {}
  for x in sorted(left, key=lambda x: (x.network, x.link, x.workers)):
    cells.setdefault((x.network, x.link, x.hosts, x.workers), []).append(x.codec)
  for (network, rate, hosts, workers), codecs in cells.items():
    options = ["--networks", network, "--workers", str(workers), "--steps-only", "20"]
    options += [*_DATA[network in TEXTS], "--codecs", *codecs]
    yield network, rate, hosts, options


def main() -> None:
  cli.parser(__doc__).parse_args()
  known = {x.setting for x in records.read(items.RECORDS) if not x.lacking}
  timed = [x for x in items.items() if x.setting.way == "timed"]
  left = {x.setting: x.launch for x in timed if x.setting not in known}
  print(f"{len(left)} of {len(timed)} are left", flush=True)
  for network, rate, hosts, line in lines(left):
    with tempfile.TemporaryDirectory() as output:
      where = ["--rate", rate, "--hosts", str(hosts)] if rate else []
      print(f"{network}, {hosts} hosts, {rate or 'one process'}", flush=True)
      try:
        study = cli.module("benchmarks.study", "run", *where, "--output", output, *line)
        subprocess.run(study, check=True)  # JAX starts once in a process
      finally:  # what was timed before an error counts
        for record in records.read(Path(output)):
          records.append(items.RECORDS / f"{left[record.setting]}.jsonl", *record)


if __name__ == "__main__":
  main()
