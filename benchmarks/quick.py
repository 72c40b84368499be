"""Runs every benchmark with --quick, two at a time.

  make bench-quick     or     python -m benchmarks.quick [--runs 'links speed' ...]

``--share K N`` runs the K-th of N shares, from 0.

Prints a line for each: ok, skipped and what this machine lacks for it, or FAILED and
why, below what it printed last. The last line says how many of each there were. The
exit status is 1 where one failed. Results go to a folder that is removed at the end. A
script that writes nothing there fails, and so does the whole if one wrote to
benchmarks/results. Nobody reads the times of quick runs: they may disturb each other.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.common import cli

ROOT = cli.ROOT
RUNS = (
  "study run, codecs.speed, codecs.growth, compilers, models.fit_links, "
  "links.front_picture, gpu.check, gpu.check --interpret, gpu.speed, gpu.speed "
  "--interpret, links speed, links speed --loopback, codecs.memory, "
  "codecs.distortion, models.compare, compilers.model_axes, links layers, links "
  "layers --loopback, models.predicted_steps, links activations, links activations "
  "--loopback, models.package_accuracy, models.package_speeds, links local, gpu.ptx"
).split(", ")
_AT_ONCE = 2
_LIMIT = 600  # seconds, after which a script has failed
_LAST = 40  # lines that a script printed


def run(line: str, output: pathlib.Path) -> tuple[str, str]:
  """Runs a script with its options, which writes to ``output``: its end, and a text."""
  start = time.monotonic()

  def ended(verdict: str, reason: str = "", *printed: str) -> tuple[str, str]:
    said = f"{verdict}: {line}, {time.monotonic() - start:.0f} s"
    return verdict, "\n".join([*printed, f"{said}: {reason}" if reason else said])

  name, *options = line.split()
  # The others emulate devices on the CPU.
  own = {} if name.startswith("gpu.") else {"JAX_PLATFORMS": "cpu"}
  # Python looks for the module in the folder.
  where: Any = {"cwd": ROOT, "env": os.environ | own, "stdin": subprocess.DEVNULL}
  where |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
  options += ["--quick", "--output", str(output)]
  command = cli.module(f"benchmarks.{name}", *options)
  try:
    done = subprocess.run(command, text=True, timeout=_LIMIT, **where)
  except subprocess.TimeoutExpired:
    return ended("FAILED", f"it was not done after {_LIMIT} s")
  lines = done.stdout.splitlines()
  if done.returncode == cli.SKIPPED:
    return ended("skipped", lines[-1].removeprefix("skipped: "))
  if done.returncode:
    return ended("FAILED", (lines or [""])[-1], *lines[-_LAST:])
  if not output.exists():
    return ended("FAILED", "it wrote nothing to --output")
  return ended("ok")


def _kept() -> set[tuple[str, int]]:
  """Returns the results in benchmarks/results, and when each was written."""
  paths = ROOT.glob("benchmarks/results/**/*")
  return {(path.name, path.stat().st_mtime_ns) for path in paths}


def main(arguments: list[str] | None = None) -> None:
  parser = cli.parser(__doc__)
  parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
  parser.add_argument("--share", nargs=2, type=int, default=(0, 1), metavar=("K", "N"))
  options = parser.parse_args(arguments)
  first, step = options.share
  runs = options.runs[first::step]
  start = time.monotonic()
  verdicts, kept = [], _kept()
  with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
    outputs = [pathlib.Path(folder, line.replace(" ", "")) for line in runs]
    for verdict, said in pool.map(run, runs, outputs):
      print(said, flush=True)
      verdicts.append(verdict)
  for name, _ in sorted(_kept() - kept):
    print(f"FAILED: a script wrote {name} to benchmarks/results")
    verdicts.append("FAILED")
  counts = [f"{verdicts.count(name)} {name}" for name in ("ok", "skipped", "FAILED")]
  print(f"quick: {', '.join(counts)}, {time.monotonic() - start:.0f} s")
  sys.exit("FAILED" in verdicts)


if __name__ == "__main__":
  main()
