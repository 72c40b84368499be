"""Makes the accuracies by which plans judge codecs, from records of trainings.

  python -m benchmarks.models.package_accuracy
    [--output gradcomp/_src/cost/planner/accuracy.json]

Of each candidate it has the points of accuracy by which it ended above float32, in the
worst of its trainings: the mean over seeds of the differences, seed by seed. Those of
study/command.py and of its queue count, and three tables of digits. A candidate of
which no training saw all of its data once has none, and so has one that nobody trained.
"""

import csv
import json
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.common import cli
from benchmarks.study import records
from benchmarks.study.analysis import Study, grouped

_TABLES = ("codec_study", "aps_study")
_DIGITS = "digits_lenet_3_seeds.csv"
_EPOCH = 0.99  # of an epoch that a training to its end has at least

# Candidates by their names in the records. Those of bfloat16 and APS keep no residual,
# as opposed to the candidates: with errors so small that changes nothing.
NAMES: dict[str, tuple[str, ...]] = {
  "bfloat16": ("bf16",),
  "QSGD-8": ("qsgd-8", "QSGD, 8 bits"),
  "QSGD-4": ("qsgd-4", "QSGD, 4 bits"),
  "QSGD-2": ("qsgd-2", "QSGD, 2 bits, buckets of 128"),
  "QSGD-2 fitted": ("qsgd-2-fitted",),
  "1-bit": ("onebit-64", "1-bit SGD, buckets of 64"),
  "TernGrad": ("terngrad", "terngrad:body", "TernGrad"),
  "APS (5, 2)": ("aps-5-2", "(5, 2), APS"),
  "APS (4, 3)": ("aps-4-3", "(4, 3), APS"),
  "top 1 %": ("redsync-1",),
  "top 0.1 %": ("redsync-0.1",),
  "top 0.1 % ASQ": ("redsync-0.1-asq",),
}


class Training(NamedTuple):
  """A codec's trainings with several seeds.

  Attributes:
    codec: by its name in the record.
    points: of accuracy above float32, the mean over seeds.
    ended: whether it saw all of its data.
  """

  codec: str
  points: float
  ended: bool


def of_study(study: Study) -> Iterator[Training]:
  """Yields the trainings of study/command.py and of its queue."""
  for group in study.groups:
    x = group.setting
    ended = x.steps * x.batch >= _EPOCH * x.epoch
    for codec in group.runs:
      if codec != "f32" and (found := group.difference(codec)):
        yield Training(codec, found.mean, ended)


def of_digits() -> Iterator[Training]:
  """Yields the trainings on digits, whose few images are all seen many times."""
  for name in _TABLES:
    for table in json.loads((cli.RESULTS / "training" / f"{name}.json").read_text()):
      rows = table["rows"]
      (full,) = (row["accuracy_percent"] for row in rows if row["codec"] == "f32")
      for row in rows:
        pairs = zip(row["accuracy_percent"], full, strict=True)
        points = statistics.fmean(a - b for a, b in pairs)
        yield Training(row["codec"], points, ended=True)
  ends: dict[str, dict[str, float]] = {}
  with (cli.RESULTS / "training" / _DIGITS).open() as file:
    for row in csv.DictReader(file):  # the last of each training counts
      ends.setdefault(row["codec"], {})[row["seed"]] = float(row["test_accuracy"])
  for codec, found in ends.items():
    points = statistics.fmean(100 * (x - ends["f32"][i]) for i, x in found.items())
    yield Training(codec, points, ended=True)


def accuracies(study: Study) -> dict[str, float | None]:
  """Returns the points of each candidate; None where no training went to its end."""
  trainings = [*of_study(study), *of_digits()]
  points: dict[str, float | None] = {}
  for name, codecs in NAMES.items():
    found = [x for x in trainings if x.codec in codecs]
    ended = any(x.ended for x in found)
    points[name] = round(min(x.points for x in found), 2) if ended else None
  return points


def main() -> None:
  parser = cli.parser(
    __doc__, quick="the same, which takes seconds", output="JSON file to write"
  )
  options = parser.parse_args()
  folders = (cli.RESULTS / "study" / x for x in ("papers", "evidence"))
  found = accuracies(grouped(records.read(*folders)))
  print(json.dumps(found, indent=1))
  cli.write_json(options.output, found)


if __name__ == "__main__":
  main()
