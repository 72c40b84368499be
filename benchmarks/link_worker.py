"""Times exchanges on one host, as a process with one device and gloo to the others.

  python link_worker.py '{"rank": 0, ...}'    link_speed.py starts it

The gradient is donated, and its mean comes back in its place, as in a train step. The
hosts meet in a tiny psum before each timed call and after it. So no host has anything
left to send when the interface's counter is read.
"""

import json
import os
import pathlib
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import jax
import link_codecs
import link_steps
import links
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from link_steps import Timed

import gradcomp


def spread(mesh: jax.sharding.Mesh, local: np.ndarray) -> jax.Array:
  """Makes the global array whose part on this host is ``local``."""
  sharding = jax.NamedSharding(mesh, P("data"))
  return jax.make_array_from_process_local_data(sharding, local)


def measure(
  programs: dict[str, Timed], repeats: int, meet: Callable[[], Any], interface: str
) -> dict[str, dict[str, Any]]:
  """Times all programs in turn, after a first call that is not timed.

  Lists in the results have an entry for each repeat.
  """
  results: dict[str, dict[str, Any]] = {
    name: {
      "seconds": [],
      "cpu_seconds": [],
      "sent": [],
      "arithmetic": timed.arithmetic,
      "wire_report": gradcomp.wire_report(timed.program).bytes_sent,
    }
    for name, timed in programs.items()
  }
  mean = None
  for repeat in range(repeats + 1):
    for name, timed in programs.items():
      arguments = jax.block_until_ready(timed.arguments())
      meet()
      sent = links.bytes_sent(interface)
      cpu, start = time.process_time(), time.perf_counter()
      outputs = jax.block_until_ready(timed.program(*arguments))
      seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
      meet()
      sent = links.bytes_sent(interface) - sent
      timed.keep(outputs)
      if repeat:
        results[name]["seconds"].append(seconds)
        results[name]["cpu_seconds"].append(cpu)
        results[name]["sent"].append(sent)
      elif isinstance(outputs, tuple):  # a step's: the mean and the state
        leaves = [np.ravel(leaf.addressable_data(0)) for leaf in outputs[0]]
        result = np.concatenate(leaves)
        mean = result if mean is None else mean
        error = np.linalg.norm(result - mean) / np.linalg.norm(mean)
        results[name] |= {"error": float(error), "crc32": zlib.crc32(result)}
      del arguments, outputs
  return results


def main(options: dict[str, Any]) -> None:
  rank, ends = options["rank"], options["ends"]
  jax.distributed.initialize(
    options["coordinator"],
    len(ends),
    rank,
    initialization_timeout=60,
    heartbeat_timeout_seconds=20,
    shutdown_timeout_seconds=20,
  )
  mesh = jax.make_mesh((len(ends),), ("data",))
  rng = np.random.default_rng(rank)
  shapes = [tuple(shape) for shape in options["shapes"]]
  grads = [spread(mesh, rng.standard_normal(shape, np.float32)) for shape in shapes]
  total = jax.shard_map(
    lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
  )
  one = spread(mesh, np.ones(1, np.float32))
  tiny = jax.jit(total).lower(one).compile()
  programs: dict[str, Timed] = {}
  compiling: dict[str, float] = {}
  start = time.perf_counter()
  for name, timed in link_steps.steps(mesh, grads, options["steps"]):
    programs[name] = timed
    compiling[name] = -start + (start := time.perf_counter())
  count = len(programs)
  if "qsgd-4 two_shot" in programs and len(set(shapes)) == 1:
    programs |= link_steps.parts(mesh, grads, link_codecs.IN_PARTS)
  if "aps-8 ring" in programs:
    programs |= link_steps.exponents(mesh, grads)
  meet = lambda: jax.block_until_ready(tiny(one))
  results = measure(programs, options["repeats"], meet, options["interface"])
  report = {
    "compiling": compiling,
    "steps": dict(list(results.items())[:count]),
    "parts": dict(list(results.items())[count:]),
  }
  pathlib.Path(options["output"]).write_text(json.dumps(report))
  jax.distributed.shutdown()


if __name__ == "__main__":
  try:
    main(json.loads(sys.argv[1]))
  except BaseException:
    traceback.print_exc()
    os._exit(1)  # leaving normally would wait for the others, and they for us
