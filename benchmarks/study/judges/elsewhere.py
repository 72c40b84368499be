"""Judges what papers say by the records of other benchmarks."""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.study.analysis import Spread, spread
from benchmarks.study.judges.accuracy import blocked
from benchmarks.study.judges.speed import more
from benchmarks.study.judges.verdicts import FEW, Seen, judged, rule
from benchmarks.training.model_parallel.layer_errors import PAPER

Look = Callable[[Any], Iterable[Seen]]


def _differences(found: list[float], than: list[float]) -> Spread:
  return spread([a - b for a, b in zip(found, than, strict=True)])


def units(way: str) -> Look:
  """Returns what yields whether types of 8 bits end as float32.

  ``way``: ``"model"`` for activations and errors, ``"data"`` for gradients.
  """

  def look(record: Any) -> Iterator[Seen]:
    for x in record["types"]:
      if x["way"] == way:
        arms = x["accuracy_percent"]
        holds, text = blocked(arms)
        ends = ", ".join(
          f"{name} {statistics.fmean(y):.2f}" for name, y in arms.items()
        )
        yield Seen(holds, f"digits, {x['unit']} units: {text}; {ends}")

  return look


def little_error(
  network: str, types: Iterable[str], points: float, share: float
) -> Look:
  """Yields whether types of 8 bits add at most points and a share to a test error."""

  def look(record: Any) -> Iterator[Seen]:
    arms = record["accuracy_percent"][network]
    full = arms["f32"]
    error = 100 - statistics.fmean(full)
    for name in types:
      found = _differences(arms[name], full)
      limit = points + share * error
      numbers = f"{name} {found} of {limit:.2f} points at most"
      yield judged(found, rule({"at_least": -limit}), f"{network}: {numbers}")

  return look


def one_bit(record: Any) -> Iterator[Seen]:
  """Yields whether activations of one bit break a net that gradients do not."""
  (full,) = (
    x["accuracy_percent"]["f32"]
    for x in record["types"]
    if (x["unit"], x["way"]) == ("relu", "model")
  )
  ends = {"gradients, with feedback": "at_least", "activations": "at_most"}
  for what, name in ends.items():
    found = _differences(record["coarse"][what]["1 bit"], full)
    numbers = f"{what}: {found} ({found.count} seeds)"
    yield judged(found, rule({name: -1.0}), numbers)


def least_error(record: Any) -> Iterator[Seen]:
  """Yields whether the dynamic tree has the least relative error."""
  for numbers, types in record["as_paper"].items():
    errors = {name: x["relative_percent"] for name, x in types.items()}
    text = ", ".join(f"{name} {error:.1f} %" for name, error in errors.items())
    yield Seen(
      min(errors, key=errors.__getitem__) == "dynamic_tree", f"{numbers}: {text}"
    )


def layers_alike(record: Any) -> Iterator[Seen]:
  """Yields whether relative errors of layers are the paper's, to a factor of 2."""
  for kind, types in PAPER.items():
    for name, theirs in types.items():
      runs = record["errors"][kind][name]
      means = [statistics.fmean(x) for x in zip(*runs, strict=True)]
      ours = means[-len(theirs) :]  # those of activations begin with the inputs
      ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
      text = ", ".join(f"{x:.1f} %" for x in ours)
      holds = 0.5 <= min(ratios) and max(ratios) <= 2
      yield Seen(holds, f"{kind}, {name}: {text}")


def groups_of_16(record: Any) -> Iterator[Seen]:
  """Yields whether sums of (5, 2) in groups of 16 have the least round-off error."""
  for what, found in record["formats"]["(5, 2)"].items():
    errors = {size: found[f"sequential {size}"]["mean"] for size in (8, 16, 32, 256)}
    text = ", ".join(f"{size}: {error:.1f} %" for size, error in errors.items())
    yield Seen(min(errors, key=errors.__getitem__) == 16, f"{what}, {text}")


def on_digits(
  codecs: Iterable[str], ends: dict[str, float], of: str, than: str = "f32"
) -> Look:
  """Returns what yields whether codecs end as they should beside another on digits.

  There are 360 of them to test on, of which one is 0.28 points: where they cannot tell
  they do not count beside others. ``of``: how the titles of the tables begin that do.
  """

  def look(record: Any) -> Iterator[Seen]:
    for part in record:
      rows = {x["codec"]: x["accuracy_percent"] for x in part["rows"]}
      if part["title"].startswith(of) and than in rows:
        what, _, _ = part["title"].partition(";")
        for codec in filter(rows.__contains__, codecs):
          found = _differences(rows[codec], rows[than])
          less = "" if than == "f32" else f" - {than}"
          numbers = f"digits, {what}: {codec}{less} {found} ({found.count} seeds)"
          seen = judged(found, rule(ends), numbers)
          yield seen._replace(rank=FEW) if seen.holds is None else seen

  return look


def redsync(
  part: str, names: Iterable[str], ends: dict[str, float], trained: bool = False
) -> Look:
  """Returns what yields how sparse codecs end in a part of the study of RedSync.

  Images have points of accuracy above float32, and texts percents of perplexity.
  ``trained``: whether this part is of trainings to their end, which decide alone.
  """

  def look(record: Any) -> Iterator[Seen]:
    study = record[part]
    metric = study["metric"]
    last = {
      name: {seed: x["points"][-1][metric] for seed, x in row["runs"].items()}
      for name, row in study["rows"].items()
    }
    full = last["f32"]
    what = f"{study['title'].split(',')[0]}, {study['steps']:,} steps"
    for name in names:
      if metric == "perplexity":
        more = [100 * (x / full[seed] - 1) for seed, x in last[name].items()]
      else:
        more = [x - full[seed] for seed, x in last[name].items()]
      found, unit = spread(more), ", % of perplexity:" * (metric == "perplexity")
      numbers = f"{what}: {name}{unit} {found} ({found.count} seeds)"
      yield judged(found, rule(ends), numbers, own=trained)

  return look


def transfers(record: Any) -> Iterator[Seen]:
  """Yields whether 8 bits bring activations and errors over a link twice as fast."""
  for run in record["runs"]:
    times = {
      tuple(json.loads(name)): x["median_seconds"]
      for name, x in run["programs"].items()
    }
    for (way, sent, *shape), seconds in times.items():
      plain = times.get((way, "lax", *shape))
      if plain and sent not in ("lax", "f32"):
        sizes, ratio = f"{shape[0]} x {shape[1]}", plain / seconds
        numbers = f"{run['hosts']} hosts, {run['rate']}: {way} of {sizes}, {sent}"
        yield Seen(more(ratio, 2.0), f"{numbers} {ratio:.2f} x")


def selection(record: Any) -> Iterator[Seen]:
  """Yields whether two searches beat an exact selection of 0.1 %."""
  for numbers, x in record.items():
    if numbers.endswith(" 0.001"):
      seconds = x["seconds"]
      for name in ("trimmed", "sampled, again"):
        ratio = seconds["exact"] / seconds[name]
        yield Seen(ratio > 1, f"{numbers.split(',')[0]}: {name} {ratio:.1f} x")


def _each_weight(
  holds: Callable[[Any], bool], text: str, but: tuple[str, ...] = ()
) -> Look:
  """Returns what yields whether something holds of each weight's gradient.

  It leaves out the weights whose names begin with one of ``but``.
  """

  def look(record: Any) -> Iterator[Seen]:
    for name, x in record["weights"].items():
      if not name.startswith(but):
        yield Seen(holds(x), f"{name}: {text.format(**x)}")

  return look


def union(record: Any) -> Iterator[Seen]:
  """Yields whether few of the elements that workers choose are chosen by several."""
  most = record["workers"] * record["density"]
  numbers = f"{record['workers']} workers: {record['union']:.2%} of {most:.1%} at most"
  yield Seen(record["union"] >= 0.9 * most, numbers)


def layers_apart(record: Any) -> Iterator[Seen]:
  """Yields whether layers' gradients have other exponents: a factor of 4 or more."""
  found = {name: x["largest_exponent"] for name, x in record["weights"].items()}
  numbers = ", ".join(f"{name} 2^{x:.0f}" for name, x in found.items())
  yield Seen(max(found.values()) - min(found.values()) >= 2, f"largest: {numbers}")


mostly_zeros = _each_weight(
  lambda x: x["zeros_clipped"] >= 0.7132, "{zeros_clipped:.1%}", ("conv",)
)
little_clipped = _each_weight(
  lambda x: x["shorter"] <= 0.015 and x["turned"] <= 3, "{shorter:.1%}, {turned:.1f}°"
)
closer_bound = _each_weight(
  lambda x: x["moment_clipped"] < x["moment"], "{moment:.1f} to {moment_clipped:.1f}"
)
