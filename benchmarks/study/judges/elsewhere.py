"""Judges what papers say by the records of other benchmarks."""

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.study.analysis import Spread, spread
from benchmarks.study.judges.accuracy import (
  FAILS,
  Seen,
)
from benchmarks.training.model_parallel.data_types import anova
from benchmarks.training.model_parallel.layer_errors import PAPER

Look = Callable[[Any], Iterable[Seen]]


def _differences(found: list[float], than: list[float]) -> Spread:
  return spread([a - b for a, b in zip(found, than, strict=True)])


def units(record: Any) -> Iterator[Seen]:
  """Yields whether types of 8 bits for activations end as float32."""
  for x in record["types"]:
    if x["way"] == "model":
      found = anova(list(x["accuracy_percent"].values()))
      numbers = f"{x['unit']} units: F = {found['F']:.2f}, p = {found['p']:.2f}"
      yield Seen(found["p"] > 0.05, numbers)


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
      yield Seen(found.at_least(-limit), f"{network}: {numbers}")

  return look


def one_bit(record: Any) -> Iterator[Seen]:
  """Yields whether activations of one bit break a net that gradients do not."""
  (full,) = (
    x["accuracy_percent"]["f32"]
    for x in record["types"]
    if (x["unit"], x["way"]) == ("relu", "model")
  )
  for what, least in (("gradients, with feedback", True), ("activations", False)):
    found = _differences(record["coarse"][what]["1 bit"], full)
    holds = found.at_least(-FAILS) if least else found.is_below(-FAILS)
    yield Seen(holds, f"{what}: {found} ({found.count} seeds)")


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


def lars(record: Any) -> Iterator[Seen]:
  """Yields whether APS with 8 bits does for LARS."""
  (rows,) = (x["rows"] for x in record if x["title"].startswith("LARS"))
  ends = {x["codec"]: x["accuracy_percent"] for x in rows}
  for name in ("(5, 2), APS", "(4, 3), APS"):
    found = _differences(ends[name], ends["f32"])
    yield Seen(found.at_least(-0.2), f"digits: {name} {found} ({found.count} seeds)")


def worse_on_digits(codec: str, than: str) -> Look:
  """Returns what yields whether a codec is worse where Adam learns few digits."""

  def look(record: Any) -> Iterator[Seen]:
    (rows,) = (x["rows"] for x in record if "Adam" in x["title"])
    ends = {x["codec"]: x["accuracy_percent"] for x in rows}
    found = _differences(ends[codec], ends[than])
    numbers = f"digits, 360 images: {codec} - {than} {found} ({found.count} seeds)"
    yield Seen(found.is_below(0.0), numbers)

  return look


def perplexity(names: Iterable[str]) -> Look:
  """Returns what yields whether RedSync does in a long training on a text."""

  def look(record: Any) -> Iterator[Seen]:
    study = record["language-long"]
    ends = {
      name: {seed: x["points"][-1]["perplexity"] for seed, x in row["runs"].items()}
      for name, row in study["rows"].items()
    }
    for name in names:
      found = spread([100 * (x / ends["f32"][i] - 1) for i, x in ends[name].items()])
      numbers = f"{study['steps']:,} steps: {name}, % above f32's: {found}"
      yield Seen(found.at_most(1.0), f"{numbers} ({found.count} seeds)")

  return look


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
  lambda x: x["zeros_clipped"] >= 0.7, "{zeros_clipped:.1%}", ("conv",)
)
little_clipped = _each_weight(
  lambda x: x["shorter"] <= 0.015 and x["turned"] <= 3, "{shorter:.1%}, {turned:.1f}°"
)
closer_bound = _each_weight(
  lambda x: x["moment_clipped"] < x["moment"], "{moment:.1f} to {moment_clipped:.1f}"
)
