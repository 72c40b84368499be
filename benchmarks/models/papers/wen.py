"""Wen's numbers, recomputed: see models/compare.py."""

from benchmarks.models.papers.number import Number, Paper
from gradcomp._src.cost.papers import wen

MODELS = {"AlexNet": wen.ALEXNET, "GoogLeNet": wen.GOOGLENET, "VGG-A": wen.VGG_A}
CLUSTERS = {  # figure 5: the links, and the rate of a GPU
  "1 Gbit/s Ethernet, GTX 1080": (wen.ETHERNET, wen.GTX_1080),
  "InfiniBand and NVLink, P100": (wen.INFINIBAND, wen.P100),
}
GPUS = 4  # of a machine


def numbers() -> list[Number]:
  """Recomputes the ratios of section 3, and the speed-ups of section 5."""
  paper = Paper("Wen")
  why = "the last digit was cut off, not rounded: 20.19"
  ours = wen.base_3_ratio()
  paper.agrees("push, trits: 32 / log2(3)", "3.2", ours, 20.18, 0.001, why)
  exact = "the same quotient"
  paper.agrees("push, 2 bits", "3.2", wen.PUSH_RATIO, 16, 0, exact)
  for workers in (2, 4, 8, 16, 64, 512):
    inputs = f"{workers} workers"
    paper.ours("pull, 32 / log2(1 + 2 N)", inputs, wen.pull_ratio(workers))
    paper.ours("pull, bits of an integer", inputs, wen.pull_bits(workers))
  _implied(paper)
  for name in CLUSTERS:
    for network in MODELS:
      for machines in (8, 64):
        inputs = f"{network}, {machines} x {GPUS} GPUs, {name}, estimated T"
        paper.ours("TernGrad's gain", inputs, estimated_gain(network, name, machines))
  return paper.numbers


def _implied(paper: Paper) -> None:
  """Adds the profiled times that the printed speed-ups need."""
  rows = (
    ("AlexNet", 3.04, 2, "1 Gbit/s Ethernet, GTX 1080"),
    ("VGG-A", 2.0, 128, "InfiniBand and NVLink, P100"),
  )
  for network, printed, machines, name in rows:
    model, (links, peak) = MODELS[network], CLUSTERS[name]
    inputs = f"{network}, {machines} x {GPUS} GPUs, {name}"
    why = "T and the bandwidths are not printed, and figure 5 is a curve"
    ours = estimated_gain(network, name, machines)
    paper.unknown("TernGrad's gain", f"{inputs}, estimated T", ours, printed, why)
    nbytes = 4 * model.parameters
    ours = wen.implied_profile(printed, nbytes, GPUS, machines, links)
    paper.ours("T that the printed gain needs (s)", inputs, ours)
    if network == "AlexNet":
      ratio = wen.mixed_ratio(wen.ALEXNET_LAST / model.parameters)
      ours = wen.implied_profile(printed, nbytes, GPUS, machines, links, ratio=ratio)
      why = f"bytes are {ratio:.2f} times fewer then, and not 16 times"
      what = "T that the printed gain needs, last layer in f32 (s)"
      paper.ours(what, inputs, ours, why)
    ours = wen.estimated_profile(model, peak)
    paper.ours("T at half of the GPU's peak rate (s)", inputs, ours)


def estimated_gain(network: str, cluster: str, machines: int) -> float:
  """Returns TernGrad's gain in weak scaling, with an estimate of the profiled time."""
  model, (links, peak) = MODELS[network], CLUSTERS[cluster]
  profiled = wen.estimated_profile(model, peak)
  return wen.gain(profiled, 4 * model.parameters, GPUS, machines, links)
