"""Compares the exchanges that link_speed.py timed with what gradcomp.cost predicts.

  python benchmarks/cost_fit.py [--links FILE.json] [--speeds FILE.json ...] [--quick]
    [--output FILE.json]

Links are fitted to the plain f32 mean and to the parts of one two_shot alone. Codecs
have the speeds that codec_speed.py measured for one process that has all cores. Hosts
share them, so that each is slower by their number. All other rows are predicted:
measured and predicted milliseconds, the error, and at last the median and the largest.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import running

import gradcomp
from gradcomp.codecs import QSGD, Dense, EightBit, LeafCodec, OneBit, Ternary
from gradcomp.cost import Cluster, CodecSpeed, Link, crossover_rate, exchange_seconds
from gradcomp.exchange import Hierarchical

_RESULTS = pathlib.Path(__file__).parent / "results"
LINKS = _RESULTS / "link_speed.json"
SPEEDS = (_RESULTS / "codec_speed_jax0.10.2_malloc.json",)
_BASELINE = "plain f32 mean"

# Codecs by their names in link_speed.py, with their names in codec_speed.py.
CODECS: dict[str, tuple[LeafCodec, str]] = {
  "bf16": (Dense(dtype=jnp.bfloat16), "dense-bf16"),
  **{f"qsgd-{bits}": (QSGD(bits=bits), f"qsgd-{bits}") for bits in (2, 4, 8)},
  "qsgd-4 shared": (QSGD(bits=4, share_scale=True), "qsgd-4 shared"),
  **{f"onebit-{n}": (OneBit(bucket_size=n), f"onebit-{n}") for n in (64, 512)},
  "terngrad": (Ternary(), "terngrad"),
  "terngrad-base3": (Ternary(packing="base3"), "terngrad base3"),
  "dynamic-tree": (EightBit(data_type="dynamic_tree"), "dynamic_tree"),
  "linear": (EightBit(data_type="linear"), "linear"),
}


class Row(NamedTuple):
  """Holds a row of link_speed.py, and what is predicted for it, in seconds."""

  hosts: int
  name: str
  measured: float
  predicted: float

  @property
  def error(self) -> float:
    """The relative error of the prediction."""
    return self.predicted / self.measured - 1


def fit_links(runs: Sequence[Mapping[str, Any]]) -> list[Link]:
  """Fits a link to each run, which has no latency that could be told from the bytes."""
  swaps = {run["hosts"]: _factor(run, "all_to_all") for run in runs}
  links = []
  for run in runs:
    n = run["hosts"]
    gather, scatter = _factor(run, "all_gather"), swaps[n]
    reduce = _factor(run, _BASELINE)
    # An all_to_all of two is a swap, and an all-reduce of more is a ring.
    factor = {("all_reduce", n): reduce, ("all_to_all", n): scatter}
    factor |= {("all_gather", n): gather, ("ppermute", n): reduce}
    if 2 in swaps:
      factor["ppermute", 2] = swaps[2]
    links.append(Link(latency=0.0, bytes_per_second=_rate(run), factor=factor))
  return links


def _rate(run: Mapping[str, Any]) -> float:
  plain = run["steps"][_BASELINE]
  if run["bits_per_second"]:
    return run["bits_per_second"] / 8
  return plain["bytes_wire_report"] / plain["median_seconds"]


def _factor(run: Mapping[str, Any], name: str) -> float:
  row = (run["steps"] | run["parts"])[name]
  return row["median_seconds"] * _rate(run) / row["bytes_wire_report"]


def read_speeds(contents: Sequence[Mapping[str, Any]]) -> dict[str, CodecSpeed]:
  """Returns the speeds in files of codec_speed.py, with one process on all cores."""
  speeds: dict[str, CodecSpeed] = {}
  for content in contents:
    for title, row in content.items():
      name, _, size = title.partition(", ")
      if size != str(1 << 24):
        continue
      seconds = {key: value / (1 << 24) for key, value in row["seconds"].items()}
      speeds[name] = CodecSpeed(
        encode=seconds["encode"],
        decode=seconds["decode"],
        add=seconds["decode and sum, a worker"],
      )
      # Shared scales take another pass. This is for files without a row of their own.
      if name == "qsgd-4" and "qsgd-4 shared" not in speeds:
        twice = seconds["encode"] + seconds["copy"]
        shared = dataclasses.replace(speeds[name], encode=twice)
        speeds["qsgd-4 shared"] = shared
  return speeds


def compare(
  runs: Sequence[Mapping[str, Any]], speeds: Mapping[str, CodecSpeed]
) -> list[Row]:
  """Predicts every row that has a codec of known speed, but not those of the fit.

  Args:
    runs: the runs in a file of link_speed.py.
    speeds: from :func:`read_speeds`.
  """
  rows = []
  for run, link in zip(runs, fit_links(runs), strict=True):
    cluster = Cluster(workers=run["hosts"], link=link)
    like = _gradient(run)
    for name, row in run["steps"].items():
      codec, _, way = name.rpartition(" ")
      own, of = CODECS.get(codec, (None, ""))
      if own is None or of not in speeds:
        continue
      exchange = Hierarchical(group_size=2) if way == "hierarchical" else way
      tx = gradcomp.compress(own, axis_name="data", exchange=exchange, feedback=None)
      explanation = gradcomp.explain(tx, like, workers=run["hosts"])
      speed = speeds[of].times(run["hosts"])
      cost = exchange_seconds(explanation, cluster, speed)
      rows.append(Row(run["hosts"], name, row["median_seconds"], cost.total))
  return rows


def _gradient(run: Mapping[str, Any]) -> list[jax.ShapeDtypeStruct]:
  size = run["mib"] * 2**20 // 4 // run["leaves"]
  return [jax.ShapeDtypeStruct((size,), jnp.float32)] * run["leaves"]


def show(rows: Sequence[Row]) -> None:
  """Prints a line a row, and the median and the largest error."""
  print(f"{'hosts':5} {'':24}{'measured ms':>12}{'predicted':>11}{'error':>8}")
  for row in rows:
    print(
      f"{row.hosts:5} {row.name:24}{1e3 * row.measured:12.1f}"
      f"{1e3 * row.predicted:11.1f}{row.error:8.1%}"
    )
  errors = sorted(abs(row.error) for row in rows)
  far = sum(error > 0.2 for error in errors)
  print(
    f"{len(rows)} rows: median error {statistics.median(errors):.1%}, largest "
    f"{errors[-1]:.1%}, {far} above 20 %"
  )


def show_crossovers(
  runs: Sequence[Mapping[str, Any]], speeds: Mapping[str, CodecSpeed]
) -> None:
  """Prints the rates above which a plain mean is faster than QSGD with 4 bits."""
  tx = gradcomp.qsgd(bits=4, axis_name="data", exchange="two_shot")
  for run, link in zip(runs, fit_links(runs), strict=True):
    explanation = gradcomp.explain(tx, _gradient(run), workers=run["hosts"])
    cluster = Cluster(workers=run["hosts"], link=link)
    speed = speeds["qsgd-4"].times(run["hosts"])
    rate = 8e-9 * crossover_rate(explanation, cluster, speed)
    print(f"{run['hosts']} hosts: plain f32 beats qsgd-4 from {rate:.1f} Gbit/s on")


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--links", type=pathlib.Path, default=LINKS)
  parser.add_argument("--speeds", type=pathlib.Path, nargs="+", default=SPEEDS)
  running.add_quick(parser, "the first run of the file alone")
  parser.add_argument("--output", type=pathlib.Path, help="JSON file to write")
  options = parser.parse_args()
  runs = json.loads(options.links.read_text())["runs"]
  runs = runs[:1] if options.quick else runs
  speeds = read_speeds([json.loads(path.read_text()) for path in options.speeds])
  rows = compare(runs, speeds)
  show(rows)
  show_crossovers(runs, speeds)
  if options.output:
    options.output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([row._asdict() | {"error": row.error} for row in rows], indent=1)
    options.output.write_text(text)


if __name__ == "__main__":
  main()
