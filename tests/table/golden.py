"""Writes the hashes of ``rows.txt`` anew, for changes that mean to change bits.

``python -m tests.table.golden`` runs every row. From the first release on, such a
change raises ``gradcomp._src.version.WIRE``, which the file keeps.
"""

import concurrent.futures
import multiprocessing
import os

import jax

from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp._src.version import WIRE
from tests.plugins import selected
from tests.table import laws, run


def hashed(row: run.Row) -> tuple[str, str]:
  try:
    return row.anywhere, laws.digest(run.run(row))
  finally:
    jax.clear_caches()


def main() -> None:
  os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # of the processes that are started here
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = " ".join(selected.IN_LEAST_TIME)
  _, lines = run.read()
  kept = {
    line.row.anywhere: line.row
    for line in lines
    # Last bits of its products are the processor's.
    if not isinstance(line.row.codec, PowerSGD)
  }
  spawned = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(2, spawned) as pool:
    hashes = dict(pool.map(hashed, kept.values(), chunksize=8))
  written = lambda line: line._replace(hash=hashes.get(line.row.anywhere, "-"))
  run.write(WIRE, map(written, lines))
  print(f"wrote {len(hashes)} hashes to {run.ROWS}")


if __name__ == "__main__":
  main()
