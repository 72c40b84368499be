"""The instructions of a scheduled module between a collective's start and its end."""

import re
from collections.abc import Iterator

from gradcomp._src.report.collectives import SHARE_SENT
from gradcomp._src.report.hlo import Path
from gradcomp._src.report.hlo_text import Instruction, Module, unreadable
from gradcomp._src.report.work import root_of

_CHAIN = re.compile(r'\bchain_id="?(\w+)')
_Tuple = tuple[int, ...]  # where in nested tuples a value is


class Timeline:
  """The order of a module's instructions.

  An asynchronous collective begins with a start, whose value goes, in tuples and
  through loops, to the instruction that is its end.
  """

  def __init__(self, module: Module):
    self._computations = module.computations

  def beside(self, path: Path) -> list[tuple[str, Instruction]] | None:
    """Returns all between start and end of a collective, or None for a synchronous one.

    Each is an instruction with its computation. The start may be the collective itself,
    or an instruction around it.
    """
    for depth in range(len(path), 0, -1):
      x = self._at(path[depth - 1])
      if '"is_sync":true' in x.backend_config:
        return None
      around = self._at(path[depth - 2]).opcode if depth > 1 else ""
      ends_itself = x.opcode == "send" and not around.endswith("-start")
      if x.opcode.endswith("-start") or ends_itself:
        return list(self._until_done(path[:depth]))
      if chain := self._chain(x):
        return self._in_chain(path[depth - 1][0], chain)
    return None

  def _at(self, place: tuple[str, int]) -> Instruction:
    name, number = place
    return self._computations[name][number]

  def _chain(self, x: Instruction) -> str | None:
    """Returns the number of a collective that several fusions of a TPU advance."""
    for name in x.calls.get("calls", ()):
      for inner in self._computations[name]:
        chain = _CHAIN.search(inner.attributes.get("frontend_attributes", ""))
        if chain and inner.opcode in SHARE_SENT:
          return chain[1]
    return None

  def _in_chain(self, name: str, chain: str) -> list[tuple[str, Instruction]]:
    """Returns all between the first fusion of a chain and its last."""
    instructions = self._computations[name]
    links = [i for i, x in enumerate(instructions) if self._chain(x) == chain]
    return [(name, x) for x in instructions[links[0] + 1 : links[-1]]]

  def _until_done(self, path: Path) -> Iterator[tuple[str, Instruction]]:
    """Yields all that runs from a start on, also in the next trips of a loop."""
    *callers, (name, number) = path
    start = self._at(path[-1])
    held: dict[str, _Tuple] = {self._arrives(name, start): ()}
    first, trips = number + 1, set[tuple[str, _Tuple]]()
    while True:
      done, found = self._run(name, first, held)
      yield from found
      if done:
        return
      root = root_of(self._computations[name]).name
      if root not in held or not callers:
        raise unreadable("a -done for each -start", start.name)
      value, caller = held[root], self._at(callers[-1])
      if caller.opcode == "while" and (name, value) not in trips:
        trips.add((name, value))
        held, first = {self._parameter(name, 0): value}, 0
      else:
        held, (name, number) = {caller.name: value}, callers.pop()
        first = number + 1

  def _arrives(self, name: str, start: Instruction) -> str:
    """Returns the instruction that has the end of a start: of a send, its receive."""
    if start.opcode == "send":
      for x in self._computations[name]:
        if x.opcode == "recv" and _meeting(x) == _meeting(start):
          return x.name
    return start.name

  def _run(
    self, name: str, first: int, held: dict[str, _Tuple]
  ) -> tuple[bool, list[tuple[str, Instruction]]]:
    """Returns whether the end is in a computation, and all in front of it.

    ``held`` has the places of the start's value in others, and gets new ones.
    """
    found: list[tuple[str, Instruction]] = []
    for x in self._computations[name][first:]:
      number, value = next(
        ((i, held[y]) for i, y in enumerate(x.operands) if y in held), (-1, ())
      )
      if number >= 0 and x.opcode.endswith("-done") and not value:
        return True, found
      if number >= 0 and x.opcode == "get-tuple-element":
        if value and value[0] == int(x.attributes["index"]):
          held[x.name] = value[1:]
      elif number >= 0 and x.opcode == "tuple":
        held[x.name] = (number, *value)
      elif number >= 0 and x.opcode in ("while", "call"):
        callee = next(iter(x.calls["body" if x.opcode == "while" else "to_apply"]))
        inside = {self._parameter(callee, number): value}
        done, around = self._run(callee, 0, inside)
        if done:
          return True, found + around
        root = root_of(self._computations[callee]).name
        held |= {x.name: inside[root]} if root in inside else {}
      elif number >= 0:
        held[x.name] = value
      found.append((name, x))
    return False, found

  def _parameter(self, name: str, number: int) -> str:
    return next(
      x.name
      for x in self._computations[name]
      if x.opcode == "parameter" and x.arguments[0] == str(number)
    )


def _meeting(x: Instruction) -> str:
  """Returns the name under which a send and a receive meet."""
  rendezvous = re.search(
    r'rendezvous="([^"]*)"', x.attributes.get("frontend_attributes", "")
  )
  return rendezvous[1] if rendezvous else x.attributes.get("channel_id", "")
