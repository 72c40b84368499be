"""Judges what papers say of speed by the times of a study, and by those of links.

Each judge looks at every cell that has what it needs, and a claim holds if it holds in
all of them. Whole exchanges without a network are those of link_speed.py, which its
results have.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import link_results
from cluster_numbers import QSGD, Cell, Study
from cluster_verdicts import Judge, Seen, Verdict, concluded

from gradcomp.cost import grubic

LINKS = Path(__file__).parent / "results" / "link_speed.json"
_ERROR = 0.08  # of the line through a cell's times
_LOW = [codec for bits, codec in QSGD.items() if bits < 32]
_BOUND = 1 / grubic.wire_share(8)  # 3.97: what 8 bits gain without any computation
_NOISE = 0.05  # the share by which times of one program differ


def line(study: Study) -> Verdict:
  """Judges whether times follow ``a + c w``."""
  return concluded(
    (
      Seen(
        found.error <= _ERROR,
        f"{cell.name}: a = {1e3 * found.computation:.3g} ms a sample, c = "
        f"{1e3 * found.communication:.3g} ms, error {found.error:.1%}",
      )
      for cell in study.cells
      if cell.setting.workers > 1 and (found := cell.fit())
    ),
    "times of f32 and two QSGD codecs or more",
  )


def falls(study: Study) -> Verdict:
  """Judges whether communication falls with the bits, where it counts."""

  def seen() -> Iterator[Seen]:
    for cell in study.cells:
      names = [codec for codec in QSGD.values() if codec in cell.times]
      if len(names) > 2 and "f32" in names and cell.share >= 0.2:
        found = [cell.times[name]["communication"] for name in names]
        pairs = zip(found, found[1:], strict=False)
        numbers = " > ".join(
          f"{name} {1e3 * x:.1f} ms" for name, x in zip(names, found, strict=True)
        )
        yield Seen(
          all(b <= a * (1 + _NOISE) for a, b in pairs), f"{cell.name}: {numbers}"
        )

  return concluded(
    seen(), "times of f32 and two QSGD codecs where a fifth of a step is communication"
  )


def diminishing(study: Study) -> Verdict:
  """Judges whether 2 bits bring less over 4 than 4 over 8."""
  return _of_cells(
    study,
    ("qsgd-8", "qsgd-4", "qsgd-2"),
    lambda cell: (
      cell.speed("qsgd-2") / cell.speed("qsgd-4")
      < cell.speed("qsgd-4") / cell.speed("qsgd-8")
    ),
  )


def slower(codec: str, than: str, network: str = "") -> Judge:
  """Returns a judge of whether steps with a codec take longer than with another."""

  def judge(study: Study) -> Verdict:
    return _of_cells(
      study,
      (codec, than),
      lambda cell: cell.speed(codec) < cell.speed(than),
      network,
    )

  return judge


def _of_cells(
  study: Study,
  codecs: tuple[str, ...],
  holds: Callable[[Cell], bool],
  network: str = "",
) -> Verdict:
  """Judges each cell that has the codecs and exchanges over a link or in a machine."""
  needed = f" on {network}" if network else ""
  return concluded(
    (
      Seen(
        holds(cell),
        f"{cell.name}: "
        + ", ".join(f"{name} {cell.speed(name):.0f} samples/s" for name in codecs),
      )
      for cell in study.cells
      if cell.setting.workers > 1
      and cell.times.keys() >= set(codecs)
      and network in ("", cell.setting.network)
    ),
    f"times of {', '.join(codecs)}{needed}",
  )


def _linked(study: Study) -> Iterator[tuple[Cell, Cell]]:
  """Yields cells that differ in their links alone, the slowest and the fastest."""
  alike: dict[Any, list[Cell]] = {}
  for cell in study.cells:
    if cell.setting.link and "f32" in cell.times:
      alike.setdefault(cell.setting._replace(link=""), []).append(cell)
  for cells in alike.values():
    if len(cells) > 1:
      cells.sort(key=lambda cell: cell.times["f32"]["step"])
      yield cells[-1], cells[0]


def fast_link(study: Study) -> Verdict:
  """Judges whether f32 on the fast link beats all codecs on the slow one."""

  def seen() -> Iterator[Seen]:
    for slow, fast in _linked(study):
      if low := [name for name in _LOW if name in slow.times]:
        best = max(low, key=slow.speed)
        numbers = (
          f"{fast.name}: f32 {fast.speed('f32'):.0f} samples/s; {slow.link}: {best} "
          f"{slow.speed(best):.0f}"
        )
        yield Seen(fast.speed("f32") > slow.speed(best), numbers)

  return concluded(seen(), "times of f32 and QSGD on two links")


def vanishes(study: Study) -> Verdict:
  """Judges whether no codec gains on the fast link what it gains on the slow one."""

  def seen() -> Iterator[Seen]:
    for slow, fast in _linked(study):
      if low := [name for name in _LOW if name in slow.times and name in fast.times]:
        gains = [max(map(cell.gain, low)) for cell in (slow, fast)]
        numbers = f"{slow.name}: {gains[0]:.2f} x; {fast.link}: {gains[1]:.2f} x"
        yield Seen(gains[0] > gains[1] and gains[1] <= 1 + _NOISE, numbers)

  return concluded(seen(), "times of f32 and QSGD on two links")


def _networks(study: Study, codec: str) -> Iterator[list[Cell]]:
  """Yields cells that differ in their networks, which communicate ever more."""
  alike: dict[Any, list[Cell]] = {}
  for cell in study.cells:
    x = cell.setting
    if x.workers > 1 and {"f32", codec} <= cell.times.keys():
      alike.setdefault((x.link, x.workers), []).append(cell)
  for cells in alike.values():
    if len({cell.setting.network for cell in cells}) > 1:
      yield sorted(cells, key=lambda cell: cell.intensity)


def bound_nets(study: Study) -> Verdict:
  """Judges whether the net that communicates most gains most."""

  def seen() -> Iterator[Seen]:
    for cells in _networks(study, "qsgd-4"):
      order = sorted(cells, key=lambda cell: cell.share)
      gains = [cell.gain("qsgd-4") for cell in order]
      numbers = ", ".join(
        f"{cell.setting.network} {cell.share:.0%} of a step: {gain:.2f} x"
        for cell, gain in zip(order, gains, strict=True)
      )
      yield Seen(
        gains[-1] == max(gains),
        f"N = {cells[0].setting.workers}, {cells[0].link}: {numbers}",
      )

  return concluded(seen(), "times of f32 and qsgd-4 on two networks")


def rises(study: Study) -> Verdict:
  """Judges whether 8 bits gain more with more MB a GFLOP, and 3.97 at most."""

  def seen() -> Iterator[Seen]:
    for cells in _networks(study, "qsgd-8"):
      gains = [cell.gain("qsgd-8") for cell in cells]
      numbers = ", ".join(
        f"{cell.setting.network} {cell.intensity:.0f} MB/GFLOP: {gain:.2f} x"
        for cell, gain in zip(cells, gains, strict=True)
      )
      holds = gains[-1] > gains[0] and max(gains) <= _BOUND * (1 + _NOISE)
      yield Seen(holds, f"N = {cells[0].setting.workers}, {cells[0].link}: {numbers}")

  return concluded(seen(), "times of f32 and qsgd-8 on two networks")


def doubling(study: Study) -> Verdict:
  """Judges whether twice the workers are rarely twice as fast with the same batch."""
  pays, ratios = 0, []
  at = {
    (*cell.setting._replace(workers=0, hosts=0), cell.setting.workers): cell
    for cell in study.cells
    if cell.setting.rule == "fixed"
  }
  for (*rest, workers), cell in at.items():
    if twice := at.get((*rest, 2 * workers)):
      for codec in cell.times.keys() & twice.times.keys():
        ratios.append(twice.speed(codec) / cell.speed(codec))
        pays += ratios[-1] >= 2
  if not ratios:
    return concluded([], "times with N and with 2 N workers, and a fixed batch")
  numbers = (
    f"{pays} of {len(ratios)} pairs are twice as fast or more; the speed is "
    f"{min(ratios):.2f} to {max(ratios):.2f} times that of half the workers"
  )
  return concluded([Seen(pays <= len(ratios) / 4, numbers)], "")


def of_links(first: str, second: str, least: float, shapes: tuple[Any, ...]) -> Judge:
  """Returns a judge of whether one exchange takes longer than another.

  Args:
    first, second: steps of link_speed.py.
    least: how many times as long the first takes, at least.
    shapes: ``(hosts, rate, leaves, MiB)`` of each run to look at.
  """

  def judge(study: Study) -> Verdict:
    del study
    runs = json.loads(LINKS.read_text())["runs"] if LINKS.exists() else []

    def seen() -> Iterable[Seen]:
      for hosts, rate, leaves, mib in shapes:
        try:
          steps = link_results.find(runs, hosts, rate, leaves, mib)["steps"]
        except KeyError:
          continue
        if first in steps and second in steps:
          a, b = (steps[name]["median_seconds"] for name in (first, second))
          yield Seen(
            a > least * b,
            f"{hosts} hosts, {rate}, {mib:g} MiB: {first} {1e3 * a:.0f} ms, {second} "
            f"{1e3 * b:.0f} ms",
          )

    return concluded(seen(), f"{first} and {second} of link_speed.py")

  return judge
