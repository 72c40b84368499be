"""Makes the accuracies by which plans judge codecs, from records of trainings.

  python -m benchmarks.models.package_accuracy
    [--output gradcomp/_src/cost/planner/accuracy.json]

Of each candidate it has the points of accuracy by which it ended above float32 in each
setting: the mean over seeds of the differences, seed by seed, and half of its interval
of 95 %. Those of the study and of its queue count, and three tables of digits. A
candidate of which no training saw all of its data once has none, and so has one that
nobody trained.
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.common import cli
from benchmarks.study import records
from benchmarks.study.analysis import Spread, Study, grouped, spread
from gradcomp._src.cost.planner.candidates import Record

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


# The name of a codec there, the task, the optimizer and the workers, the points above
# float32, and whether it saw all of its data.
Training = tuple[str, tuple[str, str, int], Spread, bool]


def of_study(study: Study) -> Iterator[Training]:
  """Yields the trainings of the study and of its queue."""
  for group in study.groups:
    x = group.setting
    where = f"{x.network} on {x.dataset}", x.optimizer, x.workers
    ended = x.steps * x.batch >= _EPOCH * x.epoch
    for codec in group.runs:
      if codec != "f32" and (found := group.difference(codec)):
        yield codec, where, found, ended


def of_digits() -> Iterator[Training]:
  """Yields the trainings on digits, whose few images are all seen many times."""
  of = "lenet on digits"
  for name in ("codec_study", "aps_study"):
    for table in json.loads((cli.RESULTS / "training" / f"{name}.json").read_text()):
      title = table["title"]
      optimizer = next((x.lower() for x in ("Adam", "LARS") if x in title), "sgd")
      (workers,) = re.findall(r"(\d+) workers", title)
      ends = {row["codec"]: row["accuracy_percent"] for row in table["rows"]}
      for codec, ours in ends.items():
        found = spread([a - b for a, b in zip(ours, ends["f32"], strict=True)])
        if found.count > 1:
          yield codec, (of, optimizer, int(workers)), found, True
  seeds: dict[str, dict[str, float]] = {}
  with (cli.RESULTS / "training" / "digits_lenet_3_seeds.csv").open() as file:
    for row in csv.DictReader(file):  # the last of each training counts
      seeds.setdefault(row["codec"], {})[row["seed"]] = float(row["test_accuracy"])
  for codec, each in seeds.items():
    found = spread([100 * (x - seeds["f32"][i]) for i, x in each.items()])
    yield codec, (of, "sgd", 8), found, True


def accuracies(study: Study) -> dict[str, list[Record]]:
  """Returns the records of each candidate; none if no training went to its end."""
  every = [*of_study(study), *of_digits()]
  made = {}
  for name, codecs in NAMES.items():
    own = [found for found in every if found[0] in codecs]
    some = any(ended for *_, ended in own)
    rounded = lambda x: (x.count, round(x.mean, 2), round(x.half, 2))
    found = [Record(*where, *rounded(points)) for _, where, points, _ in own]
    made[name] = found if some else []
  return made


def written(found: Mapping[str, Sequence[Record]]) -> str:
  """Returns the JSON of the package, a line a record."""
  rows = lambda own: ",\n  ".join(map(json.dumps, own))
  each = [f'"{name}": [\n  {rows(own)}\n ]' for name, own in found.items()]
  return "{\n " + ",\n ".join(each) + "\n}\n"


def main() -> None:
  parser = cli.parser(__doc__, quick="the same", output="JSON file to write")
  options = parser.parse_args()
  folders = (cli.RESULTS / "study" / x for x in ("papers", "evidence"))
  text = written(accuracies(grouped(records.read(*folders))))
  print(text, end="")
  if options.output:
    options.output.write_text(text)


if __name__ == "__main__":
  main()
