"""Judges what papers say by the records of other benchmarks."""

import itertools
import math
import statistics
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.study.analysis import Spread, Study, spread
from benchmarks.study.judges import verdicts
from benchmarks.study.judges.accuracy import OF, blocked
from benchmarks.study.judges.verdicts import (
  BLIND,
  COUNTS,
  FEW,
  Bar,
  Limit,
  Seen,
  judged,
  rule,
)

# Mean relative errors in percent of three layers, from table 2 of Dettmers (2016).
PAPER = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
Look = Callable[[Any], Iterable[Seen]]
Exact = Iterator[tuple[dict[str, float], str]]


def exactly(
  value: float, unit: str, *, above: bool = False
) -> Callable[[Callable[[Any], Exact]], Look]:
  """Makes a look of what yields numbers without intervals, by labels, and a text.

  They hold the limit where all of them do.
  """
  limit, sign = Limit(value, above, unit), 1 if above else -1

  def seen(found: dict[str, float], numbers: str) -> Seen:
    bars = tuple(Bar(label, x, x, x, limit) for label, x in found.items())
    holds = all(sign * (x - value) >= 0 for x in found.values())
    return Seen(holds, numbers, bars=bars)

  return lambda look: lambda record: itertools.starmap(seen, look(record))


def _above(found: list[float], than: list[float], widest: float = math.nan) -> Spread:
  """Subtracts seed by seed, with ``widest`` as a lone seed's half."""
  less = spread([a - b for a, b in zip(found, than, strict=True)])
  return less._replace(half=widest) if less.count == 1 else less


def units(way: str) -> Look:
  """Returns what yields whether types of 8 bits end as float32.

  ``way``: ``"model"`` for activations and errors, ``"data"`` for gradients.
  """
  return lambda record: (
    blocked(f"digits, {x['unit']} units", x["accuracy_percent"])
    for x in record["types"]
    if x["way"] == way
  )


def little_error(
  network: str, types: Iterable[str], points: float, relative: float
) -> Look:
  """Yields whether types of 8 bits add at most points and a share to a test error."""

  def look(record: Any) -> Iterator[Seen]:
    arms = record["accuracy_percent"][network]
    full = arms["f32"]
    error = 100 - statistics.fmean(full)
    limit = points * verdicts.share(error) + relative * error
    for name in types:
      found = _above(arms[name], full)
      numbers = f"{{label}} {{found}} of {limit:.2f} points at most"
      yield judged(found, rule({"at_least": -limit}), f"{network}: {name}", numbers)

  return look


def one_bit(record: Any) -> Iterator[Seen]:
  """Yields whether activations of one bit break a net that gradients do not."""
  arms = {(x["unit"], x["way"]): x["accuracy_percent"] for x in record["types"]}
  full = arms["relu", "model"]["f32"]
  ends = {"gradients, with feedback": "at_least", "activations": "at_most"}
  for what, name in ends.items():
    found = _above(record["coarse"][what]["1 bit"], full)
    numbers = "{label}: {found} ({found.seeds})"
    decide = rule({name: -1.0}).scaled(verdicts.share(100 - statistics.fmean(full)))
    yield judged(found, decide, what, numbers)


@exactly(1.0, "the least error of others over the tree's", above=True)
def least_error(record: Any) -> Exact:
  """Yields whether the dynamic tree has the least relative error."""
  for numbers, types in record["as_paper"].items():
    errors = {name: x["relative_percent"] for name, x in types.items()}
    text = ", ".join(f"{name} {error:.1f} %" for name, error in errors.items())
    tree = errors.pop("dynamic_tree")
    yield {numbers: min(errors.values()) / tree}, f"{numbers}: {text}"


@exactly(2.0, "factor between our error and the paper's, at most")
def layers_alike(record: Any) -> Exact:
  """Yields whether relative errors of layers are the paper's, to a factor of 2."""
  for kind, types in PAPER.items():
    for name, theirs in types.items():
      runs = record["errors"][kind][name]
      means = [statistics.fmean(x) for x in zip(*runs, strict=True)]
      ours = means[-len(theirs) :]  # those of activations begin with the inputs
      ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
      text = ", ".join(f"{x:.1f} %" for x in ours)
      label = f"{kind}, {name}"
      yield {label: max(max(x, 1 / x) for x in ratios)}, f"{label}: {text}"


@exactly(1.1, "the error of groups of 16 over the least")
def groups_of_16(record: Any) -> Exact:
  """Yields whether sums of (5, 2) in groups of 16 round least, or a tenth more."""
  for what, found in record["formats"]["(5, 2)"].items():
    errors = {size: found[f"sequential {size}"]["mean"] for size in (8, 16, 32, 256)}
    text = ", ".join(f"{size}: {error:.1f} %" for size, error in errors.items())
    yield {what: errors[16] / min(errors.values())}, f"{what}, {text}"


def _beside(arms: dict[str, list[float]], widest: float) -> dict[str, Spread]:
  """Returns how far arms end above float32, with ``widest`` as a lone seed's half."""
  return {name: _above(x, arms["f32"], widest) for name, x in arms.items()}


def _ends(
  arms: dict[str, list[float]],
  codec: str,
  than: str,
  ends: dict[str, float],
  label: str,
  widest: float = math.nan,
) -> Seen:
  """Returns whether a codec ends as it should among arms on few digits.

  There are 360 of them to test on, of which one is 0.28 points: where they cannot tell
  they do not count beside others.
  """
  scale = verdicts.share(100 - statistics.fmean(arms["f32"]))
  found = _above(arms[codec], arms[than], widest)
  seen = judged(found, rule(ends).scaled(scale), label)
  if not verdicts.can_fail(_beside(arms, widest).values(), scale):
    return seen._replace(rank=BLIND)
  return seen._replace(rank=FEW) if seen.holds is None else seen


def on_digits(
  codecs: Iterable[str], ends: dict[str, float], of: str, than: str = "f32"
) -> Look:
  """Returns what yields whether codecs end as they should beside another on digits.

  A single seed has the deviation of that arm of the record whose seeds differ most.
  ``of``: how the titles of the tables begin that do.
  """

  def look(record: Any) -> Iterator[Seen]:
    parts = {
      x["title"]: {row["codec"]: row["accuracy_percent"] for row in x["rows"]}
      for x in record
    }
    every = (x for arms in parts.values() for x in _beside(arms, 0.0).values())
    widest = max(x.half * math.sqrt(x.count) for x in every)
    for title, arms in parts.items():
      if title.startswith(of) and than in arms:
        what, _, _ = title.partition(";")
        for codec in filter(arms.__contains__, codecs):
          less = "" if than == "f32" else f" - {than}"
          label = f"digits, {what}: {codec}{less}"
          yield _ends(arms, codec, than, ends, label, widest)

  return look


def redsync(
  part: str, names: Iterable[str], ends: dict[str, float], learned: bool = True
) -> Look:
  """Returns what yields how sparse codecs end in a part of the study of RedSync.

  Images have points of accuracy above float32, and texts percents of perplexity.
  ``learned``: whether a text was read once or more.
  """

  def look(record: Any) -> Iterator[Seen]:
    study = record[part]
    metric = study["metric"]
    arms = {
      name: {seed: x["points"][-1][metric] for seed, x in row["runs"].items()}
      for name, row in study["rows"].items()
    }
    full = arms["f32"]
    what = f"{study['title'].split(',')[0]}, {study['steps']:,} steps"
    for name in names:
      label = f"{what}: {name}"
      if metric == "perplexity":
        more = [100 * (x / full[seed] - 1) for seed, x in arms[name].items()]
        text, unit = OF["perplexity"]
        numbers = f"{text} ({{found.seeds}})"
        rank = COUNTS if learned else BLIND
        yield judged(spread(more), rule(ends), label, numbers, unit=unit, rank=rank)
      else:
        runs = {x: [*y.values()] for x, y in arms.items() if y.keys() == full.keys()}
        yield _ends(runs, name, "f32", ends, label)

  return look


@exactly(1.0, "times as fast as an exact selection", above=True)
def selection(record: Any) -> Exact:
  """Yields whether two searches beat an exact selection of 0.1 %."""
  for numbers, x in record.items():
    if numbers.endswith(" 0.001"):
      seconds = x["seconds"]
      for name in ("trimmed", "sampled, again"):
        ratio = seconds["exact"] / seconds[name]
        label = f"{numbers.split(',')[0]}: {name}"
        yield {label: ratio}, f"{label} {ratio:.1f} x"


@exactly(90.0, "% of what they would be if all were others", above=True)
def union(record: Any) -> Exact:
  """Yields whether few of the elements that workers choose are chosen by several."""
  label, most = f"{record['workers']} workers", record["workers"] * record["density"]
  numbers = f"{label}: {record['union']:.2%} of {most:.1%} at most"
  yield {label: 100 * record["union"] / most}, numbers


@exactly(2.0, "exponents between the largest and the least", above=True)
def layers_apart(record: Any) -> Exact:
  """Yields whether layers' gradients have other exponents: a factor of 4 or more."""
  found = {name: x["largest_exponent"] for name, x in record["weights"].items()}
  numbers = ", ".join(f"{name} 2^{x:.0f}" for name, x in found.items())
  yield {"all layers": max(found.values()) - min(found.values())}, f"largest: {numbers}"


@exactly(71.32, "% of zeros", above=True)
def mostly_zeros(record: Any) -> Exact:
  for name, x in record["weights"].items():
    if not name.startswith("conv"):
      yield {name: 100 * x["zeros_clipped"]}, f"{name}: {x['zeros_clipped']:.1%}"


@exactly(1.0, "times the paper's 1.5 % and 3°")
def little_clipped(record: Any) -> Exact:
  for name, x in record["weights"].items():
    found = {f"{name}, length": x["shorter"] / 0.015, f"{name}, angle": x["turned"] / 3}
    yield found, f"{name}: {x['shorter']:.1%}, {x['turned']:.1f}°"


@exactly(1.0, "the bound with clipping over that without")
def closer_bound(record: Any) -> Exact:
  for name, x in record["weights"].items():
    before, after = x["moment"], x["moment_clipped"]
    yield {name: after / before}, f"{name}: {before:.1f} to {after:.1f}"


@verdicts.needing("nothing")
def clipped_gaussian(study: Study) -> Iterable[Seen]:
  """Judges whether clipping Gaussian numbers at 2.5 sigma changes them little."""
  del study
  c, normal = 2.5, stats.norm
  along = 1 - 2 * normal.sf(c)  # the mean of the product of both
  square = along - 2 * c * normal.pdf(c) + 2 * c**2 * normal.sf(c)
  turned = math.degrees(math.acos(along / math.sqrt(square)))
  computed = {"shorter": 1 - math.sqrt(square), "turned": turned}
  return little_clipped({"weights": {"computed": computed}})
