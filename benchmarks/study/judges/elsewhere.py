"""Judges what papers say by the records of other benchmarks."""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.study.analysis import Spread, spread
from benchmarks.study.judges.accuracy import OF, blocked
from benchmarks.study.judges.speed import GAIN, more, timed
from benchmarks.study.judges.verdicts import FEW, Bar, Limit, Seen, judged, rule
from benchmarks.study.model_parallel.layer_errors import PAPER

Look = Callable[[Any], Iterable[Seen]]


def _point(label: str, value: float, limit: Limit) -> tuple[Bar, ...]:
  """Returns the bar of a number without an interval."""
  return (Bar(label, value, value, value, limit),)


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
        found = blocked(arms)
        ends = ", ".join(
          f"{name} {statistics.fmean(y):.2f}" for name, y in arms.items()
        )
        where = f"digits, {x['unit']} units"
        numbers = f"{where}: {found.text}; {ends}"
        yield Seen(found.holds, numbers, bars=found.bars(where))

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
      numbers = f"{{label}} {{found}} of {limit:.2f} points at most"
      yield judged(found, rule({"at_least": -limit}), f"{network}: {name}", numbers)

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
    numbers = "{label}: {found} ({found.count} seeds)"
    yield judged(found, rule({name: -1.0}), what, numbers)


def least_error(record: Any) -> Iterator[Seen]:
  """Yields whether the dynamic tree has the least relative error."""
  for numbers, types in record["as_paper"].items():
    errors = {name: x["relative_percent"] for name, x in types.items()}
    text = ", ".join(f"{name} {error:.1f} %" for name, error in errors.items())
    tree = errors.pop("dynamic_tree")
    least = min(errors.values())
    limit = Limit(1.0, above=True, unit="the least error of others over the tree's")
    bars = _point(numbers, least / tree, limit)
    yield Seen(tree < least, f"{numbers}: {text}", bars=bars)


def layers_alike(record: Any) -> Iterator[Seen]:
  """Yields whether relative errors of layers are the paper's, to a factor of 2."""
  for kind, types in PAPER.items():
    for name, theirs in types.items():
      runs = record["errors"][kind][name]
      means = [statistics.fmean(x) for x in zip(*runs, strict=True)]
      ours = means[-len(theirs) :]  # those of activations begin with the inputs
      ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
      text = ", ".join(f"{x:.1f} %" for x in ours)
      apart = max(max(x, 1 / x) for x in ratios)
      unit = "factor between our error and the paper's, at most"
      bars = _point(f"{kind}, {name}", apart, Limit(2.0, above=False, unit=unit))
      yield Seen(apart <= 2, f"{kind}, {name}: {text}", bars=bars)


def groups_of_16(record: Any) -> Iterator[Seen]:
  """Yields whether sums of (5, 2) in groups of 16 have the least round-off error."""
  for what, found in record["formats"]["(5, 2)"].items():
    errors = {size: found[f"sequential {size}"]["mean"] for size in (8, 16, 32, 256)}
    text = ", ".join(f"{size}: {error:.1f} %" for size, error in errors.items())
    least = errors.pop(16)
    ratio = min(errors.values()) / least
    limit = Limit(1.0, above=True, unit="the least error of other groups over 16's")
    yield Seen(ratio > 1, f"{what}, {text}", bars=_point(what, ratio, limit))


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
          seen = judged(found, rule(ends), f"digits, {what}: {codec}{less}")
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
      text, unit = OF["perplexity" if metric == "perplexity" else "difference"]
      yield judged(
        spread(more),
        rule(ends),
        f"{what}: {name}",
        f"{text} ({{found.count}} seeds)",
        unit=unit,
        own=trained,
      )

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
        label = f"{run['hosts']} hosts, {run['rate']}: {way} of {sizes}, {sent}"
        bar = timed(label, ratio, Limit(2.0, above=True, unit=GAIN))
        yield Seen(more(ratio, 2.0), f"{label} {ratio:.2f} x", bars=(bar,))


def selection(record: Any) -> Iterator[Seen]:
  """Yields whether two searches beat an exact selection of 0.1 %."""
  for numbers, x in record.items():
    if numbers.endswith(" 0.001"):
      seconds = x["seconds"]
      for name in ("trimmed", "sampled, again"):
        ratio = seconds["exact"] / seconds[name]
        label = f"{numbers.split(',')[0]}: {name}"
        limit = Limit(1.0, above=True, unit="times as fast as an exact selection")
        bars = _point(label, ratio, limit)
        yield Seen(ratio > 1, f"{label} {ratio:.1f} x", bars=bars)


def _each_weight(
  numbers: Callable[[Any], dict[str, float]],
  limit: Limit,
  text: str,
  but: tuple[str, ...] = (),
) -> Look:
  """Returns what yields whether numbers of each weight's gradient keep to a limit.

  It leaves out the weights whose names begin with one of ``but``. ``numbers``: by what
  they are of.
  """

  def look(record: Any) -> Iterator[Seen]:
    for name, x in record["weights"].items():
      if not name.startswith(but):
        found = numbers(x)
        bars = tuple(Bar(f"{name}{what}", y, y, y, limit) for what, y in found.items())
        holds = all(
          y >= limit.value if limit.above else y <= limit.value for y in found.values()
        )
        yield Seen(holds, f"{name}: {text.format(**x)}", bars=bars)

  return look


def union(record: Any) -> Iterator[Seen]:
  """Yields whether few of the elements that workers choose are chosen by several."""
  most = record["workers"] * record["density"]
  numbers = f"{record['workers']} workers: {record['union']:.2%} of {most:.1%} at most"
  limit = Limit(90.0, above=True, unit="% of what they would be if all were others")
  bars = _point(f"{record['workers']} workers", 100 * record["union"] / most, limit)
  yield Seen(record["union"] >= 0.9 * most, numbers, bars=bars)


def layers_apart(record: Any) -> Iterator[Seen]:
  """Yields whether layers' gradients have other exponents: a factor of 4 or more."""
  found = {name: x["largest_exponent"] for name, x in record["weights"].items()}
  numbers = ", ".join(f"{name} 2^{x:.0f}" for name, x in found.items())
  apart = max(found.values()) - min(found.values())
  limit = Limit(2.0, above=True, unit="exponents between the largest and the least")
  bars = _point("all layers", apart, limit)
  yield Seen(apart >= 2, f"largest: {numbers}", bars=bars)


mostly_zeros = _each_weight(
  lambda x: {"": 100 * x["zeros_clipped"]},
  Limit(71.32, above=True, unit="% of zeros"),
  "{zeros_clipped:.1%}",
  ("conv",),
)
little_clipped = _each_weight(
  lambda x: {", length": x["shorter"] / 0.015, ", angle": x["turned"] / 3},
  Limit(1.0, above=False, unit="times the paper's 1.5 % and 3°"),
  "{shorter:.1%}, {turned:.1f}°",
)
closer_bound = _each_weight(
  lambda x: {"": x["moment_clipped"] / x["moment"]},
  Limit(1.0, above=False, unit="the bound with clipping over that without"),
  "{moment:.1f} to {moment_clipped:.1f}",
)
