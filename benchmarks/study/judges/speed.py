"""Judges what papers say of speed by the times of a study, and by those of links.

Each judge looks at every cell that has what it needs, and a claim must hold in all of
them, or in the share that the paper's words give. Times of one program differ by 5 %,
so numbers that are as close cannot tell. Whole exchanges without a network are those of
links/speed.py, which its results have.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common import cli
from benchmarks.models.papers import grubic
from benchmarks.study.analysis import QSGD, Cell, Study
from benchmarks.study.judges.verdicts import (
  OWN,
  USUAL,
  Bar,
  Judge,
  Limit,
  Seen,
  needing,
  of_all,
)
from benchmarks.study.tasks import WIDENED

LINKS = cli.RESULTS / "links" / "link_speed.json"
_ERROR = 0.08  # of the line through a cell's times
_LOW = [codec for bits, codec in QSGD.items() if bits < 32]
_BOUND = 1 / grubic.wire_share(8)  # 3.97: what 8 bits gain without any computation
_NOISE = 0.05  # the share by which times of one program differ
_RARELY = 0.25  # the share of all cases in which at most something is so
_LITTLE = 1.2  # x, above all that 2 bits gain over 4 in Grubic's tables, 1.19
GAIN = "times as fast as float32"
_FAST = 1.4  # x, the most that few bits gain with NCCL, as his introduction says


def more(a: float, b: float) -> bool | None:
  """Says whether ``a`` is more than ``b``; None where noise may be all of it."""
  return None if abs(a - b) <= _NOISE * b else a > b


def timed(label: str, ratio: float, limit: Limit) -> Bar:
  """Returns the bar of a ratio of times, which holds the limit where ``more`` is None.

  Its length is the noise of one of the two, of that which would have to be more.
  """
  low, high = 1 - _NOISE, 1 + _NOISE
  if limit.above:
    low, high = 1 / high, 1 / low
  return Bar(label, low * ratio, ratio, high * ratio, limit)


@needing("times of f32 and three QSGD codecs or more")
def line(study: Study) -> Iterator[Seen]:
  """Judges whether times follow ``a + c w``."""
  for cell in study.cells:
    if cell.setting.workers > 1 and (found := cell.fit()):
      error = 100 * found.error
      limit = Limit(100 * _ERROR, above=False, unit="error of the line, %")
      numbers = (
        f"{cell.name}: a = {1e3 * found.computation:.3g} ms a sample, c = "
        f"{1e3 * found.communication:.3g} ms, error {found.error:.1%}"
      )
      bar = Bar(cell.name, error, error, error, limit)
      yield Seen(found.error <= _ERROR, numbers, bars=(bar,))


@needing("times of f32 and two QSGD codecs where a fifth of a step is communication")
def falls(study: Study) -> Iterator[Seen]:
  """Judges whether communication falls with the bits, where it counts."""
  for cell in study.cells:
    names = [codec for codec in QSGD.values() if codec in cell.times]
    if len(names) > 2 and "f32" in names and cell.share >= 0.2:
      found = [cell.times[name]["communication"] for name in names]
      less = [more(a, b) for a, b in itertools.pairwise(found)]
      numbers = " > ".join(
        f"{name} {1e3 * x:.1f} ms" for name, x in zip(names, found, strict=True)
      )
      least = min(a / b for a, b in itertools.pairwise(found))
      unit = "times as long as with fewer bits, at the least of all steps down"
      bar = timed(cell.name, least, Limit(1.0, above=True, unit=unit))
      yield Seen(of_all(less), f"{cell.name}: {numbers}", bars=(bar,))


@needing("times of qsgd-4 and qsgd-2", share=1 - _RARELY)
def diminishing(study: Study) -> Iterator[Seen]:
  """Judges whether 2 bits rarely bring much over 4."""
  limit = Limit(_LITTLE, above=False, unit="times as fast with qsgd-2 as with qsgd-4")
  return _of_cells(study, "qsgd-2", "qsgd-4", limit)


def slower(codec: str, than: str, network: str = "", share: float = 1.0) -> Judge:
  """Returns a judge of whether steps with a codec take longer than with another.

  Where both send as many bytes they are one program, and nothing is compared.
  """
  needed = f" on {network}" if network else ""

  @needing(f"times{needed} of {codec} and {than} that send different bytes", share)
  def judge(study: Study) -> Iterator[Seen]:
    return _of_cells(
      study,
      than,
      codec,
      Limit(1.0, above=True, unit=f"times as fast with {than} as with {codec}"),
      lambda cell: (
        network in ("", cell.setting.network)
        and cell.times[codec]["bytes_a_step"] != cell.times[than]["bytes_a_step"]
      ),
    )

  return judge


def _of_cells(
  study: Study,
  first: str,
  second: str,
  limit: Limit,
  chosen: Callable[[Cell], bool] = lambda cell: True,
) -> Iterator[Seen]:
  """Yields whether steps with one codec are so many times as fast as with another.

  Cells say it that exchange, have both codecs, and are chosen.
  """
  for cell in study.cells:
    has = cell.setting.workers > 1 and cell.times.keys() >= {first, second}
    if has and chosen(cell):
      a, b = cell.speed(first), limit.value * cell.speed(second)
      holds = more(a, b) if limit.above else more(b, a)
      speeds = (f"{name} {cell.speed(name):.0f} samples/s" for name in (second, first))
      bar = timed(cell.name, limit.value * a / b, limit)
      yield Seen(holds, f"{cell.name}: {', '.join(speeds)}", bars=(bar,))


def _linked(study: Study) -> Iterator[tuple[Cell, Cell]]:
  """Yields cells that differ in their links alone, the slowest and the fastest."""
  alike: dict[Any, list[Cell]] = {}
  for cell in study.cells:
    x = cell.setting
    if x.link and x.workers > 1 and "f32" in cell.times:
      alike.setdefault(x._replace(link=""), []).append(cell)
  for cells in alike.values():
    if len(cells) > 1:
      cells.sort(key=lambda cell: cell.times["f32"]["step"])
      yield cells[-1], cells[0]


@needing("times of f32 and QSGD on two links", share=0.0)
def fast_link(study: Study) -> Iterator[Seen]:
  """Judges whether f32 on the fast link can beat all codecs on the slow one."""
  for slow, fast in _linked(study):
    if low := [name for name in _LOW if name in slow.times]:
      best = max(low, key=slow.speed)
      numbers = (
        f"{fast.name}: f32 {fast.speed('f32'):.0f} samples/s; {slow.link}: {best} "
        f"{slow.speed(best):.0f}"
      )
      a, b = fast.speed("f32"), slow.speed(best)
      unit = "times as fast with f32 on the fast link"
      bar = timed(fast.name, a / b, Limit(1.0, above=True, unit=unit))
      yield Seen(more(a, b), numbers, bars=(bar,))


def _best(study: Study) -> Iterator[tuple[tuple[Cell, Cell], list[float]]]:
  """Yields a slow and a fast cell with the most that few bits gain in each."""
  for cells in _linked(study):
    slow, fast = cells
    if low := [name for name in _LOW if name in slow.times and name in fast.times]:
      yield cells, [max(map(cell.gain, low)) for cell in cells]


@needing("times of f32 and QSGD on two links")
def fades(study: Study) -> Iterator[Seen]:
  """Judges whether few bits gain less on the fast link."""
  for (slow, fast), gains in _best(study):
    numbers = f"{slow.name}: {gains[0]:.2f} x; {fast.link}: {gains[1]:.2f} x"
    unit = "the gain on the slow link over that on the fast one"
    bar = timed(slow.name, gains[0] / gains[1], Limit(1.0, above=True, unit=unit))
    yield Seen(more(*gains), numbers, bars=(bar,))


@needing("times of f32 and QSGD on two links")
def vanishes(study: Study) -> Iterator[Seen]:
  """Judges whether few bits gain 1.4 x at most on the fast link."""
  for (_, fast), (_, gain) in _best(study):
    bar = timed(fast.name, gain, Limit(_FAST, above=False, unit=GAIN))
    yield Seen(more(_FAST, gain), f"{fast.name}: {gain:.2f} x", bars=(bar,))


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


@needing("times of f32 and qsgd-4 on two networks")
def bound_nets(study: Study) -> Iterator[Seen]:
  """Judges whether the net that communicates most gains most."""
  for cells in _networks(study, "qsgd-4"):
    order = sorted(cells, key=lambda cell: cell.share)
    gains = [cell.gain("qsgd-4") for cell in order]
    numbers = ", ".join(
      f"{cell.setting.network} {cell.share:.0%} of a step: {gain:.2f} x"
      for cell, gain in zip(order, gains, strict=True)
    )
    where = f"N = {cells[0].setting.workers}, {cells[0].link}"
    unit = "its gain over the largest of others"
    least = max(gains[:-1])
    bar = timed(where, gains[-1] / least, Limit(1.0, above=True, unit=unit))
    yield Seen(more(gains[-1], least), f"{where}: {numbers}", bars=(bar,))


@needing("times of f32 and qsgd-8 on two networks")
def rises(study: Study) -> Iterator[Seen]:
  """Judges whether 8 bits gain more with more MB a GFLOP, and 3.97 at most.

  Widths of one net, as the paper has them, decide alone.
  """
  for cells in _networks(study, "qsgd-8"):
    nets = [cell for cell in cells if cell.setting.network not in WIDENED]
    widths = [cell for cell in cells if cell.setting.network in WIDENED]
    yield from _rise(nets, USUAL)
    yield from _rise(widths, OWN)


def _rise(cells: list[Cell], rank: int) -> Iterator[Seen]:
  """Yields whether the last of some cells gains more than the first."""
  if len(cells) < 2:
    return
  gains = [cell.gain("qsgd-8") for cell in cells]
  numbers = ", ".join(
    f"{cell.setting.network} {cell.intensity:.0f} MB/GFLOP: {gain:.2f} x"
    for cell, gain in zip(cells, gains, strict=True)
  )
  low = max(gains) <= _BOUND * (1 + _NOISE)
  rise = more(gains[-1], gains[0]) if low else False
  where = f"N = {cells[0].setting.workers}, {cells[0].link}"
  unit = "the gain of the last net over the first one's"
  bar = timed(where, gains[-1] / gains[0], Limit(1.0, above=True, unit=unit))
  yield Seen(rise, f"{where}: {numbers}", rank, bars=(bar,))


@needing(
  "times with N and with 2 N workers, each on processors of its own, and a fixed batch",
  share=1 - _RARELY,
)
def doubling(study: Study) -> Iterator[Seen]:
  """Judges whether twice the workers are rarely twice as fast with the same batch.

  Only workers with processors of their own count: a share of the batch that is half as
  large takes them at most three quarters of the time.
  """
  at = {
    (*cell.setting._replace(workers=0, hosts=0), cell.setting.workers): cell
    for cell in study.cells
    if cell.setting.rule == "fixed"
  }
  for (*rest, workers), cell in at.items():
    if twice := at.get((*rest, 2 * workers)):
      for codec in cell.times.keys() & twice.times.keys():
        if twice.times[codec]["compute"] <= 0.75 * cell.times[codec]["compute"]:
          ratio = twice.speed(codec) / cell.speed(codec)
          unit = "times as fast with twice the workers"
          label = f"{twice.name}: {codec}"
          bar = timed(label, ratio, Limit(2.0, above=False, unit=unit))
          yield Seen(more(2.0, ratio), f"{label} {ratio:.2f} x", bars=(bar,))


def of_links(first: str, second: str, rates: list[str], leaves: int | str = 1) -> Judge:
  """Returns a judge of whether an exchange of links/speed.py takes longer than another.

  It looks at all runs with the rates and the leaves.
  """

  @needing(f"{first} and {second} of links/speed.py")
  def judge(study: Study) -> Iterator[Seen]:
    del study
    runs = json.loads(LINKS.read_text())["runs"] if LINKS.exists() else []
    for run in runs:
      steps, rate = run["steps"], run["rate"]
      if rate in rates and run["leaves"] == leaves and {first, second} <= steps.keys():
        a, b = (steps[name]["median_seconds"] for name in (first, second))
        where = f"{run['hosts']} hosts, {rate}, {run['mib']:g} MiB"
        numbers = f"{first} {1e3 * a:.0f} ms, {second} {1e3 * b:.0f} ms"
        limit = Limit(
          1.0, above=True, unit="the first one's time over the second one's"
        )
        bar = timed(f"{where}: {first} / {second}", a / b, limit)
        yield Seen(more(a, b), f"{where}: {numbers}", bars=(bar,))

  return judge
