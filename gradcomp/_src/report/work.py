"""The work of HLO instructions: operations of matrix products, cycles, and bytes."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from gradcomp._src.report.collectives import SHARE_SENT, SIZES
from gradcomp._src.report.hlo_text import Instruction, Module
from gradcomp._src.report.loops import trip_count

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
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
  """The work of the instructions of a module."""

  def __init__(self, module: Module):
    self._module = module
    self._bodies = {
      name: {x.name: x for x in instructions}
      for name, instructions in module.computations.items()
    }
    self._known: dict[str, tuple[int, int, int]] = {}

  def of(self, computation: str, x: Instruction) -> Work | None:
    """Returns the work of an instruction there, or None if it has none."""
    flops, cycles, size = self._counts(computation, x)
    counts = {"flops": flops, "cycles": cycles, "bytes": size}
    return Work(name=x.name, opcode=x.opcode, **counts) if size else None

  def _counts(self, computation: str, x: Instruction) -> tuple[int, int, int]:
    called = list(itertools.chain(*x.calls.values()))
    if x.opcode == "while":
      trips = trip_count(x, self._bodies[computation], self._module)
      each = self._inside(x.calls["body"][0])
      flops, cycles, size = (n * (1 if trips is None else trips) for n in each)
      return flops, cycles, size
    if x.opcode == "conditional":  # it runs one; the dearest is an upper bound
      return max(map(self._inside, called))
    if x.opcode in ("call", "async-start", "call-start"):
      flops, cycles, size = map(sum, zip(*map(self._inside, called), strict=True))
      return flops, cycles, size
    if _is_idle(x) or x.opcode.endswith(("-start", "-update", "-done")):
      return 0, 0, 0
    cycles = int(match[1]) if (match := _CYCLES.search(x.backend_config)) else 0
    if x.opcode == "fusion":
      flops = sum(self._inside(name)[0] for name in called)
      return flops, cycles, self._fused_bytes(called[0])
    body = self._bodies[computation]
    types = [body[name].type if name in body else "" for name in x.operands]
    read = [x.type] if x.opcode in _PARTS else types
    return _flops(x, types), cycles, sum(map(_bytes, [*read, x.type]))

  def _inside(self, computation: str) -> tuple[int, int, int]:
    """Returns the sums of a computation."""
    if computation not in self._known:
      body = self._bodies[computation].values()
      found = [self._counts(computation, x) for x in body]
      flops, cycles, size = map(sum, zip(*found, strict=True))
      self._known[computation] = flops, cycles, size
    return self._known[computation]

  def _fused_bytes(self, computation: str) -> int:
    """Returns the bytes that a fusion reads and writes."""
    # Not those of all operands and results: one reads a slice of an array, writes a
    # part of one in place, and hands on the buffers of a collective that is on its way.
    body, size = self._bodies[computation], 0
    users: dict[str, list[Instruction]] = {}
    for x in body.values():
      for name in x.operands:
        users.setdefault(name, []).append(x)
    for x in body.values():
      if x.opcode == "parameter":
        readers = [y for y in users.get(x.name, ()) if not _hands_on(y)]
        parts = [_bytes(y.type) for y in readers if y.opcode in _PARTS]
        whole = len(parts) < len(readers)
        size += _bytes(x.type) if whole else min(_bytes(x.type), sum(parts))
    root = root_of(self._module.computations[computation])
    results = [body[y] for y in root.operands] if root.opcode == "tuple" else [root]
    for x in results:
      if x.opcode == "dynamic-update-slice":
        size += _bytes(body[x.operands[1]].type)
      elif x.opcode == "bitcast" or not _is_idle(x):
        size += _bytes(x.type)
    return size


def root_of(instructions: Sequence[Instruction]) -> Instruction:
  """Returns the result of a computation: the last one where the text marks none."""
  return next((x for x in instructions if x.is_root), instructions[-1])


def _is_idle(x: Instruction) -> bool:
  target = x.attributes.get("custom_call_target", "").strip('"')
  return x.opcode in _IDLE or x.opcode in SHARE_SENT or target in _IDLE_CALLS


def _hands_on(x: Instruction) -> bool:
  return x.opcode != "bitcast" and _is_idle(x)


def _bytes(type_: str) -> int:
  """Returns the bytes of all arrays in the text of a type."""
  arrays = _ARRAY.findall(type_)
  return sum(SIZES.get(dtype, 0) * math.prod(_sizes(shape)) for dtype, shape in arrays)


def _sizes(shape: str) -> list[int]:
  return [int(size) for size in re.findall(r"\d+", shape)]


def _shape(type_: str) -> list[int]:
  """Returns the shape of the first array in the text of a type."""
  match = _ARRAY.search(type_)
  return _sizes(match[2]) if match else []


def _flops(x: Instruction, types: Iterable[str]) -> int:
  """Returns two for each product that a dot, a convolution or a library's adds."""
  operands = [_shape(type_) for type_ in types]
  if x.opcode == "dot":
    axes = x.attributes.get("lhs_contracting_dims", "")
    return 2 * _product(x, operands[0], _sizes(axes))
  if x.opcode == "convolution":
    return 2 * _convolved(x, *operands)
  # cuBLAS: its configuration is the dot's.
  if match := re.search(r'"lhs_contracting_dimensions":(\[[^]]*\])', x.backend_config):
    return 2 * _product(x, operands[0], [int(axis) for axis in json.loads(match[1])])
  return 0


def _product(x: Instruction, left: list[int], axes: Iterable[int]) -> int:
  return math.prod(_shape(x.type)) * math.prod(left[axis] for axis in axes)


def _convolved(x: Instruction, left: list[int], right: list[int]) -> int:
  """Returns the products of a convolution, without those with padding."""
  # XLA writes matrix products for TPUs as convolutions, those of a batch with a window
  # over its axis of which all but one place is padding.
  labels, kernel, result = re.split(r"_|->", x.attributes["dim_labels"])
  at = lambda shape, names, name: shape[names.index(name)]
  shape = _shape(x.type)
  products = at(right, kernel, "i") * at(shape, result, "b") * at(shape, result, "f")
  window = dict(re.findall(r"(\w+)=([\w\-]+)", x.attributes.get("window", "")))
  for axis in filter(str.isdigit, labels):
    option = lambda name, default, axis=axis: (
      window[name].split("x")[int(axis)] if name in window else default
    )
    stride, dilation, spread = (
      int(option(name, "1")) for name in ("stride", "rhs_dilate", "lhs_dilate")
    )
    before = int(option("pad", "0_0").split("_")[0])
    places = np.arange(at(shape, result, axis))[:, None] * stride - before
    places = places + np.arange(at(right, kernel, axis)) * dilation
    inside = (places >= 0) & (places <= (at(left, labels, axis) - 1) * spread)
    products *= int(np.sum(inside & (places % spread == 0)))
  return products
