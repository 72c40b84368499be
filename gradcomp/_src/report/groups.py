"""The groups of devices that exchange in a collective of HLO, in all its notations."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gradcomp._src.report.hlo_text import Instruction, Module, unreadable

# XLA:TPU's number of a device is 100,000 x its slice, from 1, and its own number.
_SLICE = 100_000
_LISTS = r"(\"[^\"]*\"|\{(?:\{[^{}]*\}[,\s]*)*\})"  # in hints: quoted or not
_TARGET = re.compile(rf"_xla_megascale_target={_LISTS}")
_PAIRS = re.compile(rf"_source_target_pairs={_LISTS}")

_Lists = Sequence[Sequence[int]]
Pairs = list[tuple[int, int]]


def integers(text: str) -> list[int]:
  """Returns the numbers in a text."""
  return [int(x) for x in re.findall(r"\d+", text)]


class Groups(NamedTuple):
  """The groups of devices that exchange with each other."""

  workers: int  # the size of the largest
  members: tuple[tuple[int, ...], ...] | None  # the devices of each, if they are known


class Devices(NamedTuple):
  """The devices of a program, in this order: of slices, of replicas, of partitions."""

  slices: int
  replicas: int
  partitions: int

  @property
  def number(self) -> int:
    """The number of all devices."""
    return math.prod(self)

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
    starts = range(0, self.number, self.replicas * p)
    return [[start + i for i in group] for start in starts for group in found]

  def listed(self, groups: Iterable[Sequence[int]]) -> Groups:
    """Returns groups from the devices of each."""
    members = tuple(tuple(group) for group in groups)
    known = all(i < self.number for group in members for i in group)
    return Groups(max(1, *map(len, members), 1), members if known else None)


def devices_of(module: Module) -> Devices:
  """Returns the devices of a program, on all slices of TPUs."""
  everything = itertools.chain(*module.computations.values())
  groups = itertools.chain(*(_transfer(x, _SLICE) or () for x in everything))
  last = max(itertools.chain(*groups), default=0) // _SLICE
  counts = (module.attributes.get(x, 1) for x in ("replica_count", "num_partitions"))
  return Devices(last + 1, *map(int, counts))


def groups_of(kind: str, x: Instruction, devices: Devices) -> Groups:
  """Returns the groups of a collective that is no permutation."""
  if (between := _transfer(x, devices.replicas * devices.partitions)) is not None:
    return devices.listed(between)
  mode = _mode(kind, x, devices)
  text = x.attributes.get("replica_groups", "{}")
  r, p = devices.replicas, devices.partitions
  everyone = range({"devices": r * p, "partitions": p}.get(mode, r))
  lists = [everyone] if text == "{}" else _lists(text, x)
  if isinstance(lists, int):  # of a size that is known, and of unknown devices
    return Groups(lists * (p if mode == "both" else 1), None)
  return devices.listed(devices.numbered(lists, mode))


def pairs_of(x: Instruction, devices: Devices) -> Pairs:
  """Returns who sends to whom by a permutation, or by a send between devices."""
  if (between := _transfer(x, devices.replicas * devices.partitions)) is not None:
    return [(pair[0], pair[-1]) for pair in between]
  hint = _PAIRS.search(x.hints)
  text = hint[1].strip('"') if hint else x.attributes.get("source_target_pairs", "none")
  if not re.fullmatch(r"\{(?:\{\d+,\d+\},?)*\}", text := re.sub(r"\s", "", text)):
    raise unreadable("known pairs", f"{x.opcode} {text}")
  lists = [integers(pair) for pair in re.findall(r"\d+,\d+", text)]
  numbered = devices.numbered(lists, _mode("collective-permute", x, devices))
  return [(source, target) for source, target in numbered]


def _transfer(x: Instruction, size: int) -> _Lists | None:
  """Returns who takes part in a transfer between slices of TPUs, each of this size."""
  if not (match := _TARGET.search(x.hints)):
    return None
  target = re.sub(r"[\s\"]", "", match[1])
  # "{1,2}x{0:3}": each of the devices 0 to 3 with the same one of the other slices.
  if match := re.fullmatch(r"\{([\d,:]+)\}x\{([\d,:]+)\}", target):
    parts = ([integers(y) for y in text.split(",")] for text in match.groups())
    slices, own = ([i for y in part for i in range(y[0], y[-1] + 1)] for part in parts)
    return [[(s - 1) * size + i for s in slices] for i in own]
  if not re.fullmatch(r"\{(?:\{[\d,>\-]+\},?)+\}", target):
    raise unreadable("known transfers between slices", target)
  groups = map(integers, re.findall(r"\{(\d[\d,>\-]*)\}", target))
  return [[(n // _SLICE - 1) * size + n % _SLICE for n in group] for group in groups]


def _mode(kind: str, x: Instruction, devices: Devices) -> str:
  """Returns the meaning of the numbers in a collective's groups, by XLA's rule."""
  if "channel_id" not in x.attributes:
    return "replicas"
  if kind not in ("all-reduce", "all-gather", "reduce-scatter"):
    # Sends have a channel in programs of replicas, too.
    return "partitions" if devices.partitions > 1 else "replicas"
  return "devices" if x.attributes.get("use_global_device_ids") == "true" else "both"


def _lists(text: str, x: Instruction) -> _Lists | int:
  """Returns the groups of one of XLA's notations, or the size of unknown ones."""
  if re.fullmatch(r"\{[{},\d]*\}", text):  # {{0,1},{2,3}}
    return [integers(group) for group in text.split("},")]
  # [2,4]<=[8], or [2,4]<=[4,2]T(1,0): the numbers in order, reshaped and transposed.
  if match := re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
    shape, numbers = integers(match[1]), _laid_out(integers(match[2]), match[3])
    if math.prod(shape) == numbers.size:
      return numbers.reshape(shape).tolist()
  # mesh['a'=2,'b'=8]{'a','b':(1)4}: all of the axis a and 4 of the 8 of b. A comma in
  # front of device_ids makes an attribute of it.
  order = x.attributes.get("device_ids", "")
  whole = f"{text},device_ids={order}" if order else text
  if match := re.fullmatch(r"mesh\[(.*?)\](.*?)\{(.*?)\}", whole):
    sizes = {axis: int(n) for axis, n in re.findall(r"'([^']*)'=(\d+)", match[1])}
    parts = [
      (axis, int(before or 1), int(size or sizes.get(axis, 0)))
      for axis, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", match[3])
    ]
    if all(axis in sizes and size for axis, _, size in parts):
      return _along(sizes, match[2], parts)
  raise unreadable("known replica groups", f"{x.opcode} {whole}")


def _along(
  sizes: dict[str, int], order: str, parts: list[tuple[str, int, int]]
) -> _Lists | int:
  """Returns groups along parts of the axes of a mesh in the text."""
  # The order is like ",device_ids=([2,4]T(1,0))". A part has its axis, the product of
  # the parts before, and its size.
  workers = math.prod(size for _, _, size in parts)
  match = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", order)
  by_axis = {axis: own for axis, *own in parts}
  if len(by_axis) < len(parts) or ("device_ids" in order and not match):
    return workers
  shape: list[int] = []
  inside: list[int] = []
  for axis, size in sizes.items():
    before, part = by_axis.get(axis, (1, 1))
    inside.append(len(shape) + 1)
    shape += [before, part, size // (before * part)]
  numbers = _laid_out(*((integers(match[1]), match[2]) if match else (shape, None)))
  cells = np.moveaxis(numbers.reshape(shape), inside, range(-len(inside), 0))
  return cells.reshape(-1, workers).tolist()


def _laid_out(sizes: list[int], order: str | None) -> np.ndarray:
  """Returns numbers, ``arange`` in a shape that is then transposed."""
  numbers = np.arange(math.prod(sizes)).reshape(sizes)
  return numbers.transpose(integers(order)) if order else numbers
