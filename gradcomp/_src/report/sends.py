"""The kind, the arrays, the groups and the scope that one instruction of HLO sends."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from gradcomp._src.exchange.collectives import STAGE
from gradcomp._src.report import collectives as sent
from gradcomp._src.report import groups as of_devices
from gradcomp._src.report.groups import Devices, Groups, Pairs, integers
from gradcomp._src.report.hlo_text import ARRAY, Computation, Instruction, unreadable
from gradcomp._src.report.reader import Place

# Transfers between slices of TPUs, by their types.
_BETWEEN_SLICES = {
  "ALL_TO_ALL": "all-to-all",
  "ALL_GATHER": "all-gather",
  "ALL_REDUCE": "all-reduce",
  "REDUCE_SCATTER": "reduce-scatter",
  "ONE_TO_ONE": "collective-permute",
}
_TYPE = re.compile(r'_xla_megascale_transfer_type="?(\w+)"?')
_PAIRS = "_xla_send_recv_source_target_pairs"
_QUANTIZED = re.compile(
  r'"quantized_data_type":"(\w+)","quantized_stage":"(\w+)_STAGE"'
)
_GROUPED = {"replica_groups", "source_target_pairs", "channel_id"}
# What brings an array to a collective, or from it, as it is.
_MOVES = frozenset(
  "bitcast copy copy-done copy-start get-tuple-element recv-done reshape transpose"
  " all-gather-done all-reduce-done collective-permute-done".split()
)
_CUTS = _MOVES | {"parameter", "slice"}
_OURS = re.compile(r"gradcomp_([a-z_]+)")
# The scopes of work before an exchange and after it.
_BESIDE = frozenset(("correct", "decode", "fingerprint", "inner", "residual"))


def kind_of(x: Instruction) -> str:
  """Returns the kind of a collective, or nothing for another instruction."""
  kind = x.base
  if kind != x.opcode and "calls" in x.calls:
    return ""  # a wrapped one, which the called computation has again
  if kind == "send" and (match := _TYPE.search(x.hints)):
    if match[1] not in _BETWEEN_SLICES:
      raise unreadable("known transfers between slices", match[1])
    return _BETWEEN_SLICES[match[1]]
  if kind == "send" and _PAIRS in x.hints:
    return "collective-permute"
  return kind if kind in sent.SHARE_SENT else ""


def sends(
  x: Instruction, body: Computation, workers: int, around: Place, is_fused: bool
) -> list[sent.Collective]:
  """Returns the record of a collective, or of each of its stages if they differ."""
  kind = kind_of(x)
  if kind == "all-reduce" and is_fused and _is_cut(x, body):
    kind = "reduce-scatter"
  operands, packed = _arrays(x, body)
  place = around._replace(scope=_scope_of(x, body, around.scope))._asdict()
  given: Any = {"kind": kind, "operands": operands, "packed": packed}
  record = sent.Collective(**given, workers=workers, **place)
  # XLA:TPU quantizes a sum, or one of its two stages.
  match = _QUANTIZED.search(x.backend_config)
  if "quantized_data_type" in x.backend_config and not match:
    raise unreadable("known quantized sums", x.backend_config)
  if kind != "all-reduce" or not match:
    return [record]
  as_sent = functools.partial(dataclasses.replace, quantized=match[1].lower())
  if match[2] == "EVERY":
    return [as_sent(record)]
  # In a ring, parts are summed, and then the sums of these are gathered.
  parts = [(x, (-(-math.prod(y) // workers),)) for x, y in operands]
  stages = {
    "REDUCE": dataclasses.replace(record, kind="reduce-scatter"),
    "BROADCAST": dataclasses.replace(record, kind="all-gather", operands=tuple(parts)),
  }
  return [as_sent(x) if name == match[2] else x for name, x in stages.items()]


def is_unseen(x: Instruction) -> bool:
  """Returns whether an instruction sends or receives bytes that nobody can count."""
  if x.base in ("send", "recv"):
    between = "_xla_megascale_target" in x.hints and _TYPE.search(x.hints)
    return _PAIRS not in x.hints and not between
  if x.opcode == "custom-call":  # a kernel of Pallas for TPUs
    return '"has_communication":true' in x.backend_config
  wraps = x.opcode.endswith("-start") and "calls" in x.calls
  if _GROUPED & x.attributes.keys() and not wraps:
    raise unreadable("known collectives", f"{x.opcode} with groups or a channel")
  return x.opcode in ("infeed", "outfeed")


def _is_cut(x: Instruction, body: Computation) -> bool:
  """Returns whether a fusion cuts its sum, as XLA:TPU writes a reduce-scatter."""
  views = ("bitcast", "reshape")
  last = body.behind(body.root.name, views)
  if last is None or last.opcode != "dynamic-slice":
    return False
  return body.behind(last.operands[0], views) is x


def groups_in(body: Computation, devices: Devices) -> dict[str, Groups]:
  """Returns the groups of each collective, but for earlier parts of permutations."""
  # XLA cuts a permutation into sends and permutes of one operand. A worker sends by one
  # of these: between slices or inside, or on along a cycle or back to its start.
  found, pairs = dict[str, Groups](), dict[str, Pairs]()
  wholes: dict[str, list[Instruction]] = {}
  for x in body:
    kind = kind_of(x)
    if kind == "collective-permute":
      own = of_devices.pairs_of(x, devices)
      for other in wholes.setdefault(x.operands[0], []):
        apart = {i for i, _ in own}.isdisjoint(i for i, _ in pairs[other.name])
        if apart and "send" in (x.base, other.base):
          pairs[other.name] += own
          break
      else:
        wholes[x.operands[0]].append(x)
        pairs[x.name] = own
    elif kind:
      found[x.name] = of_devices.groups_of(kind, x, devices)
  whole = lambda pairs: devices.listed(sorted(x) for x in sent.connected(pairs))
  return found | {name: whole(every) for name, every in pairs.items()}


def _arrays(x: Instruction, body: Computation) -> tuple[sent.Shapes, bool]:
  """Returns dtype and shape of each array that is sent, and whether they are packed."""
  # Not from the type of the instruction: the type of a -start holds results, too.
  slices = x.attributes.get("slice_sizes")  # of a permute, which GPUs also combine
  # Then come a token, or the output, offsets and sizes.
  is_first = slices or x.opcode.startswith(("send", "ragged-all-to-all"))
  types = []
  for argument in x.arguments[:1] if is_first else x.arguments:
    own, _, name = argument.rpartition(" ")
    known = body.named.get(name.removeprefix("%"))
    types.append(own or (known.type if known else "undefined[]"))
  arrays = [ARRAY.findall(type_) for type_ in types]
  found = [*itertools.chain(*arrays)]
  what = f"{x.opcode}({', '.join(types)})"
  dtypes = [dtype for dtype, *_ in found]
  if unknown := set(dtypes) - sent.BITS.keys():
    raise unreadable("known dtypes", f"{', '.join(unknown)} in {what}")
  if not all(arrays) or any("?" in sizes for _, sizes, _ in found):
    raise unreadable("arrays of known sizes as operands", what)
  # Narrow types take only their bits in the layout {0:E(4)}.
  packed = {int(bits or 8) < 8 for x, _, bits in found if sent.BITS[x] < 8}
  if len(packed) > 1:
    raise unreadable("narrow types in one layout", what)
  shapes = [sizes for _, sizes, _ in found]
  if slices:  # which are written in place
    shapes = re.findall(r"\{([\d,]*)\}", slices)
    if len(dtypes) != len(shapes) and len(set(dtypes)) > 1:
      raise unreadable("a slice of each operand", what)
  pairs = zip(itertools.cycle(dtypes), shapes)
  return tuple((dtype, (*integers(sizes),)) for dtype, sizes in pairs), True in packed


def _scope_of(x: Instruction, body: Computation, around: str = "") -> str:
  """Returns the scope of a collective, its own or the one of moves around it.

  XLA:TPU splits a collective of several slices in nameless ones, between slices and
  inside; copies and reshapes around them keep the name of JAX's collective. The last
  part has it, and earlier ones are stages. Of several sums XLA makes one with one name,
  or none, and their parts keep names: these are joined, as XLA joins names.
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
  means = [x for x in names if sent.means_in([x])]
  others = dict.fromkeys(x for x in names if x and not sent.means_in([x]))
  return ":".join([*others, *means])


def _name_behind(x: Instruction, body: Computation, found: str) -> str:
  """Returns a name that was found, or the name of a reader of the unchanged array."""
  for y in _after(x, body):
    if _is_nameless(y):
      return sent.FLOATS.sub(STAGE, sent.MEAN.sub(STAGE, found or _scope_of(y, body)))
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
