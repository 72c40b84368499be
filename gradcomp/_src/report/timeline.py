"""The instructions of a scheduled module between a collective's start and its end.

An asynchronous collective begins with a start, whose value goes, in tuples and through
loops, to the instruction that is its end.
"""

from collections.abc import Iterator

from gradcomp._src.report.collectives import SHARE_SENT
from gradcomp._src.report.hlo import Path
from gradcomp._src.report.hlo_text import Computation, Instruction, unreadable

_Held = dict[str, tuple[int, ...]]  # where in nested tuples a value is, by its holders
_Run = tuple[Computation, Instruction]


def beside(path: Path) -> list[_Run] | None:
  """Returns all between start and end of a collective, or None for a synchronous one.

  Each is an instruction with its computation. The start may be the collective itself,
  or an instruction around it.
  """
  for depth in range(len(path), 0, -1):
    body, number = path[depth - 1]
    x = body[number]
    if '"is_sync":true' in x.backend_config:
      return None
    around = path[depth - 2][0][path[depth - 2][1]].opcode if depth > 1 else ""
    ends_itself = x.opcode == "send" and not around.endswith("-start")
    if x.opcode.endswith("-start") or ends_itself:
      return list(_until_done(path[:depth]))
    if chain := _chain(body, x):  # from the first fusion of the chain to its last
      links = [i for i, y in enumerate(body) if _chain(body, y) == chain]
      return [(body, y) for y in body[links[0] + 1 : links[-1]]]
  return None


def _chain(body: Computation, x: Instruction) -> list[str]:
  """Returns the number of a collective that several fusions of a TPU advance."""
  inner = (y for callee in body.called(x) for y in callee if y.opcode in SHARE_SENT)
  return next((y.chains for y in inner if y.chains), [])


def _until_done(path: Path) -> Iterator[_Run]:
  """Yields all that runs from a start on, also in the next trips of a loop."""
  *callers, (body, number) = path
  start, trips = body[number], set[tuple[str, tuple[int, ...]]]()
  # The end of a send is in its receive, if there is one.
  received = (x for x in body if x.opcode == "recv" and x.meeting == start.meeting)
  end = next(received, start) if start.opcode == "send" else start
  held: _Held = {end.name: ()}
  first = number + 1
  while True:
    done, found = _run(body, first, held)
    yield from found
    if done:
      return
    if body.root.name not in held or not callers:
      raise unreadable("a -done for each -start", start.name)
    value, (around, number) = held[body.root.name], callers[-1]
    if around[number].opcode == "while" and (body.name, value) not in trips:
      trips.add((body.name, value))
      held, first = {_parameter(body, 0): value}, 0
    else:
      callers.pop()
      body, held, first = around, {around[number].name: value}, number + 1


def _run(body: Computation, first: int, held: _Held) -> tuple[bool, list[_Run]]:
  """Returns whether the end is in a computation, and all in front of it.

  ``held`` has the places of the start's value in others, and gets new ones.
  """
  found: list[_Run] = []
  for x in body[first:]:
    number = next((i for i, y in enumerate(x.operands) if y in held), -1)
    value = held[x.operands[number]] if number >= 0 else ()
    if number >= 0 and x.opcode.endswith("-done") and not value:
      return True, found
    if number < 0:
      pass
    elif x.opcode == "get-tuple-element":
      if value and value[0] == int(x.attributes["index"]):
        held[x.name] = value[1:]
    elif x.opcode == "tuple":
      held[x.name] = (number, *value)
    elif x.opcode in ("while", "call"):
      callee = body.others[x.calls["body" if x.opcode == "while" else "to_apply"][0]]
      inside = {_parameter(callee, number): value}
      done, around = _run(callee, 0, inside)
      if done:
        return True, found + around
      if callee.root.name in inside:
        held[x.name] = inside[callee.root.name]
    else:
      held[x.name] = value
    found.append((body, x))
  return False, found


def _parameter(body: Computation, number: int) -> str:
  given = (x for x in body if x.opcode == "parameter")
  return next(x.name for x in given if x.arguments[0] == str(number))
