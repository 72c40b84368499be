"""The kind, the arrays and the groups that one instruction of HLO sends."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator

from gradcomp._src.report import collectives as sent
from gradcomp._src.report import groups as of_devices
from gradcomp._src.report import reader, scopes
from gradcomp._src.report.groups import Devices, Groups, Pairs, integers
from gradcomp._src.report.hlo_text import ARRAY, Computation, Instruction, unreadable

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
  x: Instruction,
  body: Computation,
  devices: Devices,
  pairs: Pairs,
  around: reader.Place,
  *,
  is_fused: bool,
) -> Iterator[tuple[sent.Collective, Groups]]:
  """Yields the record of a collective, or of each of its stages if they differ."""
  kind = kind_of(x)
  if kind == "all-reduce" and is_fused and _is_cut(x, body):
    kind = "reduce-scatter"
  if kind == "collective-permute":
    groups = devices.listed(sorted(group) for group in sent.connected(pairs))
  else:
    groups = of_devices.groups_of(kind, x, devices)
  operands, packed = _arrays(x, body)
  record = sent.Collective(
    kind=kind,
    operands=operands,
    packed=packed,
    workers=groups.workers,
    **around._replace(scope=scopes.scope_of(x, body, around.scope))._asdict(),
  )
  for stage in _quantized(record, x):
    yield stage, groups


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


def _quantized(record: sent.Collective, x: Instruction) -> Iterator[sent.Collective]:
  """Yields an all-reduce, or its two stages if XLA:TPU quantizes one of them."""
  match = _QUANTIZED.search(x.backend_config)
  if "quantized_data_type" in x.backend_config and not match:
    raise unreadable("known quantized sums", x.backend_config)
  if record.kind != "all-reduce" or not match:
    yield record
    return
  narrow, stage = match[1].lower(), match[2]
  if stage == "EVERY":
    yield dataclasses.replace(record, quantized=narrow)
    return
  # In a ring, parts are summed, and then the sums of these are gathered.
  parts = [(x, (-(-math.prod(y) // record.workers),)) for x, y in record.operands]
  for kind, operands, name in (
    ("reduce-scatter", record.operands, "REDUCE"),
    ("all-gather", tuple(parts), "BROADCAST"),
  ):
    quantized = narrow if stage == name else ""
    yield dataclasses.replace(record, kind=kind, operands=operands, quantized=quantized)


def _is_cut(x: Instruction, body: Computation) -> bool:
  """Returns whether a fusion cuts its sum, as XLA:TPU writes a reduce-scatter."""
  views = ("bitcast", "reshape")
  last = body.behind(body.root.name, views)
  if last is None or last.opcode != "dynamic-slice":
    return False
  return body.behind(last.operands[0], views) is x


def permutations(body: Computation, devices: Devices) -> dict[str, Pairs | None]:
  """Returns the pairs of permutations, or None for an earlier part of one."""
  # XLA cuts a permutation into sends and permutes of one operand. A worker sends by one
  # of these: between slices or inside, or on along a cycle or back to its start.
  found: dict[str, Pairs | None] = {}
  wholes: dict[str, list[Instruction]] = {}
  for x in body:
    if kind_of(x) == "collective-permute":
      pairs = found[x.name] = of_devices.pairs_of(x, devices)
      for other in wholes.setdefault(x.operands[0], []):
        whole = found[other.name] or []
        apart = {i for i, _ in pairs}.isdisjoint(i for i, _ in whole)
        if apart and "send" in (x.base, other.base):
          found |= {other.name: whole + pairs, x.name: None}
          break
      else:
        wholes[x.operands[0]].append(x)
  return found


def _arrays(x: Instruction, body: Computation) -> tuple[sent.Shapes, bool]:
  """Returns dtype and shape of each array that is sent, and whether they are packed."""
  # Not from the type of the instruction: the type of a -start holds results, too.
  arguments = x.arguments
  slices = x.attributes.get("slice_sizes")  # of a permute, which GPUs also combine
  if slices or x.opcode.startswith(("send", "ragged-all-to-all")):
    arguments = arguments[:1]  # then come a token, or the output, offsets and sizes
  types = []
  for argument in arguments:
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
