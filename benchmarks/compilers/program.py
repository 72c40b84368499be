"""The instructions of a compiled program, their runs and costs, from scheduled text.

Only what a device runs by itself counts: the instructions of the entry, of the bodies
of its loops and of the branches that it takes, but not those inside of a fusion. XLA
writes the estimated cycles into most instructions for TPUs, and not into collectives,
copies, most reshapes and kernels of Pallas; so a sum of cycles is a lower bound, and
`unpriced` finds the others. A program for GPUs has no cycles.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from gradcomp._src.report.hlo_text import Instruction, Module, read_module

# An array: its dtype, its shape, and its layout, like {1,0:T(8,128)(2,1)S(1)}.
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)((?::[^}]*)?)\})?")
_BITS = {"pred": 8, "bf16": 16, "token": 0}

# Instructions that only name what others make, or wait for it.
_FREE = frozenset(
  "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id"
  " opt-barrier domain add-dependency".split()
)
_CALLS = frozenset(("while", "conditional", "call"))
_MOVES = frozenset(
  "copy copy-start reshape transpose concatenate slice dynamic-slice"
  " dynamic-update-slice pad broadcast reverse".split()
)
_COLLECTIVES = frozenset(
  "all-gather all-reduce all-to-all collective-permute collective-broadcast"
  " ragged-all-to-all reduce-scatter send".split()
)


class Array(NamedTuple):
  """An array of the text, with its layout: minor to major, tiles and memory space."""

  dtype: str
  shape: tuple[int, ...]
  order: tuple[int, ...]
  tiling: str = ""

  @property
  def bits(self) -> int:
    """Returns the bits of an element."""
    if packed := re.search(r"E\((\d+)\)", self.tiling):
      return int(packed[1])
    digits = re.match(r"[a-z]+(\d+)", self.dtype)
    known = _BITS.get(self.dtype)
    return known if known is not None else int(digits[1]) if digits else 0

  @property
  def bytes(self) -> int:
    """Returns the bytes of its elements."""
    return math.ceil(math.prod(self.shape) * self.bits / 8)

  @property
  def padded(self) -> int:
    """Returns its bytes in memory, with what fills its last tiles."""
    shape = [self.shape[i] for i in reversed(self.order)]
    if tile := re.match(r":T\(([\d,]+)\)", self.tiling):
      sizes = [int(x) for x in tile[1].split(",")]
      shape = [1] * (len(sizes) - len(shape)) + shape
      for i, size in enumerate(sizes, len(shape) - len(sizes)):
        shape[i] = -(-shape[i] // size) * size
    return math.ceil(math.prod(shape) * self.bits / 8)


class Run(NamedTuple):
  """An instruction that a device runs, and how often in one run of the program."""

  instruction: Instruction
  times: int
  computation: str


def arrays(text: str) -> list[Array]:
  """Returns the arrays that a type names."""
  found = []
  for dtype, sizes, order, tiling in _ARRAY.findall(text):
    shape = tuple(map(int, filter(None, sizes.split(","))))
    axes = tuple(map(int, filter(None, order.split(","))))
    plain = tuple(reversed(range(len(shape))))  # a text without layouts
    found.append(Array(dtype, shape, axes or plain, tiling))
  return found


class Program:
  """A module, and what a device runs of it."""

  def __init__(self, text: str):
    self.module: Module = read_module(text)

  def runs(self) -> Iterator[Run]:
    """Yields what a device runs, in order, each instruction of a loop once."""
    yield from self._runs(self.module.entry, 1)

  def _runs(self, name: str, times: int) -> Iterator[Run]:
    for found in self.module.computations[name]:
      yield Run(found, times, name)
      if found.opcode in _CALLS:
        trips = (trips_of(self.module, found) or 1) if found.opcode == "while" else 1
        for how, callees in found.calls.items():
          for callee in callees if how != "condition" else ():
            yield from self._runs(callee, times * trips)

  def moved(self, run: Run) -> int:
    """Returns the bytes that an instruction writes, with what fills the last tiles.

    Of a kernel it is half of what it reads and writes, which is the same for a copy.
    """
    found = run.instruction
    written = sum(a.padded for a in arrays(found.type))
    types = {x.name: x.type for x in self.module.computations[run.computation]}
    read = [sum(a.padded for a in arrays(types[x])) for x in found.operands]
    if is_kernel(found):
      return (sum(read) + written) // 2
    return read[1] if found.opcode == "dynamic-update-slice" else written  # in place

  def collectives(self) -> list[dict[str, Any]]:
    """Returns each collective: kind, arrays, times, whether it is asynchronous."""
    found: list[dict[str, Any]] = []
    chains: set[str] = set()
    for run in self.runs():
      for name, each in self._collectives(run.computation, run.instruction):
        chain = re.search(r'chain_id="?(\d+)', str(each.attributes))
        if chain and chain[1] in chains:
          continue  # an asynchronous fusion repeats it at its start, steps and end
        chains |= {chain[1]} if chain else set()
        found.append(self._collective(run, name, each))
    return found

  def _collectives(
    self, name: str, instruction: Instruction
  ) -> Iterator[tuple[str, Instruction]]:
    """Yields the collective that an instruction is, or those that it starts."""
    if instruction.opcode.removesuffix("-start") in _COLLECTIVES:
      yield name, instruction
    elif instruction.opcode in ("fusion", "async-start", "call-start"):
      for callees in instruction.calls.values():
        for callee in callees:
          for inside in self.module.computations[callee]:
            yield from self._collectives(callee, inside)

  def _collective(self, run: Run, name: str, found: Instruction) -> dict[str, Any]:
    types = {x.name: x.type for x in self.module.computations[name]}
    kind = found.opcode.removesuffix("-start")
    given = [a for x in found.operands for a in arrays(types.get(x, "")) if a.bits]
    alone = found is run.instruction
    waits = found.opcode.endswith("-start") or kind == "send" or not alone
    told = str(found.attributes)
    if found.attributes.get("is_host_transfer") == "true" and "megascale" not in told:
      kind = "host send"
    return {
      "kind": kind,
      "types": sorted({f"{a.dtype}{list(a.shape)}{a.tiling}" for a in given}),
      "bytes": sum(a.bytes for a in given) * run.times,
      "padded": sum(a.padded for a in given) * run.times,
      "times": run.times,
      "asynchronous": waits and '"is_sync":true' not in found.backend_config,
      "part": part(found.op_name or run.instruction.op_name),
    }


def trips_of(module: Module, loop: Instruction) -> int | None:
  """Returns how often a loop runs, or None where the text does not say."""
  # GPUs' and CPUs' programs say it. In those of TPUs it is the constant of the
  # condition, ``i < n``, where ``i`` counts from 0 by 1, as lax.scan makes it.
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.backend_config):
    return int(known[1])
  condition = module.computations[loop.calls["condition"][0]]
  called = [name for x in condition for names in x.calls.values() for name in names]
  every = [*condition, *(x for name in called for x in module.computations[name])]
  numbers = {
    x.arguments[0]
    for x in every
    if x.opcode == "constant" and re.match(r"[su]\d+\[\]", x.type)
  }
  below = any(x.attributes.get("direction") == "LT" for x in every)
  return int(numbers.pop()) if below and len(numbers) == 1 else None


def cycles(instruction: Instruction) -> int | None:
  """Returns the compiler's estimate, or None where there is none."""
  found = re.search(r'"estimated_cycles":"(\d+)"', instruction.backend_config)
  return int(found[1]) if found else None


def launches(instruction: Instruction) -> bool:
  """Returns whether an instruction is one that a device starts by itself."""
  opcode = instruction.opcode
  return opcode not in _FREE | _CALLS and not opcode.endswith(("-done", "-update"))


def is_kernel(instruction: Instruction) -> bool:
  """Returns whether an instruction is a kernel of Pallas for TPUs."""
  return instruction.attributes.get("custom_call_target") == '"tpu_custom_call"'


def unpriced(instruction: Instruction) -> bool:
  """Returns whether it moves bytes, and carries no estimate of its cycles."""
  moves = instruction.opcode in _MOVES or is_kernel(instruction)
  return moves and cycles(instruction) is None


def part(scope: str) -> str:
  """Returns the part of a step that a scope belongs to.

  It is ``"encode"``, ``"decode"``, ``"exchange"`` for all else that gradcomp names, or
  ``"model"``.
  """
  names = re.findall(r"gradcomp_(\w+)", scope)
  last = [name for name in names if name in ("encode", "decode")]
  return last[-1] if last else "exchange" if names else "model"
