"""Compiles every kernel for Hopper without a GPU, and reads what the compilers made.

  make ptx-check     or     python -m benchmarks.gpu.ptx

Needs jax-cuda13-plugin and jax-cuda13-pjrt of JAX's own version, and ptxas and nvdisasm
of CUDA 13; `make ptx-check` installs them. The exit status is 77 where one is missing.
Every kernel is compiled for an array whose size is a power of two, and for one of an
odd size. In both, the kernel may not spill registers to memory. The exit status is 1
where a kernel fails in this. Writes a table to benchmarks/results/gpu/ptx_check.md.

Nothing runs. The times of the table are bounds of an H100's roofline: the bytes that
must move by 3.35 TB/s, integer instructions by 64 a clock and multiprocessor, those on
floats by 128, and all by 128 that are issued, in 132 multiprocessors at 1.98 GHz.
"""

import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.common import cli, tables
from benchmarks.compilers import targets

RESULTS = cli.RESULTS / "gpu" / "ptx_check.md"
SIZES = (2**26, 2**26 + 77)
_QUICK = ["float_cast (3, 0) nearest_even", "one_bit bucket 512"]

# Of an H100: bytes and clocks a second, and threads' instructions a clock.
_BYTES = 3.35e12
_CLOCKS = 132 * 1.98e9
_INTEGERS, _FLOATS, _ISSUED = 64, 128, 128

# Sums and products of floats, and what is neither on floats nor on integers. All else
# takes turns with integers: conversions, comparisons and choices of floats as well.
_FLOAT = re.compile(r"FADD|FMUL|FFMA")
_LOAD = re.compile(r"ld(?:\.global\S*?)?(?:\.v(\d))?\.[bufs](\d+)$")  # of PTX
_OTHER = re.compile(r"U?LD\w*|STG?|STS|BAR|BRA|EXIT|CALL|RET|BS\w+|WARPSYNC|C?S2\w+")


class Program(NamedTuple):
  """The facts that a kernel's programs for the assembler and the GPU hold."""

  threads: int  # in a block
  registers: int  # of a thread
  spills: int  # bytes that a thread writes and reads for want of registers
  shared: int  # bytes of shared memory
  ptx: int  # how many instructions of PTX a thread runs
  loads: Counter[int]  # of global memory that a thread does, by their bytes
  sass: Counter[str]  # how often an instruction of the GPU runs in a thread

  def counts(self) -> tuple[int, int, int]:
    """Returns integer instructions, those on floats, and all."""
    runs = lambda kind: sum(n for x, n in self.sass.items() if kind.fullmatch(x))
    floats, others, every = runs(_FLOAT), runs(_OTHER), self.sass.total()
    return every - floats - others, floats, every


def tool(name: str) -> str:
  """Returns the path of a program of CUDA 13, or skips the check if there is none."""
  found = targets.cuda_program(name)
  if found is None:
    cli.skip(f"there is no {name} of CUDA 13 here, in a wheel, on PATH or in CUDA_HOME")
  return str(found)


def prepare(dump: str) -> None:
  """Makes the compilers write PTX to a folder. Call it before JAX is imported."""
  targets.prepare()
  os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": dump}
  dumped = f" --xla_dump_to={dump} --xla_gpu_dump_llvmir=true --xla_dump_emitter_re=ptx"
  os.environ["XLA_FLAGS"] += dumped


def compile_ptx(case: Any, size: int, dump: str) -> tuple[list[str], int, float]:
  """Compiles a case for an H200: its PTX, the last kernel's grid, and the bytes moved.

  The PTX is that of its modules. The bytes are those of all arrays that are read and
  written, for each element of the gradient.
  """
  import jax

  from benchmarks.common.shapes import placed
  from gradcomp._src.kernels.gpu import dispatch, tiles

  mesh = targets.Target("1x1x1", "cuda", kind="NVIDIA H200").mesh()
  specs = placed(mesh, case.structs(size), jax.P())
  kind: Any = {"device_kind": "NVIDIA H200", "num_cores": None, "platform": "gpu"}
  device = jax.sharding.AbstractDevice(**kind)
  there = jax.sharding.AbstractMesh((), (), abstract_device=device)
  before = set(pathlib.Path(dump).rglob("*.ptx"))
  # That there is no GPU here does not matter: nothing runs.
  with (
    mock.patch.object(dispatch, "_missing", lambda: None),
    mock.patch.object(tiles, "run", wraps=tiles.run) as run,
    jax.sharding.use_abstract_mesh(there),
  ):
    traced = jax.jit(case.function("pallas")).trace(*specs)
    traced.lower(lowering_platforms=("cuda",)).compile()
  arrays = [*specs, *jax.tree.leaves(traced.out_info)]
  moved = sum(a.size * a.dtype.itemsize for a in arrays) / size
  new = set(pathlib.Path(dump).rglob("*.ptx")) - before
  # The others are XLA's own, for what is left behind the last block.
  texts = (path.read_text() for path in sorted(new))
  return [x for x in texts if "mosaic_gpu" in x], run.call_args.args[1], moved


def read(ptx: str, trips: int) -> dict[str, Program]:
  """Reads the programs of a module, by name."""
  report, sass = _assemble(ptx)
  programs = {}
  for entry in re.split(r"(?=^\.visible \.entry )", ptx, flags=re.MULTILINE)[1:]:
    name = re.match(r"\.visible \.entry (\w+)", entry)
    threads = re.search(r"\.(?:req|max)ntid (\d+)", entry)
    assert name and threads, entry[:200]
    # Inline assembly has several in a line.
    texts = (line.partition("//")[0] for line in entry.splitlines())
    parts = [part.strip() for text in texts for part in re.findall(r"[^;]+;?", text)]
    # ptxas leaves nearly all of mov out.
    run = r"(?:@!?%p\d+\s+)?(?!mov\b)([a-z][^\s;]*).*;$"
    operations = _counted(parts, trips, r"\bbra(?:\.uni)?\s+(\S+);", ";", run)
    loads = Counter[int]()
    for operation, times in operations.items():
      if access := _LOAD.match(operation):
        loads[int(access[1] or 1) * int(access[2]) // 8] += times
    lines = [line.strip() for line in sass[name[1]].splitlines()]
    run = r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(?!NOP\b)([A-Z]\w*)"
    counts = _counted(lines, trips, r"\bBRA.*?`\((\.L\w+)\)", "*/", run)
    found = operations.total(), loads, counts
    programs[name[1]] = Program(int(threads[1]), *report[name[1]], *found)
  return programs


def _assemble(ptx: str) -> tuple[dict[str, tuple[int, int, int]], dict[str, str]]:
  """Returns the registers, spilled bytes and shared memory of programs, and SASS."""
  with tempfile.TemporaryDirectory() as folder:
    source, binary = f"{folder}/kernel.ptx", f"{folder}/kernel.cubin"
    pathlib.Path(source).write_text(ptx)
    text = _output(tool("ptxas"), "-v", "-arch=sm_90a", "-o", binary, source)
    code = _output(tool("nvdisasm"), "-c", binary)
  found = re.findall(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill"
    r" loads.*?Used (\d+) registers(?:.*?(\d+) bytes smem)?",
    text,
    re.DOTALL,
  )
  report = {n: (int(r), int(a) + int(b), int(m or 0)) for n, a, b, r, m in found}
  parts = re.split(r"^\.text\.(\w+):\n", code, flags=re.MULTILINE)
  return report, dict(zip(parts[1::2], parts[2::2], strict=True))


def _output(*command: str) -> str:
  return subprocess.check_output(command, stderr=subprocess.STDOUT, text=True)


def _counted(
  lines: list[str], trips: int, branch: str, code: str, name: str
) -> Counter[str]:
  """Returns how often instructions run: those of a loop over planes ``trips`` times.

  ``branch`` and ``name`` are patterns, and ``code`` is in each line of code.
  """
  labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
  times = [1] * len(lines)
  for i, line in enumerate(lines):
    target = re.search(branch, line)
    start = labels.get(target[1], i) if target else i
    # Back, but not to itself, which is the end of the program.
    if any(code in line for line in lines[start:i]):
      times[start : i + 1] = [trips * count for count in times[start : i + 1]]
  counts = Counter[str]()
  for line, number in zip(lines, times, strict=True):
    if found := re.match(name, line):
      counts[found[1]] += number
  return counts


def check(cases: dict[str, Any], dump: str) -> tuple[list[str], list[str]]:
  """Compiles cases, and returns lines of the table and lines on what is wrong."""
  lines, wrong = [], []
  for (name, case), size in itertools.product(cases.items(), SIZES):
    title = f"{name}, {size:,}"
    modules, grid, moved = compile_ptx(case, size, dump)
    programs = [p for ptx in modules for p in read(ptx, case.trips).values()]
    wrong += [] if programs else [f"{title}: there is no kernel in it"]
    wrong += [f"{title}: {x.spills} bytes are spilled" for x in programs if x.spills]
    for program in programs:
      lines.append(_line(title, program, size / grid / program.threads, moved))
      print(lines[-1], flush=True)
  return lines, wrong


def _line(title: str, program: Program, elements: float, moved: float) -> str:
  """Returns a line of the table; a thread encodes as many elements."""
  integers, floats, every = (count / elements for count in program.counts())
  times = {
    "memory": moved / _BYTES,
    "integers": integers / (_INTEGERS * _CLOCKS),
    "floats": floats / (_FLOATS * _CLOCKS),
    "issue": every / (_ISSUED * _CLOCKS),
  }
  most = max(times, key=lambda name: times[name])
  cells = [
    title,
    *program[1:4],  # registers, spills and shared memory
    ", ".join(f"{n} of {width}" for width, n in sorted(program.loads.items())),
    *(f"{x:.1f}" for x in (program.ptx / elements, every, integers)),
    f"{moved:.2f}",
    *(f"{1e12 * seconds:.2f}" for seconds in times.values()),
    f"{times[most] / (8 / _BYTES):.2f}",
    most,
  ]
  return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
  parser = cli.parser(__doc__, "two cases", RESULTS)
  parser.add_argument("--cases", nargs="+", help="by default those that are timed")
  options = parser.parse_args()
  if missing := targets.TARGETS["H200"].missing():
    cli.skip(f"there is not {missing} here, which `make ptx-check` installs")
  version = _output(tool("ptxas"), "--version")
  tool("nvdisasm")
  with tempfile.TemporaryDirectory() as dump:
    prepare(dump)
    import jax

    from benchmarks.gpu.cases import CASES

    timed = [name for name, case in CASES.items() if case.timed]
    names = options.cases or (_QUICK if options.quick else timed)
    if unknown := set(names) - set(CASES):
      parser.error(f"there are no such cases: {', '.join(sorted(unknown))}")
    lines, wrong = check({name: CASES[name] for name in names}, dump)
  release = re.search(r"release [\d.]+", version)
  named = f"ptxas {release[0] if release else ''}"
  head = tables.page(__file__, "ptx_check", version=jax.__version__, ptxas=named)
  if output := options.output or (None if options.quick else RESULTS):
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join([head, *lines]) + "\n")
  print(f"{len(lines)} programs, in {output or 'no file'}")
  if wrong:
    sys.exit("\n".join(["These are not as they should be:", *wrong]))


if __name__ == "__main__":
  main()
