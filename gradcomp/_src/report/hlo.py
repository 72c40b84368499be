"""The walk through a program of HLO that finds and counts its collectives."""

import functools
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from gradcomp._src.report import collectives as sent
from gradcomp._src.report.collectives import Collective
from gradcomp._src.report.groups import Devices, Groups
from gradcomp._src.report.hlo_text import Instruction, Module, read_module, unreadable
from gradcomp._src.report.loops import trip_count
from gradcomp._src.report.reader import Place
from gradcomp._src.report.scopes import cutting_in, untold
from gradcomp._src.report.sends import body_of, devices_of, is_unseen, kind_of, sends

_CHAIN = re.compile(r'\bchain_id="?(\w+)')
# An instruction, and in front of it those around it that call, from the entry on: the
# computation and the number of each.
Path = tuple[tuple[str, int], ...]
# A collective, its groups, whether an exchange of gradients reads its result, and where
# it is.
Found = tuple[Collective, Groups, bool, Path]


class Program(NamedTuple):
  """A program's module, its collectives, and its devices.

  ``unseen`` has the names of what sends, too, and cannot be counted: transfers to or
  from the host, and kernels that communicate. ``untold`` has the collectives and means
  of exchanges that are left without a name. ``axes`` are those of the mesh.
  """

  module: Module
  collectives: tuple[Found, ...]
  devices: Devices
  unseen: tuple[str, ...]
  untold: tuple[str, ...]
  axes: tuple[str, ...] = ()


def parse_program(text: str) -> Program:
  """Returns the collectives of optimized HLO, including called computations."""
  module = read_module(text)
  devices, cutting = devices_of(module), cutting_in(module)
  unseen: dict[str, None] = {}

  @functools.cache
  def exchanges(name: str) -> bool:
    """Returns whether an exchange of gradients is in a computation."""
    return any(map(is_exchange, module.computations.get(name, ())))

  def is_exchange(x: Instruction) -> bool:
    called = itertools.chain(*x.calls.values())
    return sent.is_exchange(x.op_name) or any(map(exchanges, called))

  def walk(
    callers: Path, name: str, around: Place, in_front: bool, chains: set[str] | None
  ) -> Iterator[Found]:
    """Yields the collectives of a computation that runs at a place.

    ``in_front`` is whether an exchange reads its result. In a fusion, ``chains`` are
    the collectives that were met in others of the same computation; else None.
    """
    if name not in module.computations:
      raise unreadable("every computation that it calls", name)
    instructions = module.computations[name]
    read: set[str] = set()  # what an exchange reads; in a text operands come first
    for x in reversed(instructions):
      if x.name in read or is_exchange(x):
        read.update(x.operands)
    named = {x.name: x for x in instructions}
    body = body_of(named, devices, is_fused=chains is not None, cutting=cutting)
    met = set[str]() if chains is None else chains
    for number, x in enumerate(instructions):
      path = (*callers, (name, number))
      ahead = in_front or x.name in read
      if kind_of(x):
        # XLA:TPU splits an asynchronous collective over fusions, and each has it.
        chain = set(_CHAIN.findall(x.attributes.get("frontend_attributes", "")))
        found = () if chain & met else sends(x, body, around)
        yield from ((*one, ahead, path) for one in found)
        met |= chain
      elif x.opcode.endswith(("-update", "-done")):  # these repeat a -start's calls
        continue
      elif is_unseen(x):
        unseen[x.name] = None
      else:
        trips = trip_count(x, named, module) if x.opcode == "while" else 1
        inside = met if x.opcode == "fusion" else None
        for callee, here in _calls(x, name, around, trips):
          yield from walk(path, callee, here, ahead, inside)

  found = tuple(walk((), module.entry, Place(), in_front=False, chains=None))
  scopes = {_at(module, path).name: x.scope for x, _, _, path in found if x.workers > 1}
  return Program(module, found, devices, tuple(unseen), untold(module, scopes))


def _at(module: Module, path: Path) -> Instruction:
  name, number = path[-1]
  return module.computations[name][number]


def _calls(
  x: Instruction, caller: str, around: Place, trips: int | None
) -> Iterator[tuple[str, Place]]:
  """Yields the computations that an instruction calls, and the places of their runs."""
  loop = around.in_loop or x.opcode == "while"
  unknown = around.trips_unknown or trips is None
  # What XLA wraps or fuses may have no name of its own.
  scope = x.op_name if x.opcode == "fusion" or x.opcode.endswith("-start") else ""
  calls = x.calls
  if x.opcode.endswith("-start") and "calls" in calls:
    # Other attributes are those of the instruction that it wraps.
    calls = {"calls": calls["calls"]}
  callees = [(key, callee) for key in calls for callee in calls[key]]
  for number, (key, callee) in enumerate(callees):
    runs = 1 if trips is None else trips + (key == "condition")
    branches = around.branches
    if x.opcode == "conditional":
      branches += ((f"{caller}/{x.name}", number, len(callees)),)
    yield callee, Place(scope, around.times * runs, loop, unknown, branches)
