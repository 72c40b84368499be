"""Writes which kernels serve on this kind of GPU, by what check.py and speed.py found.

  python -m benchmarks.gpu.served     at the end of     make gpu-check

A kernel serves where all of its cases in gpu_check.json are right, and from the size of
gpu_kernels.json on, from which it is no slower than XLA's code in each case that was
timed; from no elements on, if that is the smallest. Adds the device to
kernels/gpu/table.json.
"""

import functools
import json
import operator
import sys
from typing import Any
from unittest import mock

import jax

from benchmarks.common import cli
from benchmarks.gpu import check, speed
from benchmarks.gpu.cases import CASES
from gradcomp._src.kernels.gpu import dispatch

TABLE = cli.ROOT / "kernels" / "gpu" / "table.json"


@functools.cache
def kernels(name: str) -> set[str]:
  """Returns the names by which a case asks the table for kernels."""
  case = CASES[name]
  with mock.patch.object(dispatch, "run", wraps=dispatch.run) as run:
    jax.eval_shape(case.function(None), *case.structs(case.sizes()[-1]))
  operations = [call.args[:3] for call in run.call_args_list]
  return {name for name, _, of in operations if not isinstance(of["cuda"], str)}


def lines(checked: Any, timed: Any) -> dict[str, Any]:
  """Returns the lines of a device's table, by what the two scripts have written."""
  key = operator.itemgetter("case", "implementation", "elements")
  seconds = {key(row): row["seconds"] for row in timed["rows"]}
  sizes = sorted({size for *_, size in seconds})
  wrong, first = set[str](), dict[str, int]()
  for case in CASES:
    of_case = lambda x, case=case: [seconds.get((case, x, size)) for size in sizes]
    times = [*zip(of_case("pallas"), of_case("xla"), strict=True)]
    for kernel in kernels(case):
      if case not in checked["right"]:
        wrong.add(kernel)
      if None not in sum(times, ()):
        slower = [n for n, (own, xla) in enumerate(times, 1) if own > xla]
        first[kernel] = max(first.get(kernel, 0), *slower, 0)
  least = [0, *sizes[1:]]
  serve = {x: n for x, n in sorted(first.items()) if x not in wrong and n < len(least)}
  return {
    "record": f"benchmarks/results/gpu, JAX {timed['jax']}, {timed['date']}",
    "least": {kernel: least[number] for kernel, number in serve.items()},
  }


def main() -> None:
  checked, timed = (json.loads(x.RESULTS.read_text()) for x in (check, speed))
  if checked["device"] != timed["device"]:
    sys.exit("the records are of two devices: nothing is written")
  found = json.loads(TABLE.read_text()) | {timed["device"]: lines(checked, timed)}
  cli.write_json(TABLE, found)


if __name__ == "__main__":
  main()
