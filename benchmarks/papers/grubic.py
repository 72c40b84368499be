"""Grubic's numbers, recomputed: see paper_models.py."""

from gradcomp.cost import grubic
from papers.number import Number, Paper

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_OUTLIER = ("VGG19", 8)  # a row of 16 bits that no line fits: 35.8 images a second


def numbers() -> list[Number]:
  """Recomputes figure 16, and what sections 1 and 5 say of figures 10 and 11."""
  paper = Paper("Grubic")
  _fits(paper)
  _gains(paper)
  _dollars(paper)
  return paper.numbers


def fits() -> dict[tuple[str, str, int], grubic.Fit]:
  """Fits the tables, by primitive, network and number of GPUs."""
  columns = [
    *(("MPI", name, gpus) for name in grubic.MPI for gpus in grubic.MPI_GPUS),
    *(("NCCL", name, 8) for name in grubic.NCCL),
  ]
  tables = {
    "MPI": (grubic.MPI, grubic.MPI_GPUS),
    "NCCL": (grubic.NCCL, grubic.NCCL_GPUS),
  }
  found = {}
  for primitive, name, gpus in columns:
    table, counts = tables[primitive]
    speeds = grubic.column(table[name], counts, gpus)
    found[primitive, name, gpus] = grubic.fit(speeds)
  return found


def _fits(paper: Paper) -> None:
  for (primitive, name, gpus), found in fits().items():
    inputs = f"{primitive}, {name}, {gpus} GPUs"
    why = f"largest error {found.error:.1%}"
    if (name, gpus) == _OUTLIER:
      why += ": the row of 16 bits is an outlier"
    paper.ours("a (ms an image)", inputs, 1e3 * found.computation, why)
    paper.ours("c (ms an image)", inputs, 1e3 * found.communication, why)
    paper.ours("communication in f32 (%)", inputs, 100 * found.share, why)


def _gains(paper: Paper) -> None:
  """Adds speed-ups of low precision, and of more GPUs."""
  vgg = fits()["MPI", "VGG19", 16]
  ours = grubic.MPI["VGG19"][2][3] * vgg.seconds(32)
  why = "the row of 32 bits is lost: this is the fit's, which the DGX-1 had not"
  inputs = "MPI, VGG19, 16 GPUs, 2 bits"
  paper.unknown("speed-up over f32", inputs, ours, 5, why)
  speeds = {bits: row[2] for bits, row in grubic.NCCL["VGG19"].items()}
  ours = speeds[4] / speeds[32]
  why = "figure 11 has 179.5 and 163.1 images a second"
  paper.wrong("speed-up over f32 (5.2)", "NCCL, VGG19, 8 GPUs, 4 bits", ours, 1.5, why)
  paper.wrong("speed-up over f32 (1)", "NCCL, VGG19, 8 GPUs, 4 bits", ours, 1.4, why)
  table, one = grubic.MPI["ResNet152"], grubic.ONE_GPU["ResNet152"]
  why = "the two numbers are exchanged, and neither is figure 10's"
  inputs = "MPI, ResNet152, 16 GPUs"
  ours = table[2][3] / one
  paper.wrong("scaling, quantised (5.3)", f"{inputs}, 2 bits", ours, 2, why)
  paper.wrong("scaling, f32 (5.3)", f"{inputs}, 32 bits", table[32][3] / one, 5, why)
  most = max(
    new / old
    for rows in grubic.MPI.values()
    if "1bit" in rows
    for old, new in zip(rows["1bit"], rows["1bit*"], strict=True)
  )
  why = '"up to": rows of three networks are lost'
  paper.unknown("gain of reshaping", "MPI, the largest", most, 4, why)
  ours = table["1bit"][3] / table[32][3]
  paper.ours("speed of 1bit over f32", inputs, ours, "slower, as the paper says")
  for name, rows in grubic.MPI.items():
    for bits in rows:
      ours = grubic.sixteen_over_eight(name, bits)
      label = f"{bits} bits" if isinstance(bits, int) else bits
      paper.ours("16 over 8 GPUs, at twice the price", f"MPI, {name}, {label}", ours)
  alexnet = fits()["NCCL", "AlexNet", 8]
  speeds = {bits: row[2] for bits, row in grubic.NCCL["AlexNet"].items()}
  ours, printed = grubic.size_gain(alexnet, 1), speeds[8] / speeds[32]
  inputs = "NCCL, AlexNet, 8 GPUs, 8 bits"
  why = "the fit's error, 2.2 %"
  paper.agrees("figure 16, right: gain at its size", inputs, ours, printed, 0.022, why)
  for size in SIZES[1:]:
    inputs = f"AlexNet, {size} times its size"
    paper.ours("figure 16, right: gain", inputs, grubic.size_gain(alexnet, size))
  ours = 1 / grubic.wire_share(8)
  why = "a bucket's scale is 0.8 % of its bytes"
  paper.agrees("figure 16, right: limit", "8 bits, 512", ours, 4, 0.01, why)


def _dollars(paper: Paper) -> None:
  """Adds figure 16, left."""
  price = {}
  for name in grubic.NCCL:
    gpus, price[name] = grubic.cheapest(name)
    inputs = f"{name}, {gpus} GPU" + "s" * (gpus > 1)
    paper.ours("dollars of a training", inputs, price[name])
  why = "two networks' prices, read off a plot"
  steps = (("AlexNet", "ResNet50", 600), ("ResNet50", "ResNet152", 1500))
  for first, second, printed in steps:
    ours = price[second] - price[first]
    what, inputs = "difference in dollars", f"{second} less {first}"
    paper.agrees(what, inputs, ours, printed, 0.15, why)
