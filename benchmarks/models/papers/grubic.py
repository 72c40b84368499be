"""Grubic's numbers, recomputed: see models/compare.py."""

from benchmarks.models.papers.number import Number, Paper
from gradcomp._src.cost.papers import grubic

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_OUTLIER = ("VGG19", 8)  # a row of 16 bits that no line fits: 35.8 images a second
_ROWS = 4  # of a column, from which on a line through them says anything


def numbers() -> list[Number]:
  """Recomputes figure 16, and what sections 1 and 5 say of figures 10 and 11."""
  paper = Paper("Grubic")
  _fits(paper)
  _gains(paper)
  _scaling(paper)
  _setup(paper)
  _dollars(paper)
  return paper.numbers


def column(primitive: str, name: str, gpus: int) -> dict[int, float]:
  """Returns a network's speeds by bits, of figure 10 ("MPI") or 11 ("NCCL")."""
  if primitive == "MPI":
    return grubic.column(grubic.MPI[name], grubic.MPI_GPUS, gpus)
  return grubic.column(grubic.NCCL[name], grubic.NCCL_GPUS, gpus)


def fits() -> dict[tuple[str, str, int], grubic.Fit]:
  """Fits the columns of four rows or more, by primitive, network and GPUs."""
  columns = [
    *(("MPI", name, gpus) for name in grubic.MPI for gpus in grubic.MPI_GPUS),
    *(("NCCL", name, 8) for name in grubic.NCCL),
  ]
  found = {}
  for place in columns:
    if len(speeds := column(*place)) >= _ROWS:
      found[place] = grubic.fit(speeds)
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
  """Adds speed-ups of low precision, and of reshaping."""
  vgg = fits()["MPI", "VGG19", 16]
  ours = column("MPI", "VGG19", 16)[2] * vgg.seconds(32)
  why = "the row of 32 bits is lost: this is the fit's. The paper has more than 5"
  inputs = "MPI, VGG19, 16 GPUs, 2 bits"
  paper.unknown("speed-up over f32 (5.2)", inputs, ours, 5, why)
  speeds = column("NCCL", "VGG19", 8)
  ours = speeds[4] / speeds[32]
  why = "figure 11 has 179.5 and 163.1 images a second"
  paper.wrong("speed-up over f32 (5.2)", "NCCL, VGG19, 8 GPUs, 4 bits", ours, 1.5, why)
  paper.wrong("speed-up over f32 (1)", "NCCL, VGG19, 8 GPUs, 4 bits", ours, 1.4, why)
  most = max(
    new / old
    for rows in grubic.MPI.values()
    if "1bit" in rows
    for old, new in zip(rows["1bit"], rows["1bit*"], strict=True)
    if old and new
  )
  why = '"up to": of AlexNet one pair is left'
  paper.unknown("gain of reshaping", "MPI, the largest", most, 4, why)
  inputs = "MPI, ResNet152, 16 GPUs"
  ours = 63.15 / 113.5
  paper.ours("speed of 1bit over f32", inputs, ours, "slower, as the paper says")
  alexnet = fits()["NCCL", "AlexNet", 8]
  speeds = column("NCCL", "AlexNet", 8)
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


def _scaling(paper: Paper) -> None:
  """Adds speeds over that of one GPU, of 16 over 8, and of NCCL over MPI."""
  one, what = grubic.ONE_GPU, "scaling"
  why = "the two numbers are exchanged, and neither is figure 10's"
  inputs = "MPI, ResNet152, 16 GPUs"
  table = column("MPI", "ResNet152", 16)
  ours = table[2] / one["ResNet152"]
  paper.wrong(f"{what}, quantised (5.3)", f"{inputs}, 2 bits", ours, 2, why)
  ours = table[32] / one["ResNet152"]
  paper.wrong(f"{what}, f32 (5.3)", f"{inputs}, 32 bits", ours, 5, why)
  why = "figure 10 has 849.4 images a second, and 240.8 on one GPU"
  ours = 849.4 / one["AlexNet"]
  paper.wrong(f"{what}, 1bit (5.3)", "MPI, AlexNet, 16 GPUs", ours, 8, why)
  ours = max(x for row in grubic.MPI["AlexNet"].values() for x in row if x)
  why = "with 2 bits and 8 GPUs"
  paper.ours(f"{what}, most", "MPI, AlexNet", ours / one["AlexNet"], why)
  usual = [name for name in grubic.NCCL if name != "VGG19"]  # its batch makes it faster
  ours = max(column("NCCL", name, 8)[32] / one[name] for name in usual)
  why = "figure 11 has 112.1 of ResNet152, and 16.9 on one GPU"
  paper.wrong(f"{what}, f32, most (5.3)", "NCCL, 8 GPUs, but VGG19", ours, 7, why)
  why = 'the paper has f32 "faster"; figure 11 has it slower with 2, 4 and 8 GPUs'
  for gpus in grubic.NCCL_GPUS:
    table = column("NCCL", "AlexNet", gpus)
    inputs = f"NCCL, AlexNet, {gpus} GPUs"
    paper.ours("speed of f32 over 4 bits (5.3)", inputs, table[32] / table[4], why)
  pairs = [
    column("NCCL", name, gpus)[32] > max(column("MPI", name, gpus).values())
    for name in grubic.NCCL
    for gpus in grubic.NCCL_GPUS
    if len(column("MPI", name, gpus)) >= _ROWS
  ]
  why = f'"can be faster": of {len(pairs)} columns in both figures'
  what = "columns where f32 by NCCL beats every one by MPI (5.2)"
  paper.ours(what, "figures 10 and 11", sum(pairs), why)
  for name, rows in grubic.MPI.items():
    for bits, row in rows.items():
      if row[2] and row[3]:
        ours = grubic.sixteen_over_eight(name, bits)
        label = f"{bits} bits" if isinstance(bits, int) else bits
        why = "16 are slower than 8" if ours < 1 else ""
        inputs = f"MPI, {name}, {label}"
        paper.ours("16 over 8 GPUs, at twice the price", inputs, ours, why)


def _setup(paper: Paper) -> None:
  """Adds what the text says of figures 1 and 2."""
  ours = grubic.TERAFLOPS["P100"] / grubic.TERAFLOPS["K80"]
  why = "figure 2 has 10.6 and 8.73 TFLOPS, and the paper about 40 % more"
  paper.wrong("speed of a P100 over a K80 (5.2)", "figure 2", ours, 1.4, why)
  why = "figure 1 has 50k"
  ours = grubic.VALIDATION_IMAGES
  paper.wrong("images of ImageNet to validate on (4.1)", "figure 1", ours, 1e5, why)


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
