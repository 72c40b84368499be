"""Judges what papers say of accuracy by the trainings of a study.

Each judge looks at every group that has what it needs, among those that the claim is
about: by default, of images and SGD. A claim holds if it holds in all of them.
Differences are means over seeds, seed by seed, with their intervals of 95 %. A codec is
as good as float32 within some points if the mean is. It is worse if the whole interval
is below 0. Five seeds tell, or fewer if their interval does.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from benchmarks.study.analysis import ENOUGH, Group, Spread, Study
from benchmarks.study.tasks import TEXTS
from benchmarks.training.model_parallel.data_types import anova

FAILS = 1.0  # points below float32


class Verdict(NamedTuple):
  """Holds what the runs say of a claim, and lines with the numbers that say it."""

  verdict: Literal["holds", "does not", "not tested"]
  numbers: tuple[str, ...]


Judge = Callable[[Study], Verdict]
Chosen = Callable[[Group], bool]


class Seen(NamedTuple):
  """Holds what one group or cell says.

  Attributes:
    holds: whether the claim does; None if the numbers do not tell.
    numbers: that say it.
  """

  holds: bool | None
  numbers: str


def concluded(seen: Iterable[Seen], needs: str, share: float = 1.0) -> Verdict:
  """Concludes from all that was seen; a claim must hold in a share of what decides."""
  found = list(seen)
  numbers = tuple(
    x.numbers + (": this does not tell" if x.holds is None else "") for x in found
  )
  told = [x.holds for x in found if x.holds is not None]
  if not told:
    return Verdict("not tested", (f"It needs {needs}", *numbers))
  if any(told) and sum(told) < len(found):
    numbers = (f"It holds in {sum(told)} of {len(found)}", *numbers)
  return Verdict("holds" if sum(told) >= share * len(told) else "does not", numbers)


def needing(
  needs: str, share: float = 1.0
) -> Callable[[Callable[[Study], Iterable[Seen]]], Judge]:
  """Makes a judge of what yields all that a study says: see ``concluded``."""
  return lambda look: lambda study: concluded(look(study), needs, share)


def images(group: Group) -> bool:
  """Returns whether a group is of images, SGD, and 64 workers at most."""
  return _of_images(group, "sgd") and group.setting.workers <= 64


def lenet_of_wen(group: Group) -> bool:
  """Returns whether a group is of LeNet and a polynomial, as Wen et al.'s figure 3."""
  x = group.setting
  return images(group) and (x.network, x.schedule) == ("lenet", "polynomial")


def images_by_adam(group: Group) -> bool:
  """Returns whether a group is of images, Adam, and a batch for each worker."""
  return _of_images(group, "adam") and group.setting.rule == "per-worker"


def images_of_many(group: Group) -> bool:
  """Returns whether a group has as many workers as Han et al., 256."""
  return _of_images(group, "sgd") and group.setting.workers >= 256


def _of_images(group: Group, optimizer: str) -> bool:
  return group.setting.network not in TEXTS and group.setting.optimizer == optimizer


def recurrent(group: Group) -> bool:
  """Returns whether a group is of a recurrent net."""
  return group.setting.network in ("gru", "lstm")


def long(group: Group) -> bool:
  """Returns whether a codec that sends a thousandth a step had time to send all."""
  return group.setting.steps >= 10_000


def usual_batches(group: Group) -> bool:
  """Returns whether a group of ``images`` has 256 in a step at most."""
  return images(group) and group.setting.batch <= 256


def large_batches(group: Group) -> bool:
  """Returns whether a group of ``images`` has more than 256 in a step."""
  return images(group) and not usual_batches(group)


Compared = Callable[[Group, str], Spread | None]
Decided = Callable[[Spread], bool | None]


def _seen(
  study: Study,
  codecs: Iterable[str],
  chosen: Chosen,
  decide: Decided,
  compare: Compared = Group.difference,
  what: str = "",
) -> Iterator[tuple[Group, Seen]]:
  """Yields what each chosen group says of each codec that was run in it."""
  names = list(codecs)
  for group in filter(chosen, study.groups):
    for name in names:
      if found := compare(group, name):
        numbers = f"{group.name}: {name}{what} {found} ({found.count} seeds)"
        yield group, Seen(decide(found), numbers)


def _judge(needs: str, look: Callable[[Study], Iterator[tuple[Group, Seen]]]) -> Judge:
  """Returns a judge of all that ``look`` sees, which is ``_seen`` of some claim."""
  return lambda study: concluded((x for _, x in look(study)), needs)


def _seeds(codecs: Iterable[str]) -> str:
  return f"seeds of f32 and {' or '.join(codecs)}"


def within(codecs: list[str], limit: float, groups: Chosen = images) -> Judge:
  """Returns a judge of whether codecs are at most ``limit`` points below float32."""
  decide: Decided = lambda x: x.at_least(-limit)
  return _judge(_seeds(codecs), lambda study: _seen(study, codecs, groups, decide))


def fails(codecs: list[str]) -> Judge:
  """Returns a judge of whether codecs end more than a point below float32."""
  decide: Decided = lambda x: x.is_below(-FAILS)
  return _judge(_seeds(codecs), lambda study: _seen(study, codecs, images, decide))


def little_perplexed(codecs: list[str], limit: float) -> Judge:
  """Returns a judge of whether perplexities are at most ``limit`` % above float32's."""
  how = Group.perplexity, ", % above f32's perplexity:"
  decide: Decided = lambda x: x.at_most(limit)
  return _judge(
    f"{_seeds(codecs)} on a text",
    lambda study: _seen(study, codecs, recurrent, decide, *how),
  )


def worse(codec: str, than: str, groups: Chosen = images) -> Judge:
  """Returns a judge of whether a codec is worse than another."""
  return _compared(codec, than, groups, lambda x: x.is_below(0.0))


def no_better(codec: str, than: str) -> Judge:
  """Returns a judge of whether a codec is not better than another."""
  return _compared(codec, than, images, lambda x: _not(x.is_above(0.0)))


def _not(told: bool | None) -> bool | None:
  """Returns the opposite of what seeds tell, if they do."""
  return None if told is None else not told


def _compared(codec: str, than: str, chosen: Chosen, decide: Decided) -> Judge:
  compare: Compared = lambda group, name: group.difference(name, than)
  return _judge(
    f"seeds of {codec} and {than}",
    lambda study: _seen(study, [codec], chosen, decide, compare, f" - {than}"),
  )


def any_workers(
  codec: str, limit: float, counts: Iterable[int], groups: Chosen
) -> Judge:
  """Returns a judge of whether a codec is as good with few workers and with many."""
  needed = sorted(counts)
  what = f"{_seeds([codec])} with {' and '.join(map(str, needed))} workers"

  def judge(study: Study) -> Verdict:
    found = list(_seen(study, [codec], groups, lambda x: x.at_least(-limit)))
    known = {group.setting.workers for group, _ in found}
    return concluded((x for _, x in found) if known.issuperset(needed) else [], what)

  return judge


def less_dropout(codec: str) -> Judge:
  """Returns a judge of whether a codec loses less where a net drops nothing."""

  @needing(f"{_seeds([codec])} with --dropout 0 and without")
  def judge(study: Study) -> Iterator[Seen]:
    groups = {x.setting: x for x in filter(images, study.groups)}
    for setting, group in groups.items():
      usual = groups.get(setting._replace(dropout=None))
      if setting.dropout == 0 and usual and (more := group.gained(codec, usual)):
        yield Seen(more.is_above(0.0), f"{group.name}: {more} points better")

  return judge


def later(codec: str) -> Judge:
  """Returns a judge of whether a codec is behind float32 at first, and catches up."""

  @needing(f"{_seeds([codec])}, with two points of a curve or more")
  def judge(study: Study) -> Iterator[Seen]:
    for group in filter(images, study.groups):
      early, gained = group.early(codec), group.caught_up(codec)
      if early and gained:
        told = early.is_below(0.0), gained.is_above(0.0)
        holds = None if None in told else all(told)
        numbers = f"{early} in the first half, of which {gained} come back"
        yield Seen(holds, f"{group.name}: {numbers}")

  return judge


def alike(codecs: Iterable[str]) -> Judge:
  """Returns a judge of whether codecs and float32 end alike: p above 0.05."""
  names = ["f32", *codecs]

  @needing(f"five seeds of {', '.join(names)}")
  def judge(study: Study) -> Iterator[Seen]:
    for group in filter(images, study.groups):
      ends = [group.ends(name).tolist() for name in names]
      if all(len(values) >= ENOUGH for values in ends):
        found = anova(ends)
        means = ", ".join(
          f"{name} {sum(values) / len(values):.2f}"
          for name, values in zip(names, ends, strict=True)
        )
        numbers = f"{group.name}: F = {found['F']:.2f}, p = {found['p']:.2f}; {means}"
        yield Seen(found["p"] > 0.05, numbers)

  return judge


def untested(needs: str) -> Judge:
  """Returns a judge of what nothing here can decide."""
  return lambda study: concluded([], needs)
