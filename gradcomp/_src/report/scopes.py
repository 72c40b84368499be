"""Scopes of collectives that XLA splits, and drops their names."""

import re
from collections.abc import Iterator, Mapping

from gradcomp._src.report import collectives as sent
from gradcomp._src.report.hlo_text import Instruction

_Named = Mapping[str, Instruction]  # the instructions of a computation, by their names

# What brings an array to a collective, or from it, as it is.
_MOVES = frozenset(
  "bitcast copy copy-done copy-start get-tuple-element recv-done reshape transpose"
  " all-gather-done all-reduce-done collective-permute-done".split()
)
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


def scope_of(x: Instruction, body: _Named) -> str:
  """Returns the scope of a collective, its own or the one of moves around it.

  XLA:TPU splits a collective of several slices in one between them and one inside,
  without names. Copies and reshapes around them keep the name of JAX's collective. The
  last part has it; one in front is a stage. Where no name is left, what an exchange
  computes is sent in a stage, too.
  """
  if x.op_name:
    return x.op_name
  found, source = _before(x, body)
  for y in _after(x, body):
    if not y.op_name and (y.opcode == "send" or _base(y) in sent.SHARE_SENT):
      return sent.as_stage(found or scope_of(y, body))
    found = found or _name(y)
  return found or sent.stage_of(source)


def _before(x: Instruction, body: _Named) -> tuple[str, str]:
  """Returns a collective's name on the way of the operand, and its source's name."""
  y, source = body.get(x.operands[0]) if x.operands else None, ""
  while y is not None:
    source = y.op_name
    if name := _name(y):
      return name, source
    y = body.get(y.operands[0]) if y.opcode in _MOVES and y.operands else None
  return "", source


def _after(x: Instruction, body: _Named) -> Iterator[Instruction]:
  """Yields the readers of a collective's result, as it is."""
  names = {x.name}
  if x.opcode == "send":  # its result is that of the recv that it meets
    meeting = _meeting(x)
    names = {
      y.name for y in body.values() if y.opcode == "recv" and _meeting(y) == meeting
    }
  for y in body.values():  # in a text, operands come first
    if names.intersection(y.operands):
      yield y
      names |= {y.name} if y.opcode in _MOVES else set()


def _base(x: Instruction) -> str:
  return x.opcode.removesuffix("-start")


def _meeting(x: Instruction) -> str | None:
  match = _MEETING.search(x.attributes.get("frontend_attributes", ""))
  return match[1] if match else x.attributes.get("channel_id")


def _name(x: Instruction) -> str:
  """Returns the scope of an instruction if JAX made it for a collective."""
  last = x.op_name.rpartition("/")[2].removesuffix("_invariant")
  return x.op_name if last in sent.KINDS or sent.is_exchange(x.op_name) else ""
