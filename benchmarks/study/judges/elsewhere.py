"""Judges what papers say by the records of other benchmarks."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from scipy import stats

from benchmarks.study.analysis import Spread, Study, spread
from benchmarks.study.judges import rules, verdicts
from benchmarks.study.judges.accuracy import OF, blocked
from benchmarks.study.judges.rules import Limit, rule
from benchmarks.study.judges.verdicts import BLIND, COUNTS, FEW, Bar, Seen, judged
from benchmarks.study.model_parallel.layer_errors import PAPER

Look = Callable[[Any], Iterable[Seen]]


def _exact(found: dict[str, float], limit: Limit, numbers: str) -> Seen:
  """Returns whether numbers without intervals keep to a limit, by their labels."""
  bars = tuple(Bar(label, x, x, x, limit) for label, x in found.items())
  sign = 1 if limit.above else -1
  holds = all(sign * (x - limit.value) >= 0 for x in found.values())
  return Seen(holds, numbers, bars=bars)


def _above(found: list[float], than: list[float], widest: float = math.nan) -> Spread:
  """Subtracts seed by seed, with ``widest`` as a lone seed's half."""
  less = spread([a - b for a, b in zip(found, than, strict=True)])
  return less._replace(half=widest) if less.count == 1 else less


def units(way: str) -> Look:
  """Returns what yields whether types of 8 bits end as float32.

  ``way``: ``"model"`` for activations and errors, ``"data"`` for gradients.
  """

  def look(record: Any) -> Iterator[Seen]:
    for x in record["types"]:
      if x["way"] == way:
        yield blocked(f"digits, {x['unit']} units", x["accuracy_percent"])

  return look


def little_error(
  network: str, types: Iterable[str], points: float, relative: float
) -> Look:
  """Yields whether types of 8 bits add at most points and a share to a test error."""

  def look(record: Any) -> Iterator[Seen]:
    arms = record["accuracy_percent"][network]
    full = arms["f32"]
    error = 100 - statistics.fmean(full)
    limit = points * rules.share(error) + relative * error
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
    decide = rule({name: -1.0}).scaled(rules.share(100 - statistics.fmean(full)))
    yield judged(found, decide, what, numbers)


def least_error(record: Any) -> Iterator[Seen]:
  """Yields whether the dynamic tree has the least relative error."""
  for numbers, types in record["as_paper"].items():
    errors = {name: x["relative_percent"] for name, x in types.items()}
    text = ", ".join(f"{name} {error:.1f} %" for name, error in errors.items())
    tree = errors.pop("dynamic_tree")
    limit = Limit(1.0, above=True, unit="the least error of others over the tree's")
    ratio = min(errors.values()) / tree
    yield _exact({numbers: ratio}, limit, f"{numbers}: {text}")


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
      limit, label = Limit(2.0, above=False, unit=unit), f"{kind}, {name}"
      yield _exact({label: apart}, limit, f"{label}: {text}")


def groups_of_16(record: Any) -> Iterator[Seen]:
  """Yields whether sums of (5, 2) in groups of 16 round least, or a tenth more."""
  for what, found in record["formats"]["(5, 2)"].items():
    errors = {size: found[f"sequential {size}"]["mean"] for size in (8, 16, 32, 256)}
    text = ", ".join(f"{size}: {error:.1f} %" for size, error in errors.items())
    ratio = errors[16] / min(errors.values())
    limit = Limit(1.1, above=False, unit="the error of groups of 16 over the least")
    yield _exact({what: ratio}, limit, f"{what}, {text}")


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
  scale = rules.share(100 - statistics.fmean(arms["f32"]))
  found = _above(arms[codec], arms[than], widest)
  seen = judged(found, rule(ends).scaled(scale), label)
  if not rules.can_fail(_beside(arms, widest).values(), scale):
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


def selection(record: Any) -> Iterator[Seen]:
  """Yields whether two searches beat an exact selection of 0.1 %."""
  for numbers, x in record.items():
    if numbers.endswith(" 0.001"):
      seconds = x["seconds"]
      for name in ("trimmed", "sampled, again"):
        ratio = seconds["exact"] / seconds[name]
        label = f"{numbers.split(',')[0]}: {name}"
        limit = Limit(1.0, above=True, unit="times as fast as an exact selection")
        yield _exact({label: ratio}, limit, f"{label} {ratio:.1f} x")


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
        found = {f"{name}{what}": y for what, y in numbers(x).items()}
        yield _exact(found, limit, f"{name}: {text.format(**x)}")

  return look


def union(record: Any) -> Iterator[Seen]:
  """Yields whether few of the elements that workers choose are chosen by several."""
  most = record["workers"] * record["density"]
  numbers = f"{record['workers']} workers: {record['union']:.2%} of {most:.1%} at most"
  limit = Limit(90.0, above=True, unit="% of what they would be if all were others")
  found = {f"{record['workers']} workers": 100 * record["union"] / most}
  yield _exact(found, limit, numbers)


def layers_apart(record: Any) -> Iterator[Seen]:
  """Yields whether layers' gradients have other exponents: a factor of 4 or more."""
  found = {name: x["largest_exponent"] for name, x in record["weights"].items()}
  numbers = ", ".join(f"{name} 2^{x:.0f}" for name, x in found.items())
  apart = max(found.values()) - min(found.values())
  limit = Limit(2.0, above=True, unit="exponents between the largest and the least")
  yield _exact({"all layers": apart}, limit, f"largest: {numbers}")


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
