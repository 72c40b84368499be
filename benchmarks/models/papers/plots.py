"""A plot for each paper: see models/compare.py."""

import pathlib
from typing import Any

from benchmarks.models.papers import dettmers as dettmers_numbers
from benchmarks.models.papers import fang as fang_numbers
from benchmarks.models.papers import grubic as grubic_numbers
from benchmarks.models.papers import wen as wen_numbers
from gradcomp._src.cost.papers import grubic, han

_BLUE, _RED, _GREY, _GREEN = "#2f6db3", "#c0453a", "#8a8a8a", "#3b8a4f"


def draw(folder: pathlib.Path) -> None:
  """Draws all plots, ``paper_NAME.png``."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  look = {"layout": "constrained"}
  shapes: dict[str, tuple[Any, tuple[int, int], tuple[float, float]]] = {
    "dettmers": (_dettmers, (1, 2), (10, 4.2)),
    "wen": (_wen, (1, 2), (10, 4.2)),
    "fang": (_fang, (1, 2), (10, 4.2)),
    "grubic": (_grubic, (1, 3), (13, 4.4)),
    "han": (_han, (1, 1), (6.4, 4.2)),
  }
  for name, (panels, grid, size) in shapes.items():
    figure, axes = plt.subplots(*grid, figsize=size, squeeze=False, **look)
    figure.suptitle(panels(axes[0]), fontsize=12)
    for axis in axes[0]:
      axis.grid(alpha=0.3)
      axis.set_axisbelow(True)
    path = folder / f"paper_{name}.png"
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def _dettmers(axes: Any) -> str:
  """Draws the speed-up over sub-batches, with the paper's penalty and with another."""
  batches = dettmers_numbers.BATCHES
  lines = (
    ("32 bits", 32, "table", _GREY, "o-"),
    ("8 bits, sizes as printed (1/8)", 8, "table", _RED, "s--"),
    ("8 bits, right sizes (1/4)", 8, "derived", _BLUE, "o-"),
  )
  titles = ("the paper's penalty, 31 times", "a penalty a pass")
  for axis, penalty, title in zip(axes, ("nodes", "passes"), titles, strict=True):
    for label, bits, sizes, color, style in lines:
      if penalty == "passes" and bits == 32:
        sizes = "derived"
      values = [
        dettmers_numbers.speedup(batch, bits, sizes, penalty) for batch in batches
      ]
      axis.plot(batches, values, style, color=color, label=label)
    axis.set(xscale="log", xlabel="sub-batch (images)", title=title, ylim=(0, 80))
    axis.set_xticks(batches, batches)
    axis.minorticks_off()
  for bits, label in ((32, "printed, table 7"), (8, None)):
    printed = dettmers_numbers.TABLE_7["NervanaGPU", bits]
    axes[0].plot(batches, printed, "k+", ms=10, label=label)
  axes[0].set_ylabel("speed-up over one GPU")
  axes[0].legend(fontsize=9, loc="upper right")
  return "Dettmers: AlexNet on 96 GPUs in 32 nodes"


def _wen(axes: Any) -> str:
  """Draws TernGrad's gain over machines, on both clusters of figure 5."""
  machines = wen_numbers.MACHINES
  colors = (_BLUE, _GREEN, _RED)
  printed = ((2, 3.04, "AlexNet 3.04", _BLUE), (128, 2.0, "VGG-A 2", _RED))
  for axis, cluster, mark in zip(axes, wen_numbers.CLUSTERS, printed, strict=True):
    for network, color in zip(wen_numbers.MODELS, colors, strict=True):
      gains = [wen_numbers.estimated_gain(network, cluster, j) for j in machines]
      axis.plot(machines, gains, "o-", color=color, label=network)
    x, y, label, color = mark
    axis.plot(x, y, "*", color=color, ms=15, mec="k", label=f"printed: {label}")
    axis.set(xscale="log", xlabel="machines of 4 GPUs", title=cluster)
    axis.set_xticks(machines, machines)
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=9)
  axes[0].set_ylabel("speed-up by TernGrad, weak scaling")
  return "Wen: estimated profiles, since the paper prints none"


def _fang(axes: Any) -> str:
  """Draws the gain over workers, and the bytes over those of a dense exchange."""
  workers = fang_numbers.WORKERS
  styles = ((8, "index and value, 8 bytes", _BLUE), (4, "ASQ, 4 bytes", _RED))
  for entry_bytes, label, color in styles:
    gains = [fang_numbers.gain(p, entry_bytes) for p in workers]
    axes[0].plot(workers, gains, "o-", color=color, label=label)
  axes[0].set(title="1 Gbit/s, 25.6 M elements, D = 0.1 %", ylim=(0, None))
  axes[0].set_ylabel("dense seconds over sparse")
  colors = (_BLUE, _RED, _GREEN, _GREY)
  for (name, entry_bytes), color in zip(
    fang_numbers.ENTRIES.items(), colors, strict=True
  ):
    crossing = [100 * 8 / (entry_bytes * p) for p in workers]
    axes[1].plot(workers, crossing, "o-", color=color, label=name)
  axes[1].axhline(0.1, color="k", ls=":")
  axes[1].text(2, 0.11, "D = 0.1 %", fontsize=9)
  axes[1].set(
    title="density below which sparse sends less", yscale="log", ylim=(0.07, 3000)
  )
  axes[1].set_ylabel("density (%)")
  ticks = (0.1, 1, 10, 100)
  axes[1].set_yticks(ticks, ticks)
  for axis in axes:
    axis.set(xscale="log", xlabel="workers")
    axis.set_xticks(workers, workers)
    axis.minorticks_off()
    axis.legend(fontsize=9)
  return "Fang: a sparse all-gather against a dense all-reduce"


def _grubic(axes: Any) -> str:
  """Draws lines through figure 10, the gain over sizes, and dollars."""
  found = grubic_numbers.fits()
  colors = (_BLUE, _GREEN, _RED, _GREY)
  fitted = [name for name in grubic.MPI if ("MPI", name, 16) in found]
  for name, color in zip(fitted, colors, strict=True):
    speeds = grubic.column(grubic.MPI[name], grubic.MPI_GPUS, 16)
    shares = [grubic.wire_share(bits) for bits in speeds]
    axes[0].plot(shares, [1e3 / x for x in speeds.values()], "o", color=color)
    ends, line = (0, 1), found["MPI", name, 16]
    values = [1e3 * (line.computation + line.communication * x) for x in ends]
    axes[0].plot(ends, values, color=color, label=name)
  axes[0].set(title="MPI, 16 GPUs: a + c w", xlabel="w, bytes over those of f32")
  axes[0].set(ylabel="ms an image", ylim=(0, None))
  axes[0].legend(fontsize=9)
  sizes = grubic_numbers.SIZES
  alexnet = found["NCCL", "AlexNet", 8]
  gains = [grubic.size_gain(alexnet, size) for size in sizes]
  axes[1].plot(sizes, gains, "o-", color=_BLUE)
  axes[1].axhline(1 / grubic.wire_share(8), color="k", ls=":", label="limit, 3.97")
  axes[1].set(title="AlexNet, NCCL, 8 GPUs, 8 bits", xscale="log", ylim=(1, 4.2))
  axes[1].set(xlabel="times its size", ylabel="speed-up over f32")
  axes[1].set_xticks(sizes, sizes)
  axes[1].minorticks_off()
  axes[1].legend(fontsize=9, loc="lower right")
  prices = sorted((grubic.cheapest(name)[1], name) for name in grubic.NCCL)
  counts = {1: "1 GPU", 8: "8 GPUs"}
  names = [f"{name}, {counts[grubic.cheapest(name)[0]]}" for _, name in prices]
  bars = axes[2].barh(names, [price for price, _ in prices], color=_BLUE)
  axes[2].bar_label(bars, [f"${price:,.0f}" for price, _ in prices], padding=3)
  axes[2].set(title="cheapest training on EC2", xlabel="dollars", xlim=(0, 2800))
  return "Grubic: lines through figures 10 and 11, and figure 16 recomputed"


def _han(axes: Any) -> str:
  """Draws the steps over group sizes."""
  (axis,) = axes
  styles = ((64, _GREEN), (256, _BLUE), (1024, _RED))
  for workers, color in styles:
    sizes = [2**k for k in range(workers.bit_length())]
    steps = [han.three_step_steps(workers, size) for size in sizes]
    ring = han.ring_steps(workers)
    label = f"{workers} nodes (ring: {ring})"
    axis.plot(sizes, steps, "o-", color=color, label=label)
  axis.plot(16, 74, "*", color="k", ms=14, label="printed: 74 for 256 nodes, k = 16")
  axis.set(xscale="log", yscale="log", xlabel="group size k")
  axis.set_ylabel("steps, 4 (k-1) + 2 (p/k - 1)")
  sizes, ticks = [2**k for k in range(11)], (50, 100, 200, 500, 1000, 2000, 4000)
  axis.set_xticks(sizes, sizes)
  axis.set_yticks(ticks, ticks)
  axis.minorticks_off()
  axis.legend(fontsize=9)
  return "Han: steps of the three-step all-reduce"
