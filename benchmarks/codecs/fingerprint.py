"""Times the fingerprint of a tree against a memory copy of its bytes.

  python -m benchmarks.codecs.fingerprint [--elements 16777216] [--quick]
    [--output FILE.json]

Prints a line for each tree: seconds, the ratio to a memory copy of as many bytes
(see common/timing.py), the seconds that it takes to trace and compile, and the
temporary memory of the compiled program. All run in turn. Writes JSON with --output.
"""

import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradcomp
from benchmarks.common import cli, quiet, tables, timing

_COLUMNS = 1024
_LEAVES = 300


def trees(elements: int) -> dict[str, Any]:
  """Returns trees of so many elements each."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((elements // _COLUMNS, _COLUMNS), np.float32)
  rows = max(1, x.shape[0] // _LEAVES)
  return {
    "float32, one leaf": x,
    "float32, one leaf of one axis": x.reshape(-1),
    f"float32, {_LEAVES} leaves": [x[i : i + rows] for i in range(0, len(x), rows)],
    "bfloat16, one leaf": x.astype(jnp.bfloat16),
  }


def main() -> None:
  options = cli.options(
    __doc__,
    "few elements",
    "JSON file to write",
    elements=cli.Option(2**24, 2**16),
    repeats=cli.Option(11, 1),
  )
  quiet.keep(unless=options.quick)
  results: dict[str, Any] = {"machine": timing.machine()}
  print(json.dumps(results["machine"]))
  calls: dict[str, Any] = timing.copies(options.elements)
  facts: dict[str, Any] = {}
  for name, tree in trees(options.elements).items():
    tree = jax.tree.map(jnp.asarray, tree)
    start = time.perf_counter()
    program = jax.jit(gradcomp.telemetry.fingerprint).lower(tree).compile()
    facts[name] = {
      "bytes": sum(x.nbytes for x in jax.tree.leaves(tree)),
      "compile seconds": time.perf_counter() - start,
      "temporary bytes": program.memory_analysis().temp_size_in_bytes,
    }
    calls[name] = lambda program=program, tree=tree: program(tree)
  seconds = timing.interleaved(calls, options.repeats)
  copied = seconds["copy"] / (4 * options.elements)  # seconds a byte
  for name, fact in facts.items():
    fact |= {"seconds": seconds[name], "copies": seconds[name] / fact["bytes"] / copied}
  tables.show(facts)
  results |= {"seconds": seconds, "trees": facts}
  cli.write_json(options.output, results)


if __name__ == "__main__":
  main()
