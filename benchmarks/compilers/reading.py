"""Compiles a function for a target, and reads the facts of the program."""

import collections
import time
from collections.abc import Mapping
from typing import Any

import jax

from benchmarks.compilers import program as hlo
from benchmarks.compilers.targets import Target, versions


def compile_for(
  target: Target,
  function: Any,
  args: Any,
  flags: Mapping[str, bool | int] | None = None,
) -> tuple[Any, dict[str, Any]]:
  """Compiles ``function(*args)``: the program, and the facts about it.

  Args:
    target: what it is compiled for.
    function: jitted.
    args: trees of ``jax.ShapeDtypeStruct`` with shardings over devices of the target.
    flags: of the compiler.
  """
  start = time.monotonic()
  lowered = function.lower(*args)
  between = time.monotonic()
  compiled = lowered.compile(compiler_options=dict(flags) if flags else None)
  seconds = {
    "lower_seconds": round(between - start, 1),
    "compile_seconds": round(time.monotonic() - between, 1),
  }
  return compiled, facts(compiled, target) | seconds


def facts(compiled: Any, target: Target) -> dict[str, Any]:
  """Returns what a program's memory analysis and its scheduled text say.

  Bytes are those of one device. ``cycles`` are the compiler's estimate, and by the part
  of a step; they are None for GPUs. ``moved`` are bytes that copies, reshapes, kernels
  of Pallas and the like move and that carry no estimate, by the same parts.
  ``launches`` counts what a device starts in one run, a loop's as often as it runs;
  what has no array for its result is counted apart, as ``scalars``.
  """
  memory = compiled.memory_analysis()
  program = hlo.Program(compiled.as_text())
  cycles: collections.Counter[str] = collections.Counter()
  launches: collections.Counter[str] = collections.Counter()
  moved: collections.Counter[str] = collections.Counter()
  kernels: collections.Counter[str] = collections.Counter()
  loops = []
  for run in program.runs():
    found, where = run.instruction, hlo.part(run.instruction.op_name)
    if found.opcode == "while":
      loops.append({"part": where, "trips": hlo.trips_of(program.module, found)})
    if not hlo.launches(found):
      continue
    cycles[where] += (hlo.cycles(found) or 0) * run.times
    large = any(a.shape for a in hlo.arrays(found.type))
    launches[where if large else "scalars"] += run.times
    if hlo.unpriced(found):
      moved[where] += program.moved(run) * run.times
    if found.opcode == "custom-call":
      kernels[found.attributes["custom_call_target"].strip('"')] += run.times
  every = collections.Counter(
    x.opcode for body in program.module.computations.values() for x in body
  )
  return {
    "versions": versions(target),
    "temporaries": memory.temp_size_in_bytes,
    "cycles": dict(cycles) if target.platform == "tpu" else None,
    "launches": dict(launches),
    "moved": dict(moved),
    "kernels": dict(kernels),
    "loops": loops,
    "gathers": {x: every[x] for x in ("gather", "scatter", "sort") if every[x]},
    "collectives": program.collectives(),
  }


def replicated(mesh: Any, shapes: Any) -> Any:
  """Returns a tree of structs of which every device of the mesh has the whole."""
  sharding = jax.NamedSharding(mesh, jax.P())
  like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  return jax.tree.map(like, shapes)
