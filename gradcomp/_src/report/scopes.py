"""Scopes of collectives that XLA splits, and drops their names."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from gradcomp._src.exchange.collectives import STAGE
from gradcomp._src.report import collectives as sent
from gradcomp._src.report.hlo_text import Computation, Instruction, Module

# What brings an array to a collective, or from it, as it is.
_MOVES = frozenset(
  "bitcast copy copy-done copy-start get-tuple-element recv-done reshape transpose"
  " all-gather-done all-reduce-done collective-permute-done".split()
)
_CUTS = _MOVES | {"parameter", "slice"}
_OURS = re.compile(r"gradcomp_([a-z_]+)")
# The scopes of work before an exchange and after it.
_BESIDE = frozenset(("correct", "decode", "fingerprint", "inner", "residual"))


def scope_of(x: Instruction, body: Computation, around: str = "") -> str:
  """Returns the scope of a collective, its own or the one of moves around it.

  XLA:TPU splits a collective of several slices in nameless ones, between slices and
  inside; copies and reshapes around them keep the name of JAX's collective. The last
  part has it, and earlier ones are stages. Of several sums XLA makes one with one name,
  or none, and their parts keep names: these are joined, as XLA joins names. Without any
  name, a result of an exchange is sent in a stage; otherwise the scope is ``around``,
  or that of the operand's source.
  """
  several = len(x.operands) > 1
  is_part = lambda y: (several and y.opcode == "get-tuple-element") or _cuts(y, body)
  parts = list(filter(is_part, _after(x, body)))
  if x.op_name:
    names = list(filter(None, map(_name, parts)))
    is_told = several and x.base == "all-reduce" and len(names) == len(x.operands)
    return _joined(names) if is_told else x.op_name
  if joined := _joined([_name_behind(y, body, _name(y)) for y in parts]):
    return joined
  # The name on the way of the operand, and that of its source.
  found = source = ""
  y = body.named.get(x.operands[0]) if x.operands else None
  while y is not None and not found:
    found, source = _name(y), y.op_name
    passes = (y.opcode in _MOVES or _is_nameless(y)) and y.operands
    y = body.named.get(y.operands[0]) if passes else None
  inside = _OURS.findall(source)
  stage = STAGE if inside and inside[-1] not in _BESIDE else ""
  return _name_behind(x, body, found) or stage or around or source


def _joined(names: Sequence[str]) -> str:
  """Joins names, each once, but names of means as often as they are there."""
  # An exchange gives the name of its mean to one array. Another array of that name is
  # of another exchange of equal size: nothing else keeps them apart, because JAX gives
  # all channels one number.
  means = [x for x in names if sent.means_in(x)]
  others = dict.fromkeys(x for x in names if x and not sent.means_in(x))
  return ":".join([*others, *means])


def untold(module: Module, found: Mapping[str, str]) -> tuple[str, ...]:
  """Returns collectives without a scope, and means that no collective completes."""
  names = {x.op_name for body in module.computations.values() for x in body}
  if not any(map(sent.is_exchange, names)):
    return ()
  told, means = (
    set(itertools.chain(*map(sent.means_in, scopes)))
    for scopes in (found.values(), names)
  )
  return *(x for x in found if not found[x]), *sorted(means - told)


def _name_behind(x: Instruction, body: Computation, found: str) -> str:
  """Returns a name that was found, or the name of a reader of the unchanged array."""
  for y in _after(x, body):
    if _is_nameless(y):
      scope = sent.MEAN.sub(STAGE, found or scope_of(y, body))
      return sent.FLOATS.sub(STAGE, scope)
    found = found or _name(y)
  return found


def _after(x: Instruction, body: Computation) -> Iterator[Instruction]:
  """Yields the readers of a collective's result, as it is or in parts."""
  names = [x.name]
  if x.opcode == "send":  # its result is that of the recv that it meets
    names = [y.name for y in body if y.opcode == "recv" and y.meeting == x.meeting]
  waiting = {i for name in names for i in body.readers[name]}
  while waiting:
    waiting.remove(number := min(waiting))
    yield (y := body[number])
    if y.opcode in _MOVES or _cuts(y, body):
      waiting.update(body.readers[y.name])


def _cuts(x: Instruction, body: Computation) -> bool:
  """Returns whether an instruction only cuts and moves an array."""
  fused = body.called(x) if x.opcode == "fusion" else []
  return x.opcode == "slice" or any(all(y.opcode in _CUTS for y in z) for z in fused)


def _is_nameless(x: Instruction) -> bool:
  """Returns whether an instruction is a collective without a name."""
  return not x.op_name and (x.base == "send" or x.base in sent.SHARE_SENT)


def _name(x: Instruction) -> str:
  """Returns the scope of an instruction if JAX made it for a collective."""
  last = x.op_name.rpartition("/")[2].removesuffix("_invariant")
  return x.op_name if last in sent.KINDS or sent.is_exchange(x.op_name) else ""
