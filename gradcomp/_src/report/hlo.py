"""The walk through a program of HLO that finds and counts its collectives."""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from gradcomp._src.report import collectives as sent
from gradcomp._src.report import groups, hlo_text, sends
from gradcomp._src.report.reader import Place

Step = tuple[hlo_text.Computation, int]  # an instruction, by its number
Path = tuple[Step, ...]  # an instruction after its callers, from the entry on
# A collective, its groups, whether an exchange of gradients reads its result, and where
# it is.
Found = tuple[sent.Collective, groups.Groups, bool, Path]


class Program(NamedTuple):
  """A program's module, its collectives, and its devices."""

  module: hlo_text.Module
  collectives: tuple[Found, ...]
  devices: groups.Devices
  unseen: tuple[str, ...]  # other names that send: to hosts, and communicating kernels
  untold: tuple[str, ...]  # collectives without a scope, means that none completes
  axes: tuple[str, ...] = ()  # of the mesh


def parse_program(text: str) -> Program:
  """Returns the collectives of optimized HLO, including called computations."""
  module = hlo_text.read_module(text)
  devices = groups.devices_of(module)
  unseen: dict[str, None] = {}

  @functools.cache
  def exchanges(name: str) -> bool:
    """Returns whether an exchange of gradients is in a computation."""
    return any(map(is_exchange, module.computations[name]))

  is_exchange = lambda x: sent.is_exchange(x.op_name) or any(map(exchanges, x.called))

  def walk(
    callers: Path, name: str, around: Place, in_front: bool, chains: set[str] | None
  ) -> Iterator[Found]:
    """Yields the collectives of a computation that runs at a place."""
    # `in_front`: an exchange reads its result. `chains`, in a fusion: the collectives
    # that were met in others of the same computation.
    own = module.computations[name]
    read: set[str] = set()  # what an exchange reads; in a text operands come first
    for x in reversed(own):
      if x.name in read or is_exchange(x):
        read.update(x.operands)
    known = sends.groups_in(own, devices)
    met = set[str]() if chains is None else chains
    for number, x in enumerate(own):
      path = (*callers, (own, number))
      ahead = in_front or x.name in read
      if sends.kind_of(x):
        # XLA:TPU splits an asynchronous collective over fusions, and each has it.
        if x.name in known and not met.intersection(x.chains):
          on, is_fused = known[x.name], chains is not None
          for one in sends.sends(x, own, on.workers, around, is_fused):
            yield one, on, ahead, path
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
  names = {x.op_name for body in module.computations.values() for x in body}
  untold: list[str] = []
  if any(map(sent.is_exchange, names)):
    lost = sent.means_in(names) - sent.means_in(scopes.values())
    untold = [*(x for x in scopes if not scopes[x]), *sorted(lost)]
  return Program(module, found, devices, tuple(unseen), tuple(untold))


def _calls(
  x: hlo_text.Instruction, body: hlo_text.Computation, around: Place
) -> Iterator[tuple[str, Place]]:
  """Yields the computations that an instruction calls, and the places of their runs."""
  trips = trip_count(x, body) if x.opcode == "while" else 1
  loop = around.in_loop or x.opcode == "while"
  unknown = around.trips_unknown or trips is None
  calls, is_start = x.calls, x.opcode.endswith("-start")
  # What XLA wraps or fuses may have no name of its own.
  scope = x.op_name if x.opcode == "fusion" or is_start else ""
  # Other attributes of a start are those of the instruction that it wraps.
  keys = ["calls"] if is_start and "calls" in calls else [*calls]
  callees = [(key, callee) for key in keys for callee in calls[key]]
  for number, (key, callee) in enumerate(callees):
    runs = 1 if trips is None else trips + (key == "condition")
    branches = around.branches
    if x.opcode == "conditional":
      branches += ((f"{body.name}/{x.name}", number, len(callees)),)
    yield callee, Place(scope, around.times * runs, loop, unknown, branches)


def trip_count(loop: hlo_text.Instruction, around: hlo_text.Computation) -> int | None:
  """Returns the number of trips of a ``while``; None if the text does not have it."""
  if match := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.backend_config):
    return int(match[1])
  # XLA:TPU leaves it out. Then the condition must be i < n, of a counter that grows
  # from a constant, by constants, to another one.
  inner, body = (around.others[loop.calls[key][0]] for key in ("condition", "body"))
  first, result = around.behind(loop.operands[0], _COPIES), body.root
  if inner.root.attributes.get("direction") != "LT":
    return None
  counter, end = (_sum(inner, name) for name in inner.root.operands)
  if counter is None or end is None or counter[1] is None or counter[0]:
    return None
  place, other = counter[1], end[1]
  if other is not None:  # which the loop must not change
    same = end == _sum(body, _element(result, other)) == (0, other)
    end = _sum(around, _element(first, other)) if same else None
  match _sum(around, _element(first, place)), _sum(body, _element(result, place)), end:
    case (begin, None), (step, at), (last, None) if at == place and step > 0:
      return max(0, -((begin - last) // step))  # rounded up
  return None


_COPIES = ("copy", "bitcast")


def _sum(body: hlo_text.Computation, name: str | None) -> tuple[int, int | None] | None:
  """Returns a constant, and the place of the loop's element that it is added to."""
  found = body.behind(name, _COPIES)
  if found is None:
    return None
  if found.opcode == "add":
    parts = [_sum(body, x) for x in found.operands]
    places = [x[1] for x in parts if x and x[1] is not None]
    if None in parts or len(places) > 1:
      return None
    return sum(x[0] for x in parts if x), places[0] if places else None
  if found.opcode == "constant":
    match = re.fullmatch(r"-?\d+", found.arguments[0])
    return (int(match[0]), None) if match else None
  element = found.opcode == "get-tuple-element"
  source = body.named.get(found.operands[0]) if element else None
  is_loop = source is not None and source.opcode == "parameter"
  return (0, int(found.attributes["index"])) if is_loop else None


def _element(made: hlo_text.Instruction | None, place: int) -> str | None:
  """Returns the name of an element of a tuple."""
  return made.operands[place] if made and made.opcode == "tuple" else None
