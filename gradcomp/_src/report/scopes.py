"""Scopes of collectives that XLA splits, and drops their names."""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping

from gradcomp._src.report import collectives as sent
from gradcomp._src.report.hlo_text import Instruction, Module

_Named = Mapping[str, Instruction]  # the instructions of a computation, by their names

# What brings an array to a collective, or from it, as it is.
_MOVES = frozenset(
  "bitcast copy copy-done copy-start get-tuple-element recv-done reshape transpose"
  " all-gather-done all-reduce-done collective-permute-done".split()
)
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


def scope_of(
  x: Instruction, body: _Named, cutting: Collection[str], around: str = ""
) -> str:
  """Returns the scope of a collective, its own or the one of moves around it.

  XLA:TPU splits a collective of several slices in one between them and one inside,
  without names. Copies and reshapes around them keep the name of JAX's collective. The
  last part has it; one in front is a stage. XLA:GPU makes one sum of several, and
  slices of it keep their names: they are joined, as XLA joins names. Where no name is
  left, what an exchange computes is sent in a stage, too, and else the name ``around``
  it is taken, or that of what computes the operand. ``cutting`` are the computations
  that only move parts.
  """
  if x.op_name:
    return x.op_name
  parts = [y for y in _after(x, body, cutting) if _is_part(y, x, cutting)]
  names = [_name_behind(y, body, cutting, _name(y)) for y in parts]
  if joined := ":".join(dict.fromkeys(filter(None, names))):
    return joined
  found, source = _before(x, body)
  behind = _name_behind(x, body, cutting, found)
  return behind or sent.stage_of(source) or around or source


def cutting_in(module: Module) -> frozenset[str]:
  """Returns the names of the computations that only cut and move an array."""
  moves = _MOVES | {"parameter", "slice"}
  bodies = module.computations.items()
  return frozenset(
    name for name, body in bodies if all(x.opcode in moves for x in body)
  )


def untold(module: Module, found: Mapping[str, str]) -> tuple[str, ...]:
  """Returns what no name tells, if there are exchanges of gradients in a program.

  These are the names of collectives that have no scope, by those of ``found``, and of
  the means that no collective completes.
  """
  names = {x.op_name for body in module.computations.values() for x in body}
  if not any(map(sent.is_exchange, names)):
    return ()
  told = set(itertools.chain(*map(sent.means_in, found.values())))
  means = set(itertools.chain(*map(sent.means_in, names)))
  return *(x for x in found if not found[x]), *sorted(means - told)


def _name_behind(
  x: Instruction, body: _Named, cutting: Collection[str], found: str
) -> str:
  """Returns a name that was found, or that of what reads an array as it is."""
  for y in _after(x, body, cutting):
    if _is_nameless(y):
      return sent.as_stage(found or scope_of(y, body, cutting))
    found = found or _name(y)
  return found


def _before(x: Instruction, body: _Named) -> tuple[str, str]:
  """Returns a collective's name on the way of the operand, and its source's name."""
  y, source = body.get(x.operands[0]) if x.operands else None, ""
  while y is not None:
    source = y.op_name
    if name := _name(y):
      return name, source
    passes = y.opcode in _MOVES or _is_nameless(y)
    y = body.get(y.operands[0]) if passes and y.operands else None
  return "", source


def _after(
  x: Instruction, body: _Named, cutting: Collection[str]
) -> Iterator[Instruction]:
  """Yields the readers of a collective's result, as it is or in parts."""
  names = {x.name}
  if x.opcode == "send":  # its result is that of the recv that it meets
    meeting = _meeting(x)
    names = {
      y.name for y in body.values() if y.opcode == "recv" and _meeting(y) == meeting
    }
  for y in body.values():  # in a text, operands come first
    if names.intersection(y.operands):
      yield y
      moves = y.opcode in _MOVES or _cuts(y, cutting)
      names |= {y.name} if moves else set()


def _is_part(y: Instruction, x: Instruction, cutting: Collection[str]) -> bool:
  """Returns whether an instruction takes a part of the result of a collective."""
  is_element = y.opcode == "get-tuple-element" and len(x.operands) > 1
  return is_element or _cuts(y, cutting)


def _cuts(x: Instruction, cutting: Collection[str]) -> bool:
  called = x.calls.get("calls", ())
  return x.opcode == "slice" or (x.opcode == "fusion" and called[0] in cutting)


def _is_nameless(x: Instruction) -> bool:
  """Returns whether an instruction is a collective without a name."""
  base = x.opcode.removesuffix("-start")
  return not x.op_name and (base == "send" or base in sent.SHARE_SENT)


def _meeting(x: Instruction) -> str | None:
  match = _MEETING.search(x.attributes.get("frontend_attributes", ""))
  return match[1] if match else x.attributes.get("channel_id")


def _name(x: Instruction) -> str:
  """Returns the scope of an instruction if JAX made it for a collective."""
  last = x.op_name.rpartition("/")[2].removesuffix("_invariant")
  return x.op_name if last in sent.KINDS or sent.is_exchange(x.op_name) else ""
