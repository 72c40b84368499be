"""A process of one host with one device, gloo to the others, and its report.

  python -m benchmarks.links.process '{"case": "layers", ...}'     launch.py starts it

The case is a module of this folder, whose ``report`` makes what the record is made of.
The hosts meet in a tiny psum before each timed call and after it. So no host has
anything left to send when the interface's counter is read.
"""

import dataclasses
import importlib
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import gradcomp
from benchmarks.links import hosts


@dataclasses.dataclass(frozen=True)
class Timed:
  """A program on all hosts, and its arguments."""

  program: Any
  arguments: Callable[[], tuple[Any, ...]]  # new ones each time if they are donated
  keep: Callable[[Any], None] = lambda outputs: None  # for the next call
  averages: bool = False  # whether it returns a mean, and then what is kept
  updates: bool = False  # an optimizer's, which is no mean of gradients


def spread(mesh: jax.sharding.Mesh, local: np.ndarray) -> jax.Array:
  """Makes the global array whose part on this host is ``local``."""
  sharding = jax.NamedSharding(mesh, jax.P("data"))
  return jax.make_array_from_process_local_data(sharding, local)


def measure(
  mesh: jax.sharding.Mesh, programs: dict[str, Timed], options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
  """Times all programs in turn, ``repeats`` times after a first call."""
  meet, mean = meeting(mesh), None
  run = lambda timed, arguments: jax.block_until_ready(timed.program(*arguments))
  results: dict[str, dict[str, Any]] = {
    name: {"wire_report": gradcomp.wire_report(timed.program).bytes_sent}
    for name, timed in programs.items()
  }
  for repeat in range(options["repeats"] + 1):
    for name, timed in programs.items():
      arguments = jax.block_until_ready(timed.arguments())
      outputs, took = hosts.timed(options["interface"], meet, run, timed, arguments)
      timed.keep(outputs)
      for kind, amount in took.items() if repeat else ():
        results[name].setdefault(kind, []).append(amount)
      if timed.averages and not repeat:
        result = np.concatenate([np.ravel(x.addressable_data(0)) for x in outputs[0]])
        mean = result if mean is None else mean
        error = float(np.linalg.norm(result - mean) / np.linalg.norm(mean))
        results[name] |= {"error": error, "crc32": zlib.crc32(result)}
        results[name] |= {"error": None} if timed.updates else {}
      del arguments, outputs
  return results


def meeting(mesh: jax.sharding.Mesh) -> Callable[[], Any]:
  """Returns a function that returns when all hosts have called it."""
  specs = {"in_specs": jax.P("data"), "out_specs": jax.P()}
  total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, **specs)
  one = spread(mesh, np.ones(mesh.local_mesh.size, np.float32))
  tiny = jax.jit(total).lower(one).compile()
  return lambda: jax.block_until_ready(tiny(one))


def main(options: dict[str, Any]) -> Any:
  """Meets the other hosts, and returns a case's report on the mesh of all of them."""
  case, count = f"benchmarks.links.{options['case']}", len(options["ends"])
  given = options["coordinator"], count, options["rank"]
  limits = {"heartbeat_timeout_seconds": 20, "shutdown_timeout_seconds": 20}
  jax.distributed.initialize(*given, initialization_timeout=60, **limits)
  mesh = jax.make_mesh((count,), ("data",))
  report = importlib.import_module(case).report(mesh, options)
  jax.distributed.shutdown()
  return report


if __name__ == "__main__":
  hosts.report(main)
