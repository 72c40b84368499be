"""Times the steps of the evidence queue's launches on hosts, on a quiet machine.

  make evidence-times     (as root, an hour or two)

The queue leaves them out, for it runs beside other work. It stands still while these
run. What has a record is not timed again.
"""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.common import cli
from benchmarks.study import command, records
from benchmarks.study.queue import items
from benchmarks.study.settings import Setting
from benchmarks.study.tasks import TEXTS

_DATA = {
  True: ("--text", "brown", "--batch-size", "32"),
  False: ("--dataset", "fashion-mnist", "--pixels", "14"),
}


def lines(left: Iterable[Setting]) -> Iterator[tuple[str, str, int, list[str]]]:
  """Yields a network, a rate, hosts, and a study's options that time what is left."""
  cells: dict[tuple[str, str, int], list[str]] = {}
  for x in sorted(left, key=lambda x: (x.network, x.link, x.hosts)):
    cells.setdefault((x.network, x.link, x.hosts), []).append(x.codec)
  for (network, rate, hosts), codecs in cells.items():
    options = ["--networks", network, *_DATA[network in TEXTS], "--steps-only", "20"]
    yield network, rate, hosts, [*options, "--codecs", *codecs]


def main() -> None:
  cli.parser(__doc__).parse_args()
  folder = items.RECORDS
  known = {x.setting for x in records.read(folder) if not x.lacking}
  timed = [x for x in items.items() if x.setting.way == "timed"]
  left = {x.setting: x.launch for x in timed if x.setting not in known}
  print(f"{len(left)} of {len(timed)} are left", flush=True)
  for network, rate, hosts, line in lines(left):
    with tempfile.TemporaryDirectory() as output:
      where = ["--rate", rate, "--hosts", str(hosts), "--output", output]
      print(f"{network}, {hosts} hosts, {rate}", flush=True)
      try:
        command.main(["run", *where, *line])
      finally:  # what was timed before an error counts
        for record in records.read(Path(output)):
          path = folder / f"{left[record.setting]}.jsonl"
          records.append(path, *record)


if __name__ == "__main__":
  main()
