"""The groups of devices that exchange in a collective of HLO, in all its notations."""

import itertools
import math
import re

import numpy as np

from gradcomp._src.report.hlo_text import Instruction, Module, integers, unreadable

# XLA:TPU's number of a device is 100,000 x its slice, from 1, and its own number.
_SLICE = 100_000
_LISTS = r"(\"[^\"]*\"|\{(?:\{[^{}]*\}[,\s]*)*\})"  # in hints: quoted or not
_TARGET = re.compile(rf"_xla_megascale_target={_LISTS}")
_PAIRS = re.compile(rf"_source_target_pairs={_LISTS}")

# Slices, replicas and partitions: devices are in this order.
Devices = tuple[int, int, int]
Groups = tuple[tuple[int, ...], ...]  # the devices of each


def devices_of(module: Module) -> Devices:
  """Returns the devices of a program, on all slices of TPUs."""
  everything = itertools.chain(*module.computations.values())
  groups = itertools.chain(*(_transfer(x, _SLICE) or () for x in everything))
  last = max(itertools.chain(*groups), default=0) // _SLICE
  replicas, partitions = (
    int(module.attributes.get(x, 1)) for x in ("replica_count", "num_partitions")
  )
  return last + 1, replicas, partitions


def groups_of(kind: str, x: Instruction, devices: Devices) -> Groups:
  """Returns the groups of a collective, and of a permutation who sends to whom."""
  slices, replicas, partitions = devices
  if (between := _transfer(x, replicas * partitions)) is not None:
    return tuple(map(tuple, between))
  reduces = kind in ("all-reduce", "all-gather", "reduce-scatter")
  # Numbers are those of columns here, and each row has groups of its own: by XLA's rule
  # they are of replicas, of partitions, of all devices of a slice, or of replicas with
  # all their partitions. Sends have a channel in programs of replicas, too.
  devices_at: np.ndarray = np.arange(math.prod(devices)).reshape(devices)
  if "channel_id" not in x.attributes or (partitions == 1 and not reduces):
    devices_at = devices_at.swapaxes(1, 2).reshape(-1, replicas)
  elif not reduces:
    devices_at = devices_at.reshape(-1, partitions)
  elif x.attributes.get("use_global_device_ids") == "true":
    devices_at = devices_at.reshape(slices, -1)
  if kind == "collective-permute":
    hint = _PAIRS.search(x.hints)
    text = hint[1] if hint else x.attributes.get("source_target_pairs", "none")
    if not re.fullmatch(r"\{(?:\{\d+,\d+\},?)*\}", text := re.sub(r"[\s\"]", "", text)):
      raise unreadable("known pairs", f"{x.opcode} {text}")
    lists = [integers(pair) for pair in re.findall(r"\d+,\d+", text)]
  else:
    lists = _lists(x) or [[*range(devices_at.shape[1])]]
  if max(itertools.chain(*lists), default=0) >= devices_at.shape[1]:
    raise unreadable("groups of its own devices", f"{x.opcode} {lists}")
  members = [row[group].ravel() for row in devices_at for group in lists]
  return tuple(tuple(map(int, group)) for group in members)


def _transfer(x: Instruction, size: int) -> list[list[int]] | None:
  """Returns who takes part in a transfer between slices of TPUs, each of this size."""
  if not (match := _TARGET.search(x.hints)):
    return None
  target = re.sub(r"[\s\"]", "", match[1])
  # "{1,2}x{0:3}": each of the devices 0 to 3 with the same one of the other slices.
  if match := re.fullmatch(r"\{([\d,:]+)\}x\{([\d,:]+)\}", target):
    parts = ([integers(y) for y in text.split(",")] for text in match.groups())
    between, own = ([i for y in x for i in range(y[0], y[-1] + 1)] for x in parts)
    return [[(s - 1) * size + i for s in between] for i in own]
  if not re.fullmatch(r"\{(?:\{[\d,>\-]+\},?)+\}", target):
    raise unreadable("known transfers between slices", target)
  groups = map(integers, re.findall(r"\{(\d[\d,>\-]*)\}", target))
  return [[(n // _SLICE - 1) * size + n % _SLICE for n in group] for group in groups]


def _lists(x: Instruction) -> list[list[int]]:
  """Returns the groups of one of XLA's notations; none if all are in one."""
  text = x.attributes.get("replica_groups", "{}")
  if re.fullmatch(r"\{[{},\d]*\}", text):  # {{0,1},{2,3}}
    return [integers(group) for group in text.split("},") if text != "{}"]
  # A comma in front of device_ids makes an attribute of it.
  if "device_ids" in x.attributes:
    text += f",device_ids={x.attributes['device_ids']}"
  order, shape, inside = "", list[int](), [1]
  # [2,4]<=[8], or [2,4]<=[4,2]T(1,0): the numbers in order, reshaped and transposed.
  if match := re.fullmatch(r"\[(\d+,\d+)\]<=(\[.*)", text):
    order, shape = match[2], integers(match[1])
  # mesh['a'=2,'b'=8]{'a','b':(1)4}: all of the axis a and 4 of the 8 of b; the number
  # in brackets is the product of the axis's parts before.
  elif match := re.fullmatch(r"mesh\[(.*)\](?:,device_ids=\((.*)\))?\{(.*)\}", text):
    order, inside = match[2] or "", []
    sizes = {axis: int(n) for axis, n in re.findall(r"'([^']*)'=(\d+)", match[1])}
    parts = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", match[3])
    for axis, size in sizes.items():
      own = [(int(y or 1), int(n or size)) for name, y, n in parts if name == axis]
      end = 1
      for before, part in sorted(own):
        shape += [before // end, part]
        inside.append(len(shape) - 1)
        end = before * part
      shape.append(size // end)
    if not sizes.keys() >= {axis for axis, *_ in parts}:
      shape = []
  layout = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order)
  if layout:
    numbers = np.arange(math.prod(integers(layout[1]))).reshape(integers(layout[1]))
    numbers = numbers.transpose(integers(layout[2])) if layout[2] else numbers
  else:  # a list of all devices, or none where they are in order
    numbers = np.array(integers(order) or range(math.prod(shape)))
  if not shape or math.prod(shape) != numbers.size:
    raise unreadable("known replica groups", f"{x.opcode} {text}")
  cells = np.moveaxis(numbers.reshape(shape), inside, range(-len(inside), 0))
  return cells.reshape(-1, math.prod(shape[i] for i in inside)).tolist()
