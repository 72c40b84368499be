"""Times an update with residuals of 32, 16 and 8 bits, and reads what memory they take.

  python -m benchmarks.codecs.residual_storage [--size 4096] [--quick]
    [--output FILE.json]

The update of one square leaf on one device, without an exchange, whose state is
donated. Prints a line for each codec and storage: seconds, the ratio to a memory
copy of the gradient (see common/timing.py) and to the update with float32 residuals,
and in gradients what is kept between steps and what the program holds beyond arguments
and results. All run in turn. Writes JSON with --output.
"""

import json
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

import gradcomp
from benchmarks.common import cli, quiet, tables, timing
from gradcomp._src.core.residual_storage import Storage
from gradcomp.codecs import QSGD, OneBit

CODECS = {"QSGD, 4 bits, nearest": QSGD(bits=4, rounding="nearest"), "OneBit": OneBit()}


def update(codec: Any, stored: str, x: jax.Array) -> tuple[Callable[[], Any], Any]:
  """Returns what calls an update once, and what it takes in gradients."""
  feedback = gradcomp.ErrorFeedback(residual_dtype=stored)
  tx = gradcomp.compress(codec, feedback=feedback)
  state = tx.init(x)
  # The state comes first: JAX gives its memory to the first result of the same shape.
  step = lambda x, state: tx.update(x, state)[::-1]
  program = jax.jit(step, donate_argnums=1).lower(x, state).compile()
  kept = sum(leaf.nbytes for leaf in jax.tree.leaves(state.residual))
  temporary = program.memory_analysis().temp_size_in_bytes

  def call() -> Any:
    nonlocal state
    state, mean = program(x, state)
    return mean, state

  return call, {"kept": kept / x.nbytes, "temporary": temporary / x.nbytes}


def main() -> None:
  options = cli.options(
    __doc__,
    "a small leaf",
    "JSON file to write",
    size=cli.Option(4096, 256),
    repeats=cli.Option(11, 1),
  )
  quiet.keep(unless=options.quick)
  results: dict[str, Any] = {"machine": timing.machine()}
  print(json.dumps(results["machine"]))
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((options.size, options.size), np.float32))
  calls: dict[str, Any] = timing.copies(x.size)
  rows: dict[str, Any] = {}
  for name, codec in CODECS.items():
    for stored in get_args(Storage):
      row = f"{name}, {stored}"
      calls[row], rows[row] = update(codec, stored, x)
  seconds = timing.interleaved(calls, options.repeats)
  for row, facts in rows.items():
    plain = seconds[f"{row.rpartition(', ')[0]}, float32"]
    facts |= {
      "seconds": seconds[row],
      "copies": seconds[row] / seconds["copy"],
      "of float32": seconds[row] / plain,
    }
  tables.show(rows)
  results |= {"seconds": seconds, "updates": rows}
  cli.write_json(options.output, results)


if __name__ == "__main__":
  main()
