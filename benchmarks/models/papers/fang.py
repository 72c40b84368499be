"""Fang's numbers, recomputed: see models/compare.py."""

from benchmarks.models.papers.number import Number, Paper
from gradcomp._src.cost.papers import fang
from gradcomp.cost import Link

WORKERS = (2, 4, 8, 16, 32, 64, 128)
ELEMENTS = 25.557e6  # of ResNet-50
DENSITY = 0.001
LINK = Link(latency=50e-6, bytes_per_second=125e6)
SPEEDS = fang.Speeds(select=0.6e-9, scatter=1e-9, add=0.2e-9)  # of a GPU, assumed
ENTRIES = {
  "index and value, 8 bytes": fang.INDEX_AND_VALUE,
  "ASQ, 4 bytes": fang.INDEX_ALONE,
  "gradcomp, 6 bytes": fang.PACKED,
  "gradcomp with ASQ, 2 bytes": fang.PACKED_ALONE,
}


def numbers() -> list[Number]:
  """Recomputes sections 2.3 and 2.5, and the order of gains in 3.3."""
  paper = Paper("Fang")
  for name, entry_bytes in ENTRIES.items():
    ours = 100 * fang.bandwidth_ratio(DENSITY, 128, entry_bytes=entry_bytes)
    what, inputs = "bytes over dense (%)", f"p = 128, D = 0.1 %, {name}"
    if entry_bytes == 8:
      why = "the same product"
      paper.agrees(what, inputs, ours, 12.8, 1e-9, why)
    elif entry_bytes == fang.INDEX_ALONE:
      why = (
        "the paper draws 12.8 from equation 1, which it says is of quantised entries"
      )
      paper.wrong(what, inputs, ours, 12.8, why)
    else:
      paper.ours(what, inputs, ours)
  ours = 100 * fang.bandwidth_ratio(0.015625, 64)
  inputs = "p = 64, D = 1.5625 %"
  paper.agrees(what, f"{inputs}, 8 bytes", ours, 100, 1e-9, "the same product")
  ours = 100 * fang.bandwidth_ratio(0.015625, 64, entry_bytes=4)
  why = 'the paper says "for quantized RedSync", whose entries have 4 bytes'
  paper.wrong(what, f"{inputs}, ASQ, 4 bytes", ours, 100, why)
  why = "the workers' choices overlap a little more than free ones"
  ours = 100 * fang.union_density(DENSITY, 16)
  paper.agrees("union of 16 workers (%)", "D = 0.1 %", ours, 1.55, 0.03, why)
  for name, entry_bytes in ENTRIES.items():
    ours = fang.crossover_workers(DENSITY, entry_bytes=entry_bytes)
    paper.ours("workers at which bytes are equal", f"D = 0.1 %, {name}", ours)
  for workers in WORKERS:
    for entry_bytes in (8, 4):
      inputs = f"25.557 M, {workers} workers, 1 Gbit/s, {entry_bytes} bytes"
      paper.ours("dense over sparse seconds", inputs, gain(workers, entry_bytes))
  for density in fang.WARM_UP:
    ours = fang.bandwidth_ratio(density, 64)
    inputs = f"D = {density:.4%}, p = 64, 8 bytes"
    why = "dense instead" if ours >= 1 else "sparse"
    paper.ours("warm-up, bytes over dense", inputs, ours, why)
  for name, model in fang.MODELS.items():
    ours = model.megabytes / model.gigaflops
    why = "counts two operations a multiply-add" if "50" in name else ""
    paper.ours("table 1, MB a Gflop", name, ours, why)
  return paper.numbers


def gain(workers: int, entry_bytes: float) -> float:
  """Returns the dense seconds over the sparse ones, at 1 Gbit/s."""
  dense = fang.dense_seconds(ELEMENTS, workers, LINK, SPEEDS)
  sparse = fang.sparse_seconds(
    ELEMENTS, DENSITY, workers, LINK, SPEEDS, entry_bytes=entry_bytes
  )
  return dense / sparse
