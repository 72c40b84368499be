"""Times exchanges on one host, as a process with one device and gloo to the others.

  python -m benchmarks.links.worker '{"rank": 0, ...}'    links/speed.py starts it

The gradient is donated, and its mean comes back in its place, as in a train step. The
hosts meet in a tiny psum before each timed call and after it. So no host has anything
left to send when the interface's counter is read.
"""

import time
from typing import Any

import numpy as np

from benchmarks.links import methods, process, steps
from benchmarks.links.steps import Timed


def main(options: dict[str, Any]) -> dict[str, Any]:
  mesh = process.joined(options)
  rng = np.random.default_rng(options["rank"])
  shapes = [tuple(shape) for shape in options["shapes"]]
  grads = [
    process.spread(mesh, rng.standard_normal(shape, np.float32)) for shape in shapes
  ]
  meet = process.meeting(mesh)
  programs: dict[str, Timed] = {}
  compiling: dict[str, float] = {}
  start = time.perf_counter()
  for name, timed in steps.steps(mesh, grads, options["steps"]):
    programs[name] = timed
    compiling[name] = -start + (start := time.perf_counter())
  count = len(programs)
  if "qsgd-4 two_shot" in programs and len(set(shapes)) == 1:
    programs |= steps.parts(mesh, grads, methods.IN_PARTS)
  if "aps-8 ring" in programs:
    programs |= steps.exponents(mesh, grads)
  results = process.measure(programs, options["repeats"], meet, options["interface"])
  return {
    "compiling": compiling,
    "steps": dict(list(results.items())[:count]),
    "parts": dict(list(results.items())[count:]),
  }


if __name__ == "__main__":
  process.run(main)
