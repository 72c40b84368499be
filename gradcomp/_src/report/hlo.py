"""The walk through a program of HLO that finds and counts its collectives."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from gradcomp._src.exchange.collectives import STAGE
from gradcomp._src.report import collectives as sent
from gradcomp._src.report import groups as of_devices
from gradcomp._src.report import hlo_text as texts
from gradcomp._src.report.groups import Groups
from gradcomp._src.report.hlo_text import Computation, Instruction, unreadable
from gradcomp._src.report.reader import Place

# Instructions, each called by the one before.
Path = tuple[tuple[Computation, int], ...]
# A collective, the devices of its groups, whether an exchange of gradients reads its
# result, and where it is.
Found = tuple[sent.Collective, Groups, bool, Path]

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
_UNSEEN = "unseen"  # the kind of what sends or receives bytes that nobody can count
_COPIES = ("copy", "bitcast")
# What brings an array to a collective, or from it, as it is.
_MOVES = frozenset(
  "bitcast copy copy-done copy-start get-tuple-element recv-done reshape transpose"
  " all-gather-done all-reduce-done collective-permute-done".split()
)
_CUTS = _MOVES | {"parameter", "slice"}
_OURS = re.compile(r"gradcomp_([a-z_]+)")
# The scopes of work before an exchange and after it.
_BESIDE = frozenset(("correct", "decode", "fingerprint", "inner", "residual"))


class Program(NamedTuple):
  """A program's module, its collectives, and its devices."""

  module: texts.Module
  collectives: tuple[Found, ...]
  devices: of_devices.Devices
  unseen: tuple[str, ...]  # other names that send: to hosts, and communicating kernels
  untold: tuple[str, ...]  # collectives without a scope, means that none completes
  axes: tuple[str, ...] = ()  # of the mesh


def parse_program(text: str) -> Program:
  """Returns the collectives of optimized HLO, including called computations."""
  module = texts.read_module(text)
  devices = of_devices.devices_of(module)
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
    known = _groups_in(own, devices)
    met = set[str]() if chains is None else chains
    for number, x in enumerate(own):
      path = (*callers, (own, number))
      ahead = in_front or x.name in read
      kind = _kind_of(x)
      if kind == _UNSEEN:
        unseen[x.name] = None
      elif kind:
        # XLA:TPU splits an asynchronous collective over fusions, and each has it.
        if x.name in known and not met.intersection(x.chains):
          workers = max(1, *map(len, known[x.name]), 1)
          for one in _sends(x, kind, own, workers, around, chains is not None):
            yield one, known[x.name], ahead, path
        met.update(x.chains)
      elif not x.opcode.endswith(("-update", "-done")):  # these repeat a -start's calls
        is_start, is_loop = x.opcode.endswith("-start"), x.opcode == "while"
        inside = met if x.opcode == "fusion" else None
        # What XLA wraps or fuses may have no name of its own.
        scope = x.op_name if x.opcode == "fusion" or is_start else ""
        trips = trip_count(x, own) if is_loop else 1
        loop = around.in_loop or is_loop
        unknown = around.trips_unknown or trips is None
        # Other attributes of a start are those of the instruction that it wraps.
        keys = ["calls"] if is_start and "calls" in x.calls else [*x.calls]
        callees = [(key, callee) for key in keys for callee in x.calls[key]]
        for branch, (key, callee) in enumerate(callees):
          runs = 1 if trips is None else trips + (key == "condition")
          branches = around.branches
          if x.opcode == "conditional":
            branches += ((f"{own.name}/{x.name}", branch, len(callees)),)
          here = Place(scope, around.times * runs, loop, unknown, branches)
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


def _kind_of(x: Instruction) -> str:
  """Returns the kind of a collective, or nothing for another instruction."""
  is_start = x.opcode.endswith("-start")
  if x.opcode.endswith(("-update", "-done")) or (is_start and "calls" in x.calls):
    return ""  # the start has it; and of a wrapped one, the called computation
  if x.base in sent.SHARE_SENT:
    return x.base
  match = _TYPE.search(x.hints)
  if x.base == "recv":  # its send counts
    between = match and "_xla_megascale_target" in x.hints
    return "" if between or _PAIRS in x.hints else _UNSEEN
  if x.base == "send":
    if match is None:
      return "collective-permute" if _PAIRS in x.hints else _UNSEEN
    if match[1] not in _BETWEEN_SLICES:
      raise unreadable("known transfers between slices", match[1])
    return _BETWEEN_SLICES[match[1]]
  if x.opcode == "custom-call":  # a kernel of Pallas for TPUs
    return _UNSEEN if '"has_communication":true' in x.backend_config else ""
  if _GROUPED & x.attributes.keys():
    raise unreadable("known collectives", f"{x.opcode} with groups or a channel")
  return _UNSEEN if x.opcode in ("infeed", "outfeed") else ""


def trip_count(loop: Instruction, around: Computation) -> int | None:
  """Returns the number of trips of a ``while``; None if the text does not have it."""
  if match := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.backend_config):
    return int(match[1])
  # XLA:TPU leaves it out. Then the condition must be i < n, of a counter that grows
  # from a constant, by constants, to another one.
  inner, body = (around.others[loop.calls[key][0]] for key in ("condition", "body"))
  made, result, test = around.behind(loop.operands[0], _COPIES), body.root, inner.root
  is_less = test.attributes.get("direction") == "LT"
  if made is None or not (is_less and made.opcode == result.opcode == "tuple"):
    return None
  before = lambda place: _sum(around, made.operands[place])
  after = lambda place: _sum(body, result.operands[place])
  counter, end = (_sum(inner, name) for name in test.operands)
  if end is not None and end[1] is not None:  # an element that the loop must not change
    end = before(end[1]) if end == after(end[1]) == (0, end[1]) else None
  match counter, end:
    case (0, int(place)), (last, None):
      match before(place), after(place):
        case (begin, None), (step, at) if at == place and step > 0:
          return max(0, -((begin - last) // step))  # rounded up
  return None


def _sum(body: Computation, name: str) -> tuple[int, int | None] | None:
  """Returns a constant, and the place of the loop's element that it is added to."""
  found = body.behind(name, _COPIES)
  if found is None:
    return None
  if found.opcode == "add":
    parts = [_sum(body, x) for x in found.operands]
    places = [x[1] for x in parts if x and x[1] is not None]
    if None not in parts and len(places) <= 1:
      return sum(x[0] for x in parts if x), places[0] if places else None
  if found.opcode == "constant" and re.fullmatch(r"-?\d+", found.arguments[0]):
    return int(found.arguments[0]), None
  if found.opcode == "get-tuple-element":
    source = body.named.get(found.operands[0])
    if source is not None and source.opcode == "parameter":
      return 0, int(found.attributes["index"])
  return None


def _groups_in(body: Computation, devices: of_devices.Devices) -> dict[str, Groups]:
  """Returns the groups of each collective, but for earlier parts of permutations."""
  # XLA cuts a permutation into sends and permutes of one operand. A worker sends by one
  # of these: between slices or inside, or on along a cycle or back to its start.
  found, pairs = dict[str, Groups](), dict[str, list[tuple[int, int]]]()
  wholes: dict[str, list[Instruction]] = {}
  for x in body:
    if (kind := _kind_of(x)) in ("", _UNSEEN):
      continue
    groups = of_devices.groups_of(kind, x, devices)
    if kind != "collective-permute":
      found[x.name] = groups
      continue
    own = [(group[0], group[-1]) for group in groups]
    for other in wholes.setdefault(x.operands[0], []):
      apart = {i for i, _ in own}.isdisjoint(i for i, _ in pairs[other.name])
      if apart and "send" in (x.base, other.base):
        pairs[other.name] += own
        break
    else:
      wholes[x.operands[0]].append(x)
      pairs[x.name] = own
  whole = lambda pairs: tuple(tuple(sorted(x)) for x in sent.connected(pairs))
  return found | {name: whole(every) for name, every in pairs.items()}


def _sends(
  x: Instruction,
  kind: str,
  body: Computation,
  workers: int,
  around: Place,
  is_fused: bool,
) -> list[sent.Collective]:
  """Returns the record of a collective, or of each of its stages if they differ."""
  if kind == "all-reduce" and is_fused:
    # XLA:TPU writes a reduce-scatter as a fusion that cuts its sum.
    views = ("bitcast", "reshape")
    last = body.behind(body.root.name, views)
    if last is not None and last.opcode == "dynamic-slice":
      is_cut = body.behind(last.operands[0], views) is x
      kind = "reduce-scatter" if is_cut else kind
  # Not from the type of the instruction: the type of a -start holds results, too.
  slices = x.attributes.get("slice_sizes")  # of a permute, which GPUs also combine
  # Behind the first are a token, or the output, offsets and sizes.
  is_first = slices or x.opcode.startswith(("send", "ragged-all-to-all"))
  types = []
  for argument in x.arguments[:1] if is_first else x.arguments:
    own, _, name = argument.rpartition(" ")
    known = body.named.get(name.removeprefix("%"))
    types.append(own or (known.type if known else "undefined[]"))
  arrays = [texts.ARRAY.findall(type_) for type_ in types]
  found = [*itertools.chain(*arrays)]
  what = f"{x.opcode}({', '.join(types)})"
  dtypes, shapes = [y[0] for y in found], [y[1] for y in found]
  if unknown := set(dtypes) - sent.BITS.keys():
    raise unreadable("known dtypes", f"{', '.join(unknown)} in {what}")
  if not all(arrays) or "?" in "".join(shapes):
    raise unreadable("arrays of known sizes as operands", what)
  # Narrow types take only their bits in the layout {0:E(4)}.
  packed = {int(bits or 8) < 8 for y, _, bits in found if sent.BITS[y] < 8}
  if len(packed) > 1:
    raise unreadable("narrow types in one layout", what)
  if slices:  # which are written in place
    shapes = re.findall(r"\{([\d,]*)\}", slices)
    if len(dtypes) != len(shapes) and len(set(dtypes)) > 1:
      raise unreadable("a slice of each operand", what)
  sizes = [tuple(texts.integers(shape)) for shape in shapes]
  record = sent.Collective(
    kind=kind,
    operands=tuple(zip(itertools.cycle(dtypes), sizes)),
    workers=workers,
    packed=True in packed,
    **around._replace(scope=_scope_of(x, body, around.scope))._asdict(),
  )
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
  parts = tuple((y, (-(-math.prod(z) // workers),)) for y, z in record.operands)
  stages = {
    "REDUCE": dataclasses.replace(record, kind="reduce-scatter"),
    "BROADCAST": dataclasses.replace(record, kind="all-gather", operands=parts),
  }
  return [as_sent(y) if name == match[2] else y for name, y in stages.items()]


def _scope_of(x: Instruction, body: Computation, around: str = "") -> str:
  """Returns the scope of a collective, its own or the one of moves around it.

  XLA:TPU splits a collective of several slices in nameless ones, between slices and
  inside; copies and reshapes around them keep the name of JAX's collective. The last
  part has it, and earlier ones are stages. Of several sums XLA makes one with one name,
  or none, and their parts keep names: these are joined, as XLA joins names.
  """
  several = len(x.operands) > 1
  is_part = lambda y: (several and y.opcode == "get-tuple-element") or _cuts(y, body)
  parts = filter(is_part, _after(x, body))
  if x.op_name:
    names = list(filter(None, map(_name, parts)))
    if not several or x.base != "all-reduce" or len(names) != len(x.operands):
      return x.op_name
  else:
    names = list(filter(None, (_name_behind(y, body, _name(y)) for y in parts)))
  if names:
    # Each once, but those of means as often as they are there: an exchange gives the
    # name of its mean to one array. Another array of that name is of another exchange
    # of equal size: nothing else keeps them apart, because JAX gives all channels one
    # number.
    means = [name for name in names if sent.means_in([name])]
    others = dict.fromkeys(name for name in names if name not in means)
    return ":".join([*others, *means])
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
