"""The work of HLO instructions: operations of matrix products, cycles, and bytes."""

# XLA's own analysis, which compiled.cost_analysis() shows, has sums of a whole program,
# and none of a text. These are its rules for one instruction; a test compares both.

import dataclasses
import math
import re
from collections.abc import Iterable

import numpy as np

from gradcomp._src.report import hlo, hlo_text
from gradcomp._src.report.collectives import BITS, SHARE_SENT
from gradcomp._src.report.groups import integers

_SUMMED = re.compile(r'"lhs_contracting_dimensions":(\[[^]]*\])')  # of cuBLAS
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
# These name, hold or order values, or move them beside what computes.
_IDLE = frozenset(
  "add-dependency after-all bitcast constant domain get-tuple-element infeed "
  "opt-barrier outfeed parameter partition-id recv replica-id send tuple".split()
)
# So do these custom calls, on TPUs.
_IDLE_CALLS = frozenset(
  "AllocateBuffer AsyncCollectiveDone AsyncCollectiveStart ConcatBitcast "
  "PrepareAsyncCallDone PrepareAsyncCallStart Sharding SliceId".split()
)
_PARTS = frozenset({"dynamic-slice", "gather", "slice"})  # they read what they return

_Counts = tuple[int, ...]  # flops, cycles and bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """An instruction that computes, with all that it calls.

  Attributes:
    name: the name of the instruction in the program.
    opcode: the HLO opcode, such as ``"fusion"``, ``"dot"`` or ``"while"``.
    flops: the floating-point operations of matrix products and convolutions, two for
      each product that is added; 0 for other work.
    cycles: the compiler's estimate, which is in programs for TPUs; else 0.
    bytes: the bytes of all arrays that it reads and writes.
  """

  name: str
  opcode: str
  flops: int
  cycles: int
  bytes: int


class Works:
  """The work of the instructions of a module, which counts each computation once."""

  def __init__(self) -> None:
    self._known: dict[str, _Counts] = {}

  def of(self, body: hlo_text.Computation, x: hlo_text.Instruction) -> Work | None:
    """Returns the work of an instruction there, or None if it has none."""
    counts = dict(zip(("flops", "cycles", "bytes"), self._counts(body, x), strict=True))
    return Work(name=x.name, opcode=x.opcode, **counts) if counts["bytes"] else None

  def _counts(self, body: hlo_text.Computation, x: hlo_text.Instruction) -> _Counts:
    if x.opcode == "while":
      trips = hlo.trip_count(x, body)
      (inside,) = (self._inside(body.others[name]) for name in x.calls["body"])
      return tuple(n * (1 if trips is None else trips) for n in inside)
    if x.opcode == "conditional":  # it runs one; the dearest is an upper bound
      return max(map(self._inside, body.called(x)))
    if x.opcode in ("call", "async-start", "call-start"):
      return _added(map(self._inside, body.called(x)))
    if _is_idle(x) or x.opcode.endswith(("-start", "-update", "-done")):
      return 0, 0, 0
    cycles = int(match[1]) if (match := _CYCLES.search(x.backend_config)) else 0
    if x.opcode == "fusion":
      fused = body.called(x)
      return sum(self._inside(y)[0] for y in fused), cycles, _fused_bytes(fused[0])
    types = [body.named[y].type if y in body.named else "" for y in x.operands]
    read = [x.type] if x.opcode in _PARTS else types
    return _flops(x, types), cycles, sum(map(_bytes, [*read, x.type]))

  def _inside(self, body: hlo_text.Computation) -> _Counts:
    """Returns the sums of a computation."""
    if body.name not in self._known:
      self._known[body.name] = _added(self._counts(body, x) for x in body)
    return self._known[body.name]


def _added(counts: Iterable[_Counts]) -> _Counts:
  return tuple(map(sum, zip(*counts, strict=True)))


def _fused_bytes(body: hlo_text.Computation) -> int:
  """Returns the bytes that a fusion reads and writes."""
  # Operands and results have more: a fusion reads a slice of an array, writes a part of
  # one in place, and hands on the buffers of a collective that is on its way.
  size = 0
  for x in body:
    if x.opcode == "parameter":
      users = [body[i] for i in body.readers[x.name]]
      readers = [y for y in users if y.opcode == "bitcast" or not _is_idle(y)]
      parts = (_bytes(y.type if y.opcode in _PARTS else x.type) for y in readers)
      size += min(_bytes(x.type), sum(parts))
  root = body.root
  for x in [body.named[y] for y in root.operands] if root.opcode == "tuple" else [root]:
    if x.opcode == "dynamic-update-slice":
      size += _bytes(body.named[x.operands[1]].type)
    elif x.opcode == "bitcast" or not _is_idle(x):
      size += _bytes(x.type)
  return size


def _is_idle(x: hlo_text.Instruction) -> bool:
  target = x.attributes.get("custom_call_target", "").strip('"')
  return x.opcode in _IDLE or x.opcode in SHARE_SENT or target in _IDLE_CALLS


def _bytes(type_: str) -> int:
  """Returns the bytes of all arrays in the text of a type."""
  found = hlo_text.ARRAY.findall(type_)
  return sum(-(-BITS.get(x, 0) // 8) * math.prod(integers(y)) for x, y, _ in found)


def _shape(type_: str) -> list[int]:
  """Returns the shape of the first array in the text of a type."""
  match = hlo_text.ARRAY.search(type_)
  return integers(match[2]) if match else []


def _flops(x: hlo_text.Instruction, types: Iterable[str]) -> int:
  """Returns two for each product that a dot, a convolution or a library's adds."""
  operands = [_shape(type_) for type_ in types]
  if x.opcode == "convolution":
    return 2 * _convolved(x, *operands)
  if x.opcode == "dot":
    axes = integers(x.attributes.get("lhs_contracting_dims", ""))
  elif match := _SUMMED.search(x.backend_config):
    axes = integers(match[1])
  else:
    return 0
  return 2 * math.prod(_shape(x.type)) * math.prod(operands[0][axis] for axis in axes)


def _convolved(x: hlo_text.Instruction, left: list[int], right: list[int]) -> int:
  """Returns the products of a convolution, without those with padding."""
  # XLA writes matrix products for TPUs as convolutions. A batch has a window over its
  # axis with padding in all places except one.
  labels, kernel, result = re.split(r"_|->", x.attributes["dim_labels"])
  at = lambda shape, names, name: shape[names.index(name)]
  shape = _shape(x.type)
  products = at(right, kernel, "i") * at(shape, result, "b") * at(shape, result, "f")
  window = dict(re.findall(r"(\w+)=([\w\-]+)", x.attributes.get("window", "")))
  for axis in filter(str.isdigit, labels):
    first = lambda text, i=int(axis): int(text.split("x")[i].partition("_")[0])
    own = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
    own |= {name: first(text) for name, text in window.items()}
    places = np.arange(at(shape, result, axis))[:, None] * own["stride"]
    kernels = np.arange(at(right, kernel, axis)) * own["rhs_dilate"]
    places, spread = places - own["pad"] + kernels, own["lhs_dilate"]
    inside = (places >= 0) & (places <= (at(left, labels, axis) - 1) * spread)
    products *= int(np.sum(inside & (places % spread == 0)))
  return products
