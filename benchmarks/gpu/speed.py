"""Times every encoder's kernel on a GPU, as a share of a device copy's speed.

  python -m benchmarks.gpu.speed

Counts the fewest bytes that a kernel can move: it reads its operands once, and writes
its results once. A copy reads and writes the gradient. "whole" is the codec's encode
from the gradient alone. Where that has to find a scale for the tensor first, it reads
the gradient once more, and these bytes are counted, too.

Every call reads another of several gradients, which are so many that the cache does not
hold them. A round sends off many calls one after the other, and divides the time by
their number. A time is the median of several rounds, in which all implementations and
the copy take turns. Where it is nearly the time of an empty program, the table says so:
the GPU waits for the host there.

Writes benchmarks/results/gpu/gpu_kernels.json and .md after each size, and stops after
--seconds with the results it has. Leaves out the cases that gpu/check.py found wrong
(--checked).
"""

import concurrent.futures
import dataclasses
import datetime
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import cli, quiet, tables
from benchmarks.gpu.cases import CASES, KEY, Case, Kernels
from gradcomp._src.kernels.gpu.dispatch import Implementation

RESULTS = cli.RESULTS / "gpu" / "gpu_kernels.json"
_SIZES = [2**26, 2**28, 2**24, 2**22]  # the most important first
_CACHED = 2**28  # bytes of gradients, several times any GPU's cache
_ROUND = 0.02  # seconds, about
_ROUNDS = 7
_COMPILERS = 8  # threads

_QUICK = ["qsgd 4 bit nearest", "eight_bit linear, nearest"]

Call = Callable[[jax.Array], Any]  # runs a program on a gradient
Program = tuple[dict[str, Any], Call]  # with its entry in the results


def compiled(
  case: Case, implementation: Implementation, x: jax.Array, whole: bool = False
) -> Program:
  """Compiles a kernel, or its codec's whole encoder, for gradients like ``x``."""
  row: dict[str, Any] = {"case": case.name + " whole" * whole}
  row["implementation"] = implementation
  operands: tuple[jax.Array, ...] = ()
  if whole:
    codec = dataclasses.replace(case.codec, implementation=implementation)
    key = jnp.asarray(KEY) if codec.needs_key else None
    function = lambda x: tuple(a for a in codec.encode(x, key=key) if a is not None)
  else:
    function = case.function(implementation)
    operands = jax.jit(lambda x: case.operands(case.codec, x))(x)
  start = time.perf_counter()
  program = jax.jit(function).lower(x, *operands).compile()
  row |= {"elements": x.size, "compile_seconds": time.perf_counter() - start}
  outputs = jax.tree.leaves(jax.eval_shape(function, x, *operands))
  moved = [x] * (1 + whole) + [*operands, *outputs]
  row["floor_bytes"] = sum(math.prod(a.shape) * a.dtype.itemsize for a in moved)
  return row, lambda x: program(x, *operands)


def gradients_like(size: int) -> list[jax.Array]:
  """Makes so many different gradients that the GPU's cache does not hold them."""
  count = max(3, -(-_CACHED // (4 * size))) if jax.default_backend() == "gpu" else 3
  make = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), (size,)))
  return [make(seed) for seed in range(count)]


def times(calls: dict[str, Call], xs: list[jax.Array], rounds: int) -> dict[str, float]:
  """Returns the median seconds of one call of each."""
  counts, found = {}, {}
  for name, call in calls.items():
    jax.block_until_ready([call(xs[0]), call(xs[-1])])
    once = _seconds(call, xs, 3)
    counts[name], found[name] = int(min(max(_ROUND / once, 5), 200)), []
  for _ in range(rounds):
    for name, call in calls.items():
      found[name].append(_seconds(call, xs, counts[name]))
  return {name: statistics.median(seconds) for name, seconds in found.items()}


def _seconds(call: Call, xs: list[jax.Array], count: int) -> float:
  start = time.perf_counter()
  for number in range(count):
    last = call(xs[number % len(xs)])
  jax.block_until_ready(last)
  return (time.perf_counter() - start) / count


def measure(programs: list[Program], xs: list[jax.Array], rounds: int) -> list[Any]:
  """Times programs that encode the same gradients, each beside the copy."""
  nothing, tiny = jax.jit(lambda x: x + 1), jnp.zeros(8)
  calls: dict[str, Call] = {"copy": jax.jit(jnp.copy)}
  calls["nothing"] = lambda x: nothing(tiny)
  calls |= {str(number): call for number, (_, call) in enumerate(programs)}
  rows, seconds = [], times(calls, xs, rounds)
  copied = 2 * xs[0].nbytes / seconds["copy"]
  for number, (row, _) in enumerate(programs):
    taken = seconds[str(number)]
    rate = row["floor_bytes"] / taken
    found = {
      "seconds": taken,
      "bytes_per_second": rate,
      "copy_bytes_per_second": copied,
      "share_of_copy": rate / copied,
      "launch_bound": taken < 1.5 * seconds["nothing"],
    }
    rows.append(row | found)
    print(*_cells(rows[-1]), sep=", ", flush=True)
  return rows


def _cells(row: dict[str, Any]) -> list[str]:
  """Returns the cells of the table of a row."""
  return [
    *(row["case"], f"{row['elements']:,}", row["implementation"]),
    f"{1e6 * row['seconds']:.1f}",
    f"{row['bytes_per_second'] / 1e9:.0f}",
    f"{row['share_of_copy']:.1%}{'*' * row['launch_bound']}",
  ]


def run_size(
  cases: list[Case], kernels: Kernels, size: int, rounds: int, end: float
) -> tuple[list[Any], list[str]]:
  """Times all cases at one size, and lists those that did not run."""
  xs = gradients_like(size)
  rows, missing = [], []

  def in_time(make: Callable[..., Any], *args: Any) -> Any:
    if time.monotonic() > end:
      raise TimeoutError("no time was left")
    return make(*args)

  jobs: dict[Any, dict[str, Any]] = {}
  # All is compiled before anything is timed: the threads take the processors that send
  # programs off, and XLA tries forms of them on the GPU.
  with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as pool:
    for case in cases:
      names: list[Implementation] = [*(kernels or case.implementations), "xla"]
      for whole in (False, True) if _reads_twice(case) else (False,):
        job = lambda *given: pool.submit(in_time, compiled, *given)
        jobs[case.name, whole] = {n: job(case, n, xs[0], whole) for n in names}
  for (name, whole), futures in jobs.items():
    title = f"{name}{' whole' * whole}, {size:,}"
    programs = []
    for implementation, future in futures.items():
      try:
        programs.append(future.result())
      except Exception as error:
        missing.append(f"{title}, {implementation}: {error}"[:500])
    try:
      rows += in_time(lambda: measure(programs, xs, rounds) if programs else [])  # noqa: B023
    except Exception as error:
      missing.append(f"{title}: {error}"[:500])
  return rows, missing


def _reads_twice(case: Case) -> bool:
  """Returns whether a codec reads the tensor first, to find a kernel's operands."""
  if getattr(case.codec, "_scales_inside", case.operation == "one_bit"):
    return False
  _, *operands = case.structs(case.codec.tile_size)
  return len(operands) > bool(case.codec.needs_key)


def write(path: pathlib.Path, rows: list[Any], missing: list[str]) -> None:
  """Writes the results as JSON, and as a table beside it."""
  found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
  today = datetime.date.today().isoformat()
  found |= {"date": today, "rows": rows, "missing": missing}
  cli.write_json(path, found)
  header = ["case", "elements", "implementation", "time, us", "GB/s", "share of a copy"]
  ordered = sorted(rows, key=lambda row: (row["case"], row["elements"]))
  given = {"table": tables.table(header, list(map(_cells, ordered)))}
  given["missing"] = "\n".join(f"Not measured: {line}" for line in missing)
  page = tables.page(__file__, "speed", **found | given)
  path.with_suffix(".md").write_text(page.rstrip() + "\n")


def main(arguments: list[str] | None = None) -> None:
  quick = "one size and four cases, two of them where interpreted"
  parser = cli.parser(__doc__, quick, RESULTS)
  timed = [name for name, case in CASES.items() if case.timed]
  parser.add_argument("--sizes", type=int, nargs="+", default=_SIZES)
  parser.add_argument("--cases", nargs="+", choices=CASES, default=timed)
  parser.add_argument("--seconds", type=float, default=math.inf, help="for all of it")
  parser.add_argument("--interpret", action="store_true", help="try without a GPU")
  parser.add_argument("--checked", type=pathlib.Path, help="what gpu/check.py wrote")
  options = parser.parse_args(arguments)
  if jax.default_backend() != "gpu" and not options.interpret:
    cli.skip("there is no GPU here; --interpret tries the script without one")
  quiet.keep(unless=options.quick or options.interpret)
  end = time.monotonic() + options.seconds
  output = options.output
  if options.quick:
    options.sizes, options.cases = options.sizes[:1], options.cases[1:5]
    if options.interpret:
      options.sizes, options.cases = [8192], _QUICK
      cli.compile_fast()
  elif not options.interpret:
    output = output or RESULTS
  right = options.cases
  if options.checked and options.checked.exists():
    right = json.loads(options.checked.read_text())["right"]
  wrong = [name for name in options.cases if name not in right]
  missing = [f"{name}: it was not found right" for name in wrong]
  cases = [CASES[name] for name in options.cases if name in right]
  rounds, rows = 1 if options.interpret else _ROUNDS, []
  kernels: Kernels = ("pallas_interpret",) if options.interpret else None
  for size in options.sizes:
    found, left = run_size(cases, kernels, size, rounds, end)
    rows, missing = rows + found, missing + left
    if output:
      write(output, rows, missing)
  print(*(f"not measured: {line}" for line in missing), sep="\n")


if __name__ == "__main__":
  main()
