"""The instructions of a compiled program, their runs and costs, from scheduled text.

Only what a device runs by itself counts: the instructions of the entry, of the bodies
of its loops and of the branches that it takes, but not those inside of a fusion. XLA
writes the estimated cycles into most instructions for TPUs, and not into collectives,
copies, most reshapes and kernels of Pallas; so a sum of cycles is a lower bound, and
`unpriced` finds the others. A program for GPUs has no cycles.
"""

import collections
import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.compilers.targets import Target, versions
from gradcomp._src.kernels.gpu import table
from gradcomp._src.report.collectives import SHARE_SENT
from gradcomp._src.report.hlo_text import Computation, Instruction, Module, read_module

# An array: its dtype, its shape, and its layout, like {1,0:T(8,128)(2,1)S(1)}.
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)((?::[^}]*)?)\})?")

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
_COLLECTIVES = {*SHARE_SENT, "send"}


class Array(NamedTuple):
  """An array of the text, with its layout: minor to major, tiles and memory space."""

  dtype: str
  shape: tuple[int, ...]
  order: tuple[int, ...]
  tiling: str = ""

  @property
  def bits(self) -> int:
    packed = re.search(r"E\((\d+)\)", self.tiling)
    found = packed or re.match(r"[a-z]+(\d+)", self.dtype)
    return int(found[1]) if found else 8 * (self.dtype == "pred")

  @property
  def bytes(self) -> int:
    return math.ceil(math.prod(self.shape) * self.bits / 8)

  @property
  def padded(self) -> int:
    """Returns its bytes in memory, with what fills its last tiles."""
    tile = re.match(r":T\(([\d,]+)\)", self.tiling)
    sizes = map(int, reversed(tile[1].split(","))) if tile else ()
    sides = itertools.zip_longest(
      (self.shape[i] for i in self.order), sizes, fillvalue=1
    )
    padded = math.prod(-(-length // size) * size for length, size in sides)
    return math.ceil(padded * self.bits / 8)


class Run(NamedTuple):
  """An instruction that a device runs, and how often in one run of the program."""

  instruction: Instruction
  times: int
  body: Computation


def arrays(text: str) -> list[Array]:
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
    yield from self._runs(self.module.computations[self.module.entry], 1)

  def _runs(self, body: Computation, times: int) -> Iterator[Run]:
    for found in body:
      yield Run(found, times, body)
      if found.opcode in _CALLS:
        trips = (trips_of(self.module, found) or 1) if found.opcode == "while" else 1
        for how, callees in found.calls.items():
          for callee in callees if how != "condition" else ():
            yield from self._runs(body.others[callee], times * trips)

  def moved(self, run: Run) -> int:
    """Returns the bytes of the tiles that an instruction writes, half of a kernel's."""
    found, padded = run.instruction, lambda type_: sum(a.padded for a in arrays(type_))
    written = padded(found.type)
    read = [padded(run.body.named[x].type) for x in found.operands]
    if is_kernel(found):
      return (sum(read) + written) // 2
    return read[1] if found.opcode == "dynamic-update-slice" else written  # in place

  def collectives(self) -> list[dict[str, Any]]:
    """Returns each collective: kind, arrays, times, whether it is asynchronous."""
    found: list[dict[str, Any]] = []
    chains: set[str] = set()
    for run in self.runs():
      for body, each in self._collectives(run.body, run.instruction):
        if chains & {*each.chains}:
          continue  # an asynchronous fusion repeats it at its start, steps and end
        chains |= {*each.chains}
        found.append(self._collective(run, body, each))
    return found

  def _collectives(
    self, body: Computation, x: Instruction
  ) -> Iterator[tuple[Computation, Instruction]]:
    """Yields the collective that an instruction is, or those that it starts."""
    if x.base in _COLLECTIVES:
      yield body, x
    elif x.opcode in ("fusion", "async-start", "call-start"):
      for callee in body.called(x):
        for inside in callee:
          yield from self._collectives(callee, inside)

  def _collective(self, run: Run, body: Computation, x: Instruction) -> dict[str, Any]:
    types = [body.named[y].type for y in x.operands if y in body.named]
    kind, given = x.base, [a for y in types for a in arrays(y) if a.bits]
    waits = x.opcode.endswith("-start") or kind == "send" or x is not run.instruction
    told = str(x.attributes)
    if x.attributes.get("is_host_transfer") == "true" and "megascale" not in told:
      kind = "host send"
    return {
      "kind": kind,
      "types": sorted({f"{a.dtype}{list(a.shape)}{a.tiling}" for a in given}),
      "bytes": sum(a.bytes for a in given) * run.times,
      "padded": sum(a.padded for a in given) * run.times,
      "times": run.times,
      "asynchronous": waits and '"is_sync":true' not in x.backend_config,
      "part": part(x.op_name or run.instruction.op_name),
    }


def trips_of(module: Module, loop: Instruction) -> int | None:
  """Returns how often a loop runs, or None where the text does not say."""
  # GPUs' and CPUs' programs say it. In those of TPUs it is the constant of the
  # condition, ``i < n``, where ``i`` counts from 0 by 1, as lax.scan makes it.
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.backend_config):
    return int(known[1])
  condition = module.computations[loop.calls["condition"][0]]
  called = itertools.chain(*map(condition.called, condition))
  every = [*condition, *itertools.chain(*called)]
  constants = (x for x in every if x.opcode == "constant")
  numbers = {x.arguments[0] for x in constants if re.match(r"[su]\d+\[\]", x.type)}
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
  """Returns a scope's part: encode, decode, exchange for all else of ours, or model."""
  names = re.findall(r"gradcomp_(\w+)", scope)
  last = [name for name in names if name in ("encode", "decode")]
  return last[-1] if last else "exchange" if names else "model"


def compile_for(
  target: Target, function: Any, args: Any, flags: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
  """Compiles a jitted function of sharded structs, and reads the facts about it."""
  start = time.monotonic()
  # All kernels are compiled, for devices that no table knows, too.
  with mock.patch.object(table, "serves", lambda *_: True):
    lowered = function.lower(*args)
  seconds = {"lower_seconds": round(time.monotonic() - start, 1)}
  start = time.monotonic()
  compiled = lowered.compile(compiler_options=dict(flags) if flags else None)
  seconds["compile_seconds"] = round(time.monotonic() - start, 1)
  return compiled, facts(compiled, target) | seconds


def facts(compiled: Any, target: Target) -> dict[str, Any]:
  """Returns what a program's memory analysis and its scheduled text say.

  Bytes are those of one device. ``cycles`` are the compiler's estimate, and by the part
  of a step; they are None for GPUs. ``moved`` are bytes that copies, reshapes, kernels
  of Pallas and the like move and that carry no estimate, by the same parts.
  ``launches`` counts what a device starts in one run, a loop's as often as it runs;
  what has no array for its result is counted apart, as ``scalars``.
  """
  program = Program(compiled.as_text())
  spent, started, moved, kernels = (collections.Counter[str]() for _ in range(4))
  loops = []
  for run in program.runs():
    found, where = run.instruction, part(run.instruction.op_name)
    if found.opcode == "while":
      loops.append({"part": where, "trips": trips_of(program.module, found)})
    if not launches(found):
      continue
    spent[where] += (cycles(found) or 0) * run.times
    large = any(a.shape for a in arrays(found.type))
    started[where if large else "scalars"] += run.times
    if unpriced(found):
      moved[where] += program.moved(run) * run.times
    if found.opcode == "custom-call":
      kernels[found.attributes["custom_call_target"].strip('"')] += run.times
  bodies = program.module.computations.values()
  every = collections.Counter(x.opcode for body in bodies for x in body)
  return {
    "versions": versions(target),
    "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    "cycles": dict(spent) if target.platform == "tpu" else None,
    "launches": dict(started),
    "moved": dict(moved),
    "kernels": dict(kernels),
    "loops": loops,
    "gathers": {x: every[x] for x in ("gather", "scatter", "sort") if every[x]},
    "collectives": program.collectives(),
  }
