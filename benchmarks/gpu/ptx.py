"""Compiles every kernel for Hopper without a GPU, and reads what the compiler made.

  make ptx-check     or     python -m benchmarks.gpu.ptx [--cases 'qsgd 4' ...]
    [--quick]

Needs jax-cuda13-plugin and jax-cuda13-pjrt of JAX's own version, which `make ptx-check`
installs, and ptxas of CUDA 13, on PATH or in CUDA_HOME. The exit status is 77 where one
of them is missing. Every kernel is compiled for an array whose size is a power of two,
and for one of an odd size. In both, the kernel may not spill registers to memory, and
must load the gradient by 16 bytes. The exit status is 1 where a kernel fails in this.
Writes a table to benchmarks/results/gpu/ptx_check.md.

Nothing runs: the table has properties of programs, and no times.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.common import cli

RESULTS = cli.RESULTS / "gpu" / "ptx_check.md"
SIZES = (2**26, 2**26 + 77)
_QUICK = ["float_cast (3, 0) nearest_even", "one_bit bucket 512"]

# What jax.devices() of an NVIDIA H200 says of it.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  device_memory_size: 150000000000
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


class Program(NamedTuple):
  """The facts that a kernel's PTX and the assembler's report hold.

  Attributes:
    threads: in a block.
    elements: of the gradient, that a block encodes.
    registers: of a thread.
    spills: bytes that a thread writes to memory and reads back for want of registers.
    loads: how many loads of global memory a thread does, by their bytes.
    stores: the same for stores.
    counts: how often each instruction runs, by its name.
  """

  threads: int
  elements: float
  registers: int
  spills: int
  loads: dict[int, int]
  stores: dict[int, int]
  counts: dict[str, int]

  @property
  def wide(self) -> bool:
    """True if loads of 16 bytes read the whole gradient."""
    # The last block takes some tiles again, and leaves a part of one.
    return self.loads.get(16, 0) * 4 * self.threads >= 0.99 * self.elements

  @property
  def per_element(self) -> float:
    return sum(self.counts.values()) * self.threads / self.elements


def ptxas() -> str:
  """Returns the path of the assembler, or skips the check if there is none."""
  folder = os.environ.get("CUDA_HOME", "/usr/local/cuda")
  found = shutil.which("ptxas") or shutil.which(f"{folder}/bin/ptxas")
  if found is None:
    cli.skip("there is no ptxas of CUDA 13 here, on PATH or in CUDA_HOME")
  return found


def prepare(dump: str) -> None:
  """Makes the compilers write PTX to a folder. Call it before JAX is imported."""
  cuda = pathlib.Path(ptxas()).resolve().parent.parent
  os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "MOSAIC_GPU_DUMP_PTX": "1",
    "MOSAIC_GPU_DUMP_TO": dump,
    "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={cuda} --xla_dump_to={dump} "
    "--xla_gpu_dump_llvmir=true --xla_dump_emitter_re=ptx",
  }


def compile_ptx(
  case: Any, implementation: str, size: int, dump: str
) -> tuple[list[str], int]:
  """Compiles a case for an H200: the PTX of its modules, and the blocks of the grid.

  There are 0 blocks where XLA's text does not say.
  """
  import jax
  import jax.numpy as jnp
  from jax.experimental import topologies

  from gradcomp._src.kernels.gpu import dispatch

  topology = topologies.get_topology_desc(
    platform="cuda", target_config=_H200, topology="1x1x1"
  )
  mesh = topologies.make_mesh(topology, (1,), ("x",))
  sharding = jax.NamedSharding(mesh, jax.P())
  x = jax.ShapeDtypeStruct((size,), jnp.float32)
  operands = jax.eval_shape(lambda x: case.operands(case.codec, x), x)
  specs = [
    jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in (x, *operands)
  ]
  device = jax.sharding.AbstractDevice(
    device_kind="NVIDIA H200", num_cores=None, platform="gpu"
  )
  there = jax.sharding.AbstractMesh((), (), abstract_device=device)
  before = set(pathlib.Path(dump).rglob("*.ptx"))
  # That there is no GPU here does not matter: nothing runs.
  with (
    mock.patch.object(dispatch, "_missing", lambda implementation: None),
    jax.sharding.use_abstract_mesh(there),
  ):
    traced = jax.jit(case.function(implementation)).trace(*specs)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
  grid = re.search(r"grid_x = (\d+)", text)
  new = set(pathlib.Path(dump).rglob("*.ptx")) - before
  # Some versions of JAX also write an empty module.
  modules = [text for path in sorted(new) if (text := path.read_text())]
  return modules, int(grid[1]) if grid else 0


def read(ptx: str, elements: float, trips: int) -> dict[str, Program]:
  """Reads the programs of a module, by name; a block encodes ``elements``."""
  report = _assemble(ptx)
  programs = {}
  for entry in re.split(r"(?=^\.visible \.entry )", ptx, flags=re.MULTILINE)[1:]:
    name = re.match(r"\.visible \.entry (\w+)", entry)
    threads = re.search(r"\.(?:req|max)ntid (\d+)", entry)
    assert name and threads, entry[:200]
    registers, spills = report[name[1]]
    loads: dict[int, int] = {}
    stores: dict[int, int] = {}
    counts: dict[str, int] = {}
    for line, times in _instructions(entry, trips):
      operation = line.split()[0]
      short = operation.split(".")[0]
      if short == "mov":  # ptxas leaves nearly all out
        continue
      counts[short] = counts.get(short, 0) + times
      if access := re.match(
        r"(ld|st)\.global\S*?(?:\.v(\d))?\.[bufs](\d+)$", operation
      ):
        found = loads if access[1] == "ld" else stores
        width = int(access[2] or 1) * int(access[3]) // 8
        found[width] = found.get(width, 0) + times
    programs[name[1]] = Program(
      int(threads[1]),
      elements,
      registers,
      spills,
      loads,
      stores,
      counts,
    )
  return programs


def _assemble(ptx: str) -> dict[str, tuple[int, int]]:
  """Assembles a module, and returns registers and spilled bytes of each program."""
  with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
    file.write(ptx)
    file.flush()
    command = [ptxas(), "-v", "-arch=sm_90a", "-o", "/dev/null", file.name]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
  found = re.findall(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill"
    r" loads.*?Used (\d+) registers",
    text,
    re.DOTALL,
  )
  return {n: (int(registers), int(a) + int(b)) for n, a, b, registers in found}


def _instructions(entry: str, trips: int) -> list[tuple[str, int]]:
  """Returns the instructions of a program, and how often each runs."""
  # Inline assembly has several in a line.
  texts = (line.partition("//")[0] for line in entry.splitlines())
  lines = [part.strip() for text in texts for part in re.findall(r"[^;]+;?", text)]
  labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
  times = [1] * len(lines)
  for i, line in enumerate(lines):
    target = re.search(r"\bbra(?:\.uni)?\s+(\S+);", line)
    if target and labels.get(target[1], i) < i:  # back: a loop over planes
      for k in range(labels[target[1]], i + 1):
        times[k] *= trips
  found = []
  for line, count in zip(lines, times, strict=True):
    line = re.sub(r"^@!?%p\d+\s+", "", line)
    if re.match(r"[a-z]", line) and line.endswith(";"):
      found.append((line.rstrip(";"), count))
  return found


def check(cases: list[str], dump: str) -> tuple[list[str], list[str]]:
  """Compiles cases, and returns lines of the table and lines on what is wrong."""
  from benchmarks.gpu.cases import CASES

  lines, wrong = [], []
  for name in cases:
    case = CASES[name]
    for implementation in case.implementations:
      for size in SIZES:
        title = f"{name}, {implementation}, {size:,}"
        modules, grid = compile_ptx(case, implementation, size, dump)
        # In Mosaic a block is a tile, and XLA's text does not say the grid.
        elements = case.codec.tile_size if implementation == "mosaic" else size / grid
        programs = [
          item for ptx in modules for item in read(ptx, elements, case.trips).items()
        ]
        # The others are XLA's own, for a last, partial tile.
        first, *others = case.kernels or (case.operation,)
        reads_gradient = (first, "mosaic")
        kernels = [
          (entry, program)
          for entry, program in programs
          if entry.startswith((*reads_gradient, *others))
        ]
        if not kernels:
          wrong.append(f"{title}: there is no kernel in it")
        for entry, program in kernels:
          if program.spills:
            wrong.append(f"{title}: {program.spills} bytes are spilled")
          if entry.startswith(reads_gradient) and not program.wide:
            wrong.append(f"{title}: loads of {program.loads} bytes")
          lines.append(_line(title, program))
          print(lines[-1], flush=True)
  return lines, wrong


def _line(title: str, program: Program) -> str:
  def by_width(accesses: dict[int, int]) -> str:
    return ", ".join(f"{n} of {width}" for width, n in sorted(accesses.items()))

  counts = program.counts
  cells = [
    title,
    program.threads,
    program.registers,
    program.spills,
    by_width(program.loads),
    by_width(program.stores),
    counts.get("shfl", 0) + counts.get("redux", 0),
    counts.get("bar", 0) + counts.get("barrier", 0),
    counts.get("div", 0),
    f"{program.per_element:.1f}",
  ]
  return f"| {' | '.join(map(str, cells))} |"


_HEAD = """\
# What the compilers make of the kernels, for sm_90a

`make ptx-check`, JAX {version}, {ptxas}. No GPU: these are properties of programs, not
times. Loads and stores of global memory are those of a thread, by bytes; instructions
are those of PTX, a loop's as often as it runs; a division counts as one.

| kernel | threads | registers | spilled bytes | loads | stores | shuffles | \
barriers | divisions | instructions an element |
|---|---|---|---|---|---|---|---|---|---|
"""


def main() -> None:
  parser = cli.parser(
    __doc__,
    quick="two cases",
    output="Markdown; default: benchmarks/results/gpu/ptx_check.md, if not --quick",
  )
  parser.add_argument("--cases", nargs="+", help="by default those that are timed")
  options = parser.parse_args()
  for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
    if not list(metadata.distributions(name=name)):
      cli.skip(f"there is no {name} here, which `make ptx-check` installs")
  version = subprocess.run([ptxas(), "--version"], capture_output=True, text=True)
  with tempfile.TemporaryDirectory() as dump:
    prepare(dump)
    import jax

    from benchmarks.gpu.cases import CASES

    quick = _QUICK if options.quick else []
    names = (
      options.cases or quick or [name for name, case in CASES.items() if case.timed]
    )
    if unknown := set(names) - set(CASES):
      parser.error(f"there are no such cases: {', '.join(sorted(unknown))}")
    lines, wrong = check(names, dump)
  release = re.search(r"release [\d.]+", version.stdout)
  head = _HEAD.format(
    version=jax.__version__, ptxas=f"ptxas {release[0] if release else ''}"
  )
  if output := options.output or (None if options.quick else RESULTS):
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(head + "\n".join(lines) + "\n")
  print(f"{len(lines)} programs, in {output or 'no file'}")
  if wrong:
    sys.exit("\n".join(["These are not as they should be:", *wrong]))


if __name__ == "__main__":
  main()
