"""The walk through a program of HLO that finds and counts its collectives."""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from gradcomp._src.report import collectives as sent
from gradcomp._src.report import hlo_text, sends
from gradcomp._src.report.collectives import Collective
from gradcomp._src.report.groups import Devices, Groups, devices_of
from gradcomp._src.report.hlo_text import Computation, Instruction, Module
from gradcomp._src.report.reader import Place
from gradcomp._src.report.scopes import untold

# An instruction, and in front of it those around it that call, from the entry on: the
# computation and the number of each.
Path = tuple[tuple[Computation, int], ...]
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
  module = hlo_text.read_module(text)
  devices = devices_of(module)
  unseen: dict[str, None] = {}

  @functools.cache
  def exchanges(name: str) -> bool:
    """Returns whether an exchange of gradients is in a computation."""
    return any(map(is_exchange, module.computations[name]))

  def is_exchange(x: Instruction) -> bool:
    return sent.is_exchange(x.op_name) or any(map(exchanges, x.called))

  def walk(
    callers: Path, name: str, around: Place, in_front: bool, chains: set[str] | None
  ) -> Iterator[Found]:
    """Yields the collectives of a computation that runs at a place.

    ``in_front`` is whether an exchange reads its result. In a fusion, ``chains`` are
    the collectives that were met in others of the same computation; else None.
    """
    own = module.computations[name]
    read: set[str] = set()  # what an exchange reads; in a text operands come first
    for x in reversed(own):
      if x.name in read or is_exchange(x):
        read.update(x.operands)
    permutations = sends.permutations(own, devices)
    met = set[str]() if chains is None else chains
    for number, x in enumerate(own):
      path = (*callers, (own, number))
      ahead = in_front or x.name in read
      if sends.kind_of(x):
        pairs = permutations.get(x.name, [])
        # XLA:TPU splits an asynchronous collective over fusions, and each has it.
        if pairs is not None and not met.intersection(x.chains):
          given = x, own, devices, pairs, around
          for one in sends.sends(*given, is_fused=chains is not None):
            yield *one, ahead, path
        met.update(x.chains)
      elif x.opcode.endswith(("-update", "-done")):  # these repeat a -start's calls
        continue
      elif sends.is_unseen(x):
        unseen[x.name] = None
      else:
        inside = met if x.opcode == "fusion" else None
        for callee, here in _calls(x, own, around):
          yield from walk(path, callee, here, ahead, inside)

  found = tuple(walk((), module.entry, Place(), in_front=False, chains=None))
  ends = [(x, *path[-1]) for x, _, _, path in found if x.workers > 1]
  scopes = {body[number].name: x.scope for x, body, number in ends}
  return Program(module, found, devices, tuple(unseen), untold(module, scopes))


def _calls(
  x: Instruction, body: Computation, around: Place
) -> Iterator[tuple[str, Place]]:
  """Yields the computations that an instruction calls, and the places of their runs."""
  trips = trip_count(x, body) if x.opcode == "while" else 1
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
      branches += ((f"{body.name}/{x.name}", number, len(callees)),)
    yield callee, Place(scope, around.times * runs, loop, unknown, branches)


def trip_count(loop: Instruction, around: Computation) -> int | None:
  """Returns the number of trips of a ``while``; None if the text does not have it."""
  known = r'"known_trip_count":\{"n":"(\d+)"\}'
  if match := re.search(known, loop.backend_config):
    return int(match[1])
  # XLA:TPU leaves it out. Then the condition must be i < n, of a counter that grows
  # from a constant, by constants, to another one.
  inner, body = (around.others[loop.calls[key][0]] for key in ("condition", "body"))
  first, result = around.behind(loop.operands[0], _COPIES), body.root
  if inner.root.attributes.get("direction") != "LT":
    return None
  counter, bound = inner.root.operands
  place, other = _place(inner, counter), _place(inner, bound)
  end = _constant(inner, bound)
  if other is not None and _place(body, _element(result, other)) == other:
    end = _constant(around, _element(first, other))  # which the loop does not change
  if place is None:
    return None
  step = _step(body, _element(result, place), place)
  begin = _constant(around, _element(first, place))
  if end is None or begin is None or not step or step < 0:
    return None
  return max(0, -((begin - end) // step))  # rounded up


_COPIES = ("copy", "bitcast")


def _step(body: Computation, name: str | None, place: int) -> int | None:
  """Returns the sum of the constants that are added to an element of the loop."""
  if _place(body, name) == place:
    return 0
  added = body.behind(name, _COPIES)
  if added is None or added.opcode != "add":
    return None
  for one, other in (added.operands, added.operands[::-1]):
    if (number := _constant(body, one)) is not None:
      rest = _step(body, other, place)
      return None if rest is None else number + rest
  return None


def _constant(body: Computation, name: str | None) -> int | None:
  """Returns the number that an instruction is."""
  found = body.behind(name, _COPIES)
  is_number = found is not None and found.opcode == "constant"
  match = re.fullmatch(r"-?\d+", found.arguments[0]) if found and is_number else None
  return int(match[0]) if match else None


def _place(body: Computation, name: str | None) -> int | None:
  """Returns the place in the loop's tuple that an instruction reads."""
  found = body.behind(name, _COPIES)
  if found is None or found.opcode != "get-tuple-element":
    return None
  source = body.named.get(found.operands[0])
  is_loop = source is not None and source.opcode == "parameter"
  return int(found.attributes["index"]) if is_loop else None


def _element(made: Instruction | None, place: int) -> str | None:
  """Returns the name of an element of a tuple."""
  return made.operands[place] if made and made.opcode == "tuple" else None
