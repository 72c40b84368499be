"""Compares the exchanges that links/speed.py timed with what gradcomp.cost predicts.

  python -m benchmarks.models.fit_links [--links FILE.json] [--speeds FILE.json ...]
    [--quick] [--output FILE.json]

Links are fitted to the plain f32 mean and to the parts of one two_shot alone. Codecs
have the speeds that codecs/speed.py measured for one process that has all cores. Hosts
share them, so that each is slower by their number. All other rows are predicted:
measured and predicted seconds, the error, and at last the median and the largest.
"""

import functools
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import gradcomp
from benchmarks.common import cli, tables
from benchmarks.common import shapes as common_shapes
from benchmarks.links.methods import CASES
from gradcomp._src.report.explain import Explanation
from gradcomp.cost import Cluster, CodecSpeed, Link, exchange_seconds

LINKS = cli.RESULTS / "links" / "link_speed.json"
SPEEDS = (cli.RESULTS / "codecs" / "codec_speed_jax0.10.2_malloc.json",)
_BASELINE = "plain f32 mean"
_ELEMENTS = 1 << 24  # of the arrays whose times count
Run = Mapping[str, Any]

# The names that codecs/speed.py has for the cases of links/methods.py.
NAMES = {
  "bf16": "dense-bf16",
  "f16": "dense-f16",
  "qsgd-4 fitted": "qsgd-4 nonuniform",
  "qsgd-2 fitted": "qsgd-2 nonuniform",
  "terngrad-base3": "terngrad base3",
  "dynamic-tree": "dynamic_tree",
  "nvfp4": "nvfp4 stochastic",
  "aps-8": "aps-5-2",
}


class Row(NamedTuple):
  """Holds a row of links/speed.py, and what is predicted for it, in seconds."""

  hosts: int
  rate: str
  name: str
  measured: float
  predicted: float
  error: float  # of the prediction, relative


def read_runs(path: pathlib.Path) -> list[Run]:
  """Returns the runs in a file of links/speed.py, but those whose rate was too high."""
  return [run for run in json.loads(path.read_text())["runs"] if run["steps"]]


def fit_links(runs: Sequence[Run]) -> list[Link]:
  """Fits a link to each run, which has no latency that could be told from the bytes.

  The parts of a two_shot are those of the run, or else of one with as many hosts and
  the same rate.
  """
  links = []
  for run in runs:
    n = run["hosts"]
    parts = _parts(runs, run["rate"], n) or run
    # An all_to_all of two is a swap, and an all-reduce of more is a ring.
    reduce = _factor(run, "steps", _BASELINE)
    factor = {("all_reduce", n): reduce, ("ppermute", n): reduce}
    for name in ("all_gather", "all_to_all"):
      factor[name, n] = _factor(parts, "parts", name)
    pair = _parts(runs, run["rate"], 2)
    if pair:
      factor["ppermute", 2] = _factor(pair, "parts", "all_to_all")
    links.append(Link(latency=0.0, bytes_per_second=_rate(run), factor=factor))
  return links


def _parts(runs: Sequence[Run], rate: str, hosts: int) -> Run | None:
  """Returns a run at a rate that has parts."""
  alike = [run for run in runs if run["rate"] == rate and run["hosts"] == hosts]
  return next((run for run in alike if run["parts"]), None)


def _rate(run: Run) -> float:
  plain = run["steps"][_BASELINE]
  if run["bits_per_second"]:
    return run["bits_per_second"] / 8
  return plain["bytes_wire_report"] / plain["median_seconds"]


def _factor(run: Run, kind: str, name: str) -> float:
  row = run[kind][name]
  return row["median_seconds"] * _rate(run) / row["bytes_wire_report"]


def codec_speed(seconds: Mapping[str, float], scale: float) -> CodecSpeed:
  """Makes a speed from times of codecs/speed.py, and seconds an element for each."""
  times = {key: scale * value for key, value in seconds.items()}
  return CodecSpeed(
    encode=times["encode"],
    decode=times["decode"],
    add=times["decode and sum, a worker"],
    keep=max(0.0, times["update and residual"] - times["update"]),
  )


def read_speeds(contents: Sequence[Mapping[str, Any]]) -> dict[str, CodecSpeed]:
  """Returns the speeds in files of codecs/speed.py, with one process on all cores."""
  return {
    name: codec_speed(row["seconds"], 1 / _ELEMENTS)
    for content in contents
    for title, row in content.items()
    for name, _, size in [title.partition(", ")]
    if size == str(_ELEMENTS)
  }


def compare(runs: Sequence[Run], speeds: Mapping[str, CodecSpeed]) -> list[Row]:
  """Predicts every row that has a codec of known speed, but not those of the fit."""
  rows = []
  for run, link in zip(runs, fit_links(runs), strict=True):
    cluster = Cluster(workers=run["hosts"], link=link)
    for name, row in run["steps"].items():
      codec, _, way = name.rpartition(" ")
      of = NAMES.get(codec, codec)
      if codec not in CASES or of not in speeds:
        continue
      explanation = _explained(codec, way, run["hosts"], run["leaves"], run["mib"])
      cost = exchange_seconds(explanation, cluster, speeds[of].times(run["hosts"]))
      measured, of_row = row["median_seconds"], (run["hosts"], run["rate"], name)
      rows.append(Row(*of_row, measured, cost.total, cost.total / measured - 1))
  return rows


@functools.cache
def _explained(
  codec: str, way: Any, hosts: int, leaves: int | str, mib: int
) -> Explanation:
  """Returns what a step of a run sends, which no rate changes."""
  shapes = common_shapes.resnet50_shapes()
  if leaves != "resnet50":
    shapes = [(mib * 2**20 // 4 // int(leaves),)] * int(leaves)
  like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return gradcomp.explain(CASES[codec].transformation(way), like, workers=hosts)


def main() -> None:
  parser = cli.parser(
    __doc__, quick="the first run of the file alone", output="JSON file to write"
  )
  parser.add_argument("--links", type=pathlib.Path, default=LINKS)
  parser.add_argument("--speeds", type=pathlib.Path, nargs="+", default=SPEEDS)
  options = parser.parse_args()
  runs = read_runs(options.links)
  runs = runs[:1] if options.quick else runs
  speeds = read_speeds([json.loads(path.read_text()) for path in options.speeds])
  rows = compare(runs, speeds)
  tables.show({i: x._asdict() for i, x in enumerate(rows)})
  errors = sorted(abs(row.error) for row in rows)
  far = sum(error > 0.2 for error in errors)
  print(
    f"{len(rows)} rows: median error {statistics.median(errors):.1%}, largest "
    f"{errors[-1]:.1%}, {far} above 20 %"
  )
  cli.write_json(options.output, [x._asdict() for x in rows])


if __name__ == "__main__":
  main()
