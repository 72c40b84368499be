"""The trip counts of loops in HLO."""

import re
from collections.abc import Mapping

from gradcomp._src.report.hlo_text import Instruction, Module

_Body = Mapping[str, Instruction]  # the instructions of a computation, by their names


def trip_count(loop: Instruction, around: _Body, module: Module) -> int | None:
  """Returns the number of trips of a ``while``; None if the text does not have it.

  XLA:TPU leaves out ``known_trip_count``. Then the condition must be ``i < n``, of a
  counter that grows from a constant, by constants, to another one.
  """
  known = r'"known_trip_count":\{"n":"(\d+)"\}'
  if match := re.search(known, loop.backend_config):
    return int(match[1])
  inner, body = (
    {x.name: x for x in module.computations.get(loop.calls.get(key, ("",))[0], ())}
    for key in ("condition", "body")
  )
  test, result = _root(inner), _root(body)
  first = _origin(around, loop.operands[0])
  if test is None or result is None or test.attributes.get("direction") != "LT":
    return None

  def kept(name: str) -> int | None:
    """Returns a number that the loop does not change."""
    number, place = _constant(inner, name), _place(inner, name)
    if place is None or _place(body, _element(result, place)) != place:
      return number
    return _constant(around, _element(first, place))

  counter, bound = test.operands
  place, end = _place(inner, counter), kept(bound)
  if place is None or end is None:
    return None
  step = _step(body, _element(result, place), place)
  begin = _constant(around, _element(first, place))
  if step is None or step <= 0 or begin is None:
    return None
  return max(0, -((begin - end) // step))  # rounded up


def _step(body: _Body, name: str | None, place: int) -> int | None:
  """Returns the sum of the constants that are added to an element of the loop."""
  step = 0
  while _place(body, name) != place:
    added = _origin(body, name)
    if added is None or added.opcode != "add":
      return None
    one, two = added.operands
    number, name = _constant(body, one), two
    if number is None:
      number, name = _constant(body, two), one
    if number is None:
      return None
    step += number
  return step


def _root(body: _Body) -> Instruction | None:
  return next((x for x in body.values() if x.is_root), None)


def _origin(body: _Body, name: str | None) -> Instruction | None:
  """Returns the instruction that computes a value, behind copies of it."""
  found = body.get(name or "")
  while found is not None and found.opcode in ("copy", "bitcast"):
    found = body.get(found.operands[0])
  return found


def _constant(body: _Body, name: str | None) -> int | None:
  """Returns the number that an instruction is."""
  found = _origin(body, name)
  is_number = found is not None and found.opcode == "constant"
  match = re.fullmatch(r"-?\d+", found.arguments[0]) if found and is_number else None
  return int(match[0]) if match else None


def _place(body: _Body, name: str | None) -> int | None:
  """Returns the place in the loop's tuple that an instruction reads."""
  found = _origin(body, name)
  if found is None or found.opcode != "get-tuple-element":
    return None
  source = body.get(found.operands[0])
  if source is None or source.opcode != "parameter":
    return None
  return int(found.attributes["index"])


def _element(made: Instruction | None, place: int) -> str | None:
  """Returns the name of an element of a tuple."""
  is_tuple = made is not None and made.opcode == "tuple"
  return made.operands[place] if made and is_tuple else None
