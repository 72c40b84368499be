"""A second count of the collectives of HLO: XLA parses it, and its proto is read here.

Nothing of the library is used. The numbers of fields are those of XLA's hlo.proto. A
jaxlib without the parser, which is private, breaks these tests, and does not skip them.
"""

import collections
import functools
import itertools
import math
import operator
import re

from jaxlib import _hlo

Collective = collections.namedtuple("Collective", "kind workers times nbytes_in")
_BITS = {2: 8, 3: 16, 4: 32, 5: 64, 6: 8, 7: 16, 8: 32, 9: 64, 10: 16, 11: 32, 12: 64}
_BITS |= {
  1: 8,
  15: 64,
  16: 16,
  18: 128,
  19: 8,
  20: 8,
  21: 8,
  22: 8,
  23: 8,
  24: 8,
  25: 8,
}
_BITS |= {26: 8, 27: 8, 28: 8, 29: 8, 30: 8, 31: 8, 32: 8, 33: 8, 34: 8, 35: 8, 36: 8}
_SHARED = ("all-reduce", "reduce-scatter", "all-to-all")
_GLOBAL = ("all-reduce", "all-gather", "reduce-scatter")
_TUPLE = 13  # of XLA's element types
_KINDS = (*_SHARED, "all-gather", "ragged-all-to-all", "collective-permute")
_KINDS += ("collective-broadcast",)
_COMPARED = {"LT": operator.lt, "LE": operator.le, "EQ": operator.eq}
_COMPARED |= {"GT": operator.gt, "GE": operator.ge, "NE": operator.ne}
_EXACT = {
  **{"add": operator.add, "subtract": operator.sub, "multiply": operator.mul},
  **dict.fromkeys(("copy", "bitcast"), lambda x: x),
  **{"get-tuple-element": operator.getitem, "compare": None},
}


def fields(data):
  """The fields of a message of protobuf: numbers, or bytes."""
  found, at = collections.defaultdict(list), 0
  while at < len(data):
    key, at = _varint(data, at)
    if key & 7 == 2:
      size, at = _varint(data, at)
      value, at = data[at : at + size], at + size
    elif key & 7 == 0:
      value, at = _varint(data, at)
    else:
      size = 8 if key & 7 == 1 else 4
      value, at = data[at : at + size], at + size
    found[key >> 3].append(value)
  return found


def _varint(data, at):
  number = shift = 0
  while True:
    byte = data[at]
    number, shift, at = number | (byte & 127) << shift, shift + 7, at + 1
    if byte < 128:
      return number, at


def _packed(values):
  """Numbers that stand by themselves, or packed in bytes."""
  result = []
  for value in values:
    if isinstance(value, int):
      result.append(value)
    at = 0
    while not isinstance(value, int) and at < len(value):
      number, at = _varint(value, at)
      result.append(number)
  return result


def nbytes(shape):
  """Bytes of a shape, and of all that a tuple has."""
  shape = fields(shape)
  if shape[4]:
    return sum(map(nbytes, shape[4]))
  layout = fields(shape[5][0]) if shape[5] else {}
  bits = (layout.get(7) or [0])[0] or _BITS.get(shape[2][0], 0)
  return -(-bits * math.prod(_packed(shape[3])) // 8)


class Instruction:
  def __init__(self, data):
    self.fields = fields(data)
    self.name, self.opcode = (self.fields[i][0].decode() for i in (1, 2))
    self.shape, self.config = self.fields[3][0], b"".join(self.fields[43]).decode()
    self.id = (self.fields[35] or [0])[0]
    self.operands, self.called = (_packed(self.fields[i]) for i in (36, 38))
    hints = fields(b"".join(self.fields[68]))[1]
    pairs = [fields(x) for x in hints]
    self.hints = {x[1][0].decode(): b"".join(x[2]).decode() for x in pairs}


class Program:
  def __init__(self, text):
    module = _hlo.hlo_module_from_text(text)
    proto = fields(module.as_serialized_hlo_module_proto())
    count = lambda name: int(
      (re.findall(rf"^HloModule.*\b{name}=(\d+)", text, re.M) or [1])[0]
    )
    self.replicas, self.partitions = count("replica_count"), count("num_partitions")
    self.bodies, self.roots = {}, {}
    for data in proto[3]:
      body = fields(data)
      key = (body[5] or [0])[0]
      self.bodies[key] = {x.id: x for x in map(Instruction, body[2])}
      self.roots[key] = (body[6] or [0])[0]
    self.entry = (proto[6] or [0])[0]
    self.found = []
    self.run(self.entry, 1, set(), fused=False)

  def run(self, key, times, chains, *, fused):
    body, sources = self.bodies[key], collections.defaultdict(set)
    for x in body.values():
      kind = self.kind(x)
      chain = x.hints.get("chain_id")
      if kind and chain in chains:
        continue
      if kind:
        chains |= {chain} - {None}
        self.count(kind, x, body, times, fused and self.is_cut(key, x, body), sources)
      elif not x.opcode.endswith("-done"):
        trips = self.trips(x, key)
        for number, callee in enumerate(x.called):
          # Of a while, first the body and then the condition.
          runs = trips + (x.opcode == "while" and number == 1 and trips > 1)
          inside = chains if x.opcode == "fusion" else set()
          self.run(callee, times * runs, inside, fused=x.opcode == "fusion")

  def kind(self, x):
    if x.opcode == "send":
      between = (
        x.hints.get("_xla_megascale_transfer_type", "").lower().replace("_", "-")
      )
      pairs = "_xla_send_recv_source_target_pairs" in x.hints
      permutes = pairs or between == "one-to-one"
      return "collective-permute" if permutes else between
    kind = x.opcode.removesuffix("-start")
    return kind if kind in _KINDS else ""

  def trips(self, x, key):
    if x.opcode != "while":
      return 1
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', x.config):
      return int(known[1])
    # Else it is run, on the integers that it computes.
    state = self.integer(key, x.operands[0], [])
    for trip in range(1000):
      test, state = (
        self.integer(callee, self.roots[callee], [state])
        for callee in reversed(x.called)
      )
      if test is None:
        return 1  # nobody knows
      if not test:
        return trip
    return 1

  def integer(self, key, number, arguments):
    """The integer that an instruction is, or a list of them; None for all else."""
    arguments, body = dict(enumerate(arguments)), self.bodies[key]

    @functools.cache
    def value(number):
      x = body[number]
      if x.opcode == "parameter":
        return arguments.get((x.fields[9] or [0])[0])
      if x.opcode == "constant":  # of 32 and 64 bits, with a sign or without
        literal = fields(x.fields[8][0])
        found = _packed(itertools.chain(*(literal[i] for i in range(4, 8))))
        return (found[0] + 2**31) % 2**32 - 2**31 if len(found) == 1 else None
      read = list(map(value, x.operands))
      if x.opcode == "tuple":
        return read
      if x.opcode in ("fusion", "call"):
        return self.integer(x.called[0], self.roots[x.called[0]], read)
      if None in read or x.opcode not in _EXACT:
        return None
      if x.opcode == "compare":
        return _COMPARED[x.fields[63][0].decode()](*read)
      element = [(x.fields[13] or [0])[0]] * (x.opcode == "get-tuple-element")
      return _EXACT[x.opcode](*read, *element)

    return value(number)

  def is_cut(self, key, x, body):
    last = body[self.roots[key]]
    while last.opcode in ("bitcast", "reshape"):
      last = body[last.operands[0]]
    return last.opcode == "dynamic-slice" and x.id in last.operands[:1]

  def count(self, kind, x, body, times, cut, sources):
    workers = self.workers(kind, x)
    operands = [body[i] for i in x.operands]
    slices = _packed(x.fields[20])  # of all, one behind the other
    # In place, the output follows, and then tuples: where to read and to write.
    in_place = kind == "collective-permute" and len(operands) > 2
    in_place = in_place and fields(operands[2].shape)[2][0] == _TUPLE
    if in_place or kind == "ragged-all-to-all" or x.opcode == "send":
      operands = operands[:1]
    sent = sum(nbytes(y.shape) for y in operands)
    if slices and kind == "collective-permute":
      sent = self.sliced(slices, operands[0])
    if kind == "collective-permute":
      own = {a for a, _ in self.pairs(x)}
      before = sources[x.operands[0]]
      split = x.opcode == "send" or "send" in sources[-1]
      sources[-1].add(x.opcode)
      if split and before and before.isdisjoint(own):
        before |= own
        return  # the rest of a permutation that is in front
      before |= own
    if '"quantized_stage":"EVERY_STAGE"' in x.config:
      sent //= 4  # s8 for f32
    kind = "reduce-scatter" if cut else kind
    self.found.append(Collective(kind, workers, times, sent))

  def sliced(self, slices, operand):
    """Bytes of slices of an array, or of the arrays of a tuple, in turn."""
    shapes = fields(operand.shape)[4] or [operand.shape]
    shapes, size, at = itertools.cycle(map(fields, shapes)), 0, 0
    while at < len(slices):
      shape = next(shapes)
      rank = len(_packed(shape[3]))
      size += math.prod(slices[at : at + rank]) * _BITS[shape[2][0]] // 8
      at += rank
    return size

  def pairs(self, x):
    text = x.hints.get("_xla_send_recv_source_target_pairs", "")
    text += x.hints.get("_xla_megascale_target", "")
    if text:
      numbers = re.findall(r"(\d+)(?:,|->)(\d+)", re.sub(r"\s", "", text))
      # A slice of 4 devices, in the corpus.
      place = lambda n: (
        n if n < 100_000 else (n // 100_000 - 1) * self.partitions + n % 100_000
      )
      return [(place(int(a)), place(int(b))) for a, b in numbers]
    pairs = [fields(pair) for pair in x.fields[52]]
    return [((p[1] or [0])[0], (p[2] or [0])[0]) for p in pairs]

  def workers(self, kind, x):
    if kind == "collective-permute":
      return 1 + any(a != b for a, b in self.pairs(x))  # what matters is: not itself
    if target := x.hints.get("_xla_megascale_target"):
      if match := re.match(r"\{([\d,]+)\}x", target):
        return len(match[1].split(","))
      return max(len(group.split(",")) for group in re.findall(r"\{([\d,]+)\}", target))
    sizes = [len(_packed(fields(g)[1])) for g in x.fields[49]]
    for devices in x.fields[87]:
      sizes += [len(_packed(fields(g)[1])) for g in fields(devices)[1]]
    sizes += [fields(iota)[2][0] for iota in x.fields[92]]
    for mesh in map(fields, x.fields[93]):
      axes = [fields(axis)[2][0] for axis in fields(mesh[1][0])[1]]
      sizes.append(math.prod(axes[(fields(ref)[1] or [0])[0]] for ref in mesh[2]))
    if not x.fields[26]:
      return max(sizes, default=self.replicas)
    if kind not in _GLOBAL:
      return max(sizes, default=self.partitions)
    if x.fields[71]:
      return max(sizes, default=self.replicas * self.partitions)
    return max(sizes, default=self.replicas) * self.partitions


def sent(collective):
  """Bytes that a worker sends each time."""
  kind, n, _, size = collective
  if kind == "all-reduce":
    return -(-2 * (n - 1) * size // n)
  if kind in _SHARED:
    return -(-(n - 1) * size // n)
  return (n - 1) * size if kind == "all-gather" else size * (n > 1)


def bytes_sent(text):
  """Bytes that a worker sends in one run of a program."""
  return sum(c.times * sent(c) for c in Program(text).found)
