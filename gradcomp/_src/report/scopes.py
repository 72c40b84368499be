"""Scopes of collectives that XLA splits, and drops their names."""

import heapq
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from gradcomp._src.report import collectives as sent
from gradcomp._src.report.hlo_text import Instruction, Module

# What brings an array to a collective, or from it, as it is.
_MOVES = frozenset(
  "bitcast copy copy-done copy-start get-tuple-element recv-done reshape transpose"
  " all-gather-done all-reduce-done collective-permute-done".split()
)
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


class Flow(NamedTuple):
  """Lists the readers of each value of a computation.

  Attributes:
    named: its instructions by their names, in the order of the text.
    order: the same without names.
    readers: the numbers in ``order`` of those that read each.
    cutting: the names of the computations that only cut and move an array.
  """

  named: Mapping[str, Instruction]
  order: Sequence[Instruction]
  readers: Mapping[str, Sequence[int]]
  cutting: Collection[str]


def flow_of(named: Mapping[str, Instruction], cutting: Collection[str]) -> Flow:
  """Returns where the values of a computation go."""
  readers: dict[str, list[int]] = {}
  for number, x in enumerate(named.values()):
    for name in dict.fromkeys(x.operands):
      readers.setdefault(name, []).append(number)
  return Flow(named, tuple(named.values()), readers, cutting)


def scope_of(x: Instruction, flow: Flow, around: str = "") -> str:
  """Returns the scope of a collective, its own or the one of moves around it.

  XLA:TPU splits a collective of several slices in one between them and one inside,
  without names. Copies and reshapes around them keep the name of JAX's collective. The
  last part has it; one in front is a stage. XLA makes one sum of several, with the name
  of one of them on TPUs and without any on GPUs, and parts of it keep their names: they
  are joined, as XLA joins names. Where no name is left, what an exchange computes is
  sent in a stage, too, and else the name ``around`` it is taken, or that of what
  computes the operand.
  """
  parts = [y for y in _after(x, flow) if _is_part(y, x, flow)]
  if x.op_name:
    names = list(filter(None, map(_name, parts)))
    is_told = _is_sum(x) and len(names) == len(x.operands) > 1
    return _joined(names) if is_told else x.op_name
  if joined := _joined([_name_behind(y, flow, _name(y)) for y in parts]):
    return joined
  found, source = _before(x, flow)
  behind = _name_behind(x, flow, found)
  return behind or sent.stage_of(source) or around or source


def _joined(names: Sequence[str]) -> str:
  """Joins names, each once, but names of means as often as they are there."""
  # An exchange gives the name of its mean to one array. Another array of that name is
  # of another exchange of equal size: nothing else keeps them apart, for JAX numbers
  # all channels alike.
  means = [x for x in names if sent.means_in(x)]
  others = dict.fromkeys(x for x in names if x and not sent.means_in(x))
  return ":".join([*others, *means])


def _is_sum(x: Instruction) -> bool:
  return x.opcode.removesuffix("-start") == "all-reduce"


def cutting_in(module: Module) -> frozenset[str]:
  """Returns the names of the computations that only cut and move an array."""
  moves = _MOVES | {"parameter", "slice"}
  bodies = module.computations.items()
  return frozenset(
    name for name, body in bodies if all(x.opcode in moves for x in body)
  )


def untold(module: Module, found: Mapping[str, str]) -> tuple[str, ...]:
  """Returns collectives and means without a name, in a program with exchanges.

  These are the names of collectives that have no scope, by those of ``found``, and of
  the means that no collective completes.
  """
  names = {x.op_name for body in module.computations.values() for x in body}
  if not any(map(sent.is_exchange, names)):
    return ()
  told = set(itertools.chain(*map(sent.means_in, found.values())))
  means = set(itertools.chain(*map(sent.means_in, names)))
  return *(x for x in found if not found[x]), *sorted(means - told)


def _name_behind(x: Instruction, flow: Flow, found: str) -> str:
  """Returns a name that was found, or the name of a reader of the unchanged array."""
  for y in _after(x, flow):
    if _is_nameless(y):
      return sent.as_stage(found or scope_of(y, flow))
    found = found or _name(y)
  return found


def _before(x: Instruction, flow: Flow) -> tuple[str, str]:
  """Returns a collective's name on the way of the operand, and its source's name."""
  y, source = flow.named.get(x.operands[0]) if x.operands else None, ""
  while y is not None:
    source = y.op_name
    if name := _name(y):
      return name, source
    passes = y.opcode in _MOVES or _is_nameless(y)
    y = flow.named.get(y.operands[0]) if passes and y.operands else None
  return "", source


def _after(x: Instruction, flow: Flow) -> Iterator[Instruction]:
  """Yields the readers of a collective's result, as it is or in parts."""
  names = [x.name]
  if x.opcode == "send":  # its result is that of the recv that it meets
    meeting = _meeting(x)
    ends = (y for y in flow.order if y.opcode == "recv")
    names = [y.name for y in ends if _meeting(y) == meeting]
  waiting = [i for name in names for i in flow.readers.get(name, ())]
  heapq.heapify(waiting)
  last = -1
  while waiting:
    number = heapq.heappop(waiting)
    y = flow.order[number]
    if number == last:  # it reads two of them
      continue
    yield y
    last = number
    if y.opcode in _MOVES or _cuts(y, flow):
      for reader in flow.readers.get(y.name, ()):
        heapq.heappush(waiting, reader)


def _is_part(y: Instruction, x: Instruction, flow: Flow) -> bool:
  """Returns whether an instruction takes a part of the result of a collective."""
  is_element = y.opcode == "get-tuple-element" and len(x.operands) > 1
  return is_element or _cuts(y, flow)


def _cuts(x: Instruction, flow: Flow) -> bool:
  called = x.calls.get("calls", ())
  return x.opcode == "slice" or (x.opcode == "fusion" and called[0] in flow.cutting)


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
