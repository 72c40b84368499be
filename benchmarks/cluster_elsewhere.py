"""Lists findings that other benchmarks measured, and judges them by their records."""

import functools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from arms import TYPES, anova
from cluster_numbers import Spread, spread
from cluster_verdicts import FAILS, Finding, Judge, Seen, Verdict, concluded
from layer_errors import PAPER

RESULTS = Path(__file__).parent / "results"
Look = Callable[[Any], Iterable[Seen]]


def of(benchmark: str, look: Look, record: str | None = None) -> Judge:
  """Returns a judge of what a benchmark measured.

  Args:
    benchmark: its file without the suffix.
    look: yields what the JSON of its record says.
    record: the record's file, if it has another name.
  """

  def judge(study: Any) -> Verdict:
    del study
    path = RESULTS / f"{record or benchmark}.json"
    seen = look(json.loads(path.read_text())) if path.exists() else ()
    return concluded(seen, f"{path.name} of {benchmark}.py, or more seeds in it")

  return judge


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
  """Returns what yields whether types of 8 bits add little to a test error.

  Args:
    network: as the record has it.
    types: those that the claim is about.
    points: that the error may grow by.
    share: of the error in float32, that it may grow by, too.
  """

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


def perplexity(*names: str) -> Look:
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

  Args:
    holds: says it of what was measured.
    text: has the numbers that say it.
    but: how the names begin of those to leave out.
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


_TYPES = "Dettmers' four types of 8 bits"
_FACTS = functools.partial(of, "gradient_facts")
ELSEWHERE = (
  Finding(
    f"{_TYPES} on activations and errors end as float32 (analysis of variance).",
    "Dettmers 3.4",
    "p = 0.71",
    of("model_parallel", units),
  ),
  Finding(
    f"{_TYPES} in two local layers add 2 % to the error at most.",
    "Dettmers 3.4, figure 2",
    "2 %",
    of(
      "model_parallel_nets", little_error("locally connected", TYPES, 0.0, share=0.02)
    ),
  ),
  Finding(
    "The dynamic tree in a net like AlexNet adds 0.2 points to the error at most.",
    "Dettmers 3.4",
    "0.1 points",
    of(
      "model_parallel_nets",
      little_error("like AlexNet, 4 sub-batches", TYPES[:1], 0.2, share=0.0),
    ),
  ),
  Finding(
    "One bit does for gradients, and breaks forward passes.",
    "Dettmers 4.2",
    "no number",
    of("model_parallel", one_bit),
  ),
  Finding(
    "Of four types of 8 bits the dynamic tree has the least relative error.",
    "Dettmers table 2",
    "1.4 to 2.5 %",
    of("approximation_error", least_error),
  ),
  Finding(
    "Errors of 8 bits relative to a layer's numbers are as in the paper (factor 2).",
    "Dettmers table 2",
    "0.5 to 8 %",
    of("model_parallel", layers_alike),
  ),
  Finding(
    "Most ternary gradients of a dense layer are zeros: 70 % or more.",
    "Wen 4.2, figure 4",
    "71.32 % of fc6",
    _FACTS(
      _each_weight(
        lambda x: x["zeros_clipped"] >= 0.7, "{zeros_clipped:.1%}", ("conv",)
      )
    ),
  ),
  Finding(
    "Clipping at 2.5 sigma takes 1.5 % of the length and turns by 3° at most.",
    "Wen 3.3",
    "1.0 to 1.5 %, 2 to 3°",
    _FACTS(
      _each_weight(
        lambda x: x["shorter"] <= 0.015 and x["turned"] <= 3,
        "{shorter:.1%}, {turned:.1f}°",
      )
    ),
  ),
  Finding(
    "Clipping brings the bound of ternary gradients closer to the usual one.",
    "Wen 3.2, 3.3",
    "no number",
    _FACTS(
      _each_weight(
        lambda x: x["moment_clipped"] < x["moment"],
        "{moment:.1f} to {moment_clipped:.1f}",
      )
    ),
  ),
  Finding(
    "Sums of 256 workers with (5, 2) round least in groups of 16.",
    "Han table 9",
    "41.8 %, 85.2 in a ring",
    of("roundoff", groups_of_16),
  ),
  Finding(
    "With Adam and few images 2 bits in buckets of 128 are worse than float32.",
    "Grubic 5.1",
    "1 point or more",
    of("codec_study", worse_on_digits("QSGD, 2 bits, buckets of 128", "f32")),
  ),
  Finding(
    "With Adam and few images TernGrad is worse without clipping.",
    "Wen 4.2, table 2",
    "2.98 points",
    of("codec_study", worse_on_digits("TernGrad, not clipped", "TernGrad")),
  ),
  Finding(
    "APS with 8 bits ends within 0.2 points of float32 with LARS.",
    "Han table 5",
    "0.06 lower, 0.37 higher",
    of("aps_study", lars),
  ),
  Finding(
    "Gradients of layers have different ranges.",
    "Han figure 2",
    "figure",
    _FACTS(layers_apart),
  ),
  Finding(
    "Workers that send 0.1 % each choose few elements alike.",
    "Fang 2.3",
    "16 send 1.55 %",
    _FACTS(union),
  ),
  Finding(
    "After long training RedSync has at most 1 % more perplexity.",
    "Fang table 1",
    "1 % less",
    of(
      "redsync_study",
      perplexity("RedSync 1 %, dense first", "RedSync 0.1 %, dense first"),
    ),
  ),
  Finding(
    "After long training RedSync with alternating signs (ASQ) has 1 % more at most.",
    "Fang 2.2, table 1",
    "within 1 %",
    of(
      "redsync_study",
      perplexity("RedSync 1 %, dense first, ASQ", "RedSync 0.1 %, dense first, ASQ"),
    ),
  ),
  Finding(
    "Trimmed and sampled search select 0.1 % faster than an exact selection.",
    "Fang figure 3",
    "38 and 16 x",
    of("selection_speed", selection, "selection_speed_jax0.10.2_malloc"),
  ),
)
