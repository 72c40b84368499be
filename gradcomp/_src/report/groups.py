"""The groups of devices that exchange in a collective of HLO, in all its notations."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gradcomp._src.report.collectives import connected
from gradcomp._src.report.hlo_text import Instruction, unreadable

_SLICE = (
  100_000  # XLA:TPU's number of a device is 100,000 x its slice, from 1, + its own
)
LISTS = r"(\"[^\"]*\"|\{(?:\{[^{}]*\}[,\s]*)*\})"  # in hints: quoted or not
_integers = lambda text: [int(x) for x in re.findall(r"\d+", text)]
_Lists = Sequence[Sequence[int]]
Pairs = list[tuple[int, int]]


class Groups(NamedTuple):
  """The groups of devices that exchange with each other."""

  workers: int  # the size of the largest
  members: tuple[tuple[int, ...], ...] | None  # the devices of each, if they are known


class Devices(NamedTuple):
  """The devices of a program, in this order: of slices, of replicas, of partitions.

  A text for several TPU slices is the program of each.
  """

  slices: int
  replicas: int
  partitions: int

  @property
  def number(self) -> int:
    """The number of all devices."""
    return math.prod(self)

  @property
  def starts(self) -> range:
    """The first device of each slice."""
    return range(0, self.number, self.replicas * self.partitions)

  def numbered(self, lists: _Lists, mode: str) -> list[list[int]]:
    """Returns the devices of groups of replicas, partitions or devices of a slice."""
    p, found = self.partitions, list[Sequence[int]]()
    for group in lists:
      if mode == "devices":
        found += [group]
      elif mode == "partitions":
        found += [[r * p + i for i in group] for r in range(self.replicas)]
      elif mode == "replicas":
        found += [[r * p + i for r in group] for i in range(p)]
      else:
        found += [[r * p + i for r in group for i in range(p)]]
    return [[start + i for i in group] for start in self.starts for group in found]


def groups_of(kind: str, instruction: Instruction, devices: Devices) -> Groups:
  """Returns the groups of a collective that is no permutation."""
  mode = _mode(kind, instruction, devices)
  text = instruction.attributes.get("replica_groups", "{}")
  sizes = {"devices": devices.replicas * devices.partitions}
  sizes |= {"partitions": devices.partitions}
  everyone = range(sizes.get(mode, devices.replicas))
  lists = [everyone] if text == "{}" else _lists(text, instruction)
  if isinstance(lists, int):  # of a size that is known, and of unknown devices
    return Groups(lists * (devices.partitions if mode == "both" else 1), None)
  return listed(devices.numbered(lists, mode), devices)


def pairs_of(instruction: Instruction, devices: Devices) -> Pairs:
  """Returns who sends to whom by a permutation, or by a send between devices."""
  text = instruction.attributes.get("source_target_pairs", "none")
  hints = instruction.attributes.get("frontend_attributes", "")
  if match := re.search(rf"_source_target_pairs={LISTS}", hints):
    text = match[1].strip('"')
  if not re.fullmatch(r"\{(?:\{\d+,\d+\},?)*\}", text := re.sub(r"\s", "", text)):
    raise unreadable("known pairs", f"{instruction.opcode} {text}")
  lists = [_integers(pair) for pair in re.findall(r"\d+,\d+", text)]
  numbered = devices.numbered(lists, _mode("collective-permute", instruction, devices))
  return [(source, target) for source, target in numbered]


def between_slices(target: str, devices: Devices) -> list[list[int]]:
  """Returns the groups or the pairs of a transfer between slices of TPUs."""
  size = devices.replicas * devices.partitions
  target = re.sub(r"[\s\"]", "", target)
  # "{1,2}x{0:3}": each of the devices 0 to 3 with the same one of the other slices.
  if match := re.fullmatch(r"\{([\d,:]+)\}x\{([\d,:]+)\}", target):
    slices, own = map(_ranges, match.groups())
    return [[(s - 1) * size + i for s in slices] for i in own]
  if not re.fullmatch(r"\{(?:\{[\d,>\-]+\},?)+\}", target):
    raise unreadable("known transfers between slices", target)
  groups = re.findall(r"\{(\d[\d,>\-]*)\}", target)
  places = [[divmod(number, _SLICE) for number in _integers(x)] for x in groups]
  return [[(s - 1) * size + i for s, i in group] for group in places]


def slices_of(target: str) -> int:
  """Returns the number of the last slice of a transfer."""
  match = re.search(r"\{([\d,:]+)\}x", target)
  numbers = _integers(match[1] if match else target)
  return max(x if match else x // _SLICE for x in [*numbers, 1 if match else _SLICE])


def listed(groups: Iterable[Sequence[int]], devices: Devices) -> Groups:
  """Returns groups from the devices of each."""
  members = tuple(tuple(group) for group in groups)
  workers = max(1, *map(len, members), 1)
  known = all(i < devices.number for group in members for i in group)
  return Groups(workers, members if known else None)


def permuted(pairs: Pairs, devices: Devices) -> Groups:
  """Returns the groups that a permutation connects."""
  return listed([tuple(sorted(group)) for group in connected(pairs)], devices)


def _ranges(text: str) -> list[int]:
  """Returns the numbers of "0:3" or "1,2"."""
  parts = [_integers(part) for part in text.split(",")]
  return [i for part in parts for i in range(part[0], part[-1] + 1)]


def _mode(kind: str, instruction: Instruction, devices: Devices) -> str:
  """Returns the meaning of the numbers in a collective's groups, by XLA's rule."""
  if "channel_id" not in instruction.attributes:
    return "replicas"
  if kind not in ("all-reduce", "all-gather", "reduce-scatter"):
    # Sends have a channel in programs of replicas, too.
    return "partitions" if devices.partitions > 1 else "replicas"
  is_global = instruction.attributes.get("use_global_device_ids") == "true"
  return "devices" if is_global else "both"


def _lists(text: str, instruction: Instruction) -> _Lists | int:
  """Returns the groups of one of XLA's notations, or the size of unknown ones."""
  if re.fullmatch(r"\{[{},\d]*\}", text):  # {{0,1},{2,3}}
    return [_integers(group) for group in text.split("},")]
  # [2,4]<=[8], or [2,4]<=[4,2]T(1,0): the numbers in order, reshaped and transposed.
  iota = r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
  if match := re.fullmatch(iota, text):
    shape, numbers = _integers(match[1]), _laid_out(match[2], match[3])
    if math.prod(shape) == numbers.size:
      return numbers.reshape(shape).tolist()
  # mesh['a'=2,'b'=8]{'a','b':(1)4}: all of the axis a and 4 of the 8 of b. A comma in
  # front of device_ids makes an attribute of it.
  order = instruction.attributes.get("device_ids", "")
  whole = f"{text},device_ids={order}" if order else text
  if match := re.fullmatch(r"mesh\[(.*?)\](.*?)\{(.*?)\}", whole):
    sizes = {axis: int(n) for axis, n in re.findall(r"'([^']*)'=(\d+)", match[1])}
    parts = [
      (axis, int(before or 1), int(size or sizes.get(axis, 0)))
      for axis, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", match[3])
    ]
    if all(axis in sizes and size for axis, _, size in parts):
      return _along(sizes, match[2], parts)
  raise unreadable("known replica groups", f"{instruction.opcode} {whole}")


def _along(
  sizes: dict[str, int], order: str, parts: list[tuple[str, int, int]]
) -> _Lists | int:
  """Returns groups along parts of the axes of a mesh in the text."""
  # The order is like ",device_ids=([2,4]T(1,0))". A part has its axis, the product of
  # the parts before, and its size.
  workers = math.prod(size for _, _, size in parts)
  match = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", order)
  unknown = "device_ids" in order and not match
  if unknown or len({axis for axis, _, _ in parts}) < len(parts):
    return workers
  shape: list[int] = []
  inside: list[int] = []
  by_axis = {axis: own for axis, *own in parts}
  for axis, size in sizes.items():
    before, part = by_axis.get(axis, (1, 1))
    inside.append(len(shape) + 1)
    shape += [before, part, size // (before * part)]
  whole = str(math.prod(sizes.values()))
  numbers = _laid_out(match[1], match[2]) if match else _laid_out(whole, None)
  cells = np.moveaxis(numbers.reshape(shape), inside, range(-len(inside), 0))
  return cells.reshape(-1, workers).tolist()


def _laid_out(shape: str, order: str | None) -> np.ndarray:
  """Returns numbers, ``arange`` in a shape that is then transposed."""
  sizes = _integers(shape)
  numbers = np.arange(math.prod(sizes)).reshape(sizes)
  return numbers.transpose(_integers(order)) if order else numbers
