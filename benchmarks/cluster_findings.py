"""Lists the papers' findings that a study judges."""

from cluster_codecs import TYPES
from cluster_speeds import (
  bound_nets,
  diminishing,
  doubling,
  falls,
  fast_link,
  line,
  of_links,
  rises,
  slower,
  vanishes,
)
from cluster_verdicts import (
  Finding,
  alike,
  any_workers,
  concluded,
  fails,
  later,
  recurrent,
  within,
  worse,
)

_DETTMERS = [name.replace("_", "-") for name in TYPES]
_ACCURACY = (
  Finding(
    "QSGD with 8 bits in buckets of 512 ends as float32.",
    "Grubic 5.1",
    "equal",
    within(["qsgd-8"], 0.2),
  ),
  Finding(
    "QSGD with 4 bits in buckets of 512 ends within 0.2 points.",
    "Grubic 5.1",
    "0.1",
    within(["qsgd-4"], 0.2),
  ),
  Finding(
    "1-bit SGD in buckets of 64 ends less than 0.3 points below.",
    "Grubic 5.1",
    "0.3",
    within(["onebit-64"], 0.3),
  ),
  Finding(
    "1-bit SGD converges later than float32.",
    "Grubic 5.1",
    "curve",
    later("onebit-64"),
  ),
  Finding(
    "1-bit SGD is worse in buckets of 512 than of 64.",
    "Grubic 5.1",
    "1 point",
    worse("onebit-512", "onebit-64"),
  ),
  Finding(
    "QSGD with 2 bits in buckets of 128 is worse than float32.",
    "Grubic 5.1",
    "1 point or more",
    worse("qsgd-2", "f32"),
  ),
  Finding(
    "QSGD with 4 bits is worse in buckets of 8192 than of 512.",
    "Grubic 5.1",
    "more than 0.6 points below float32",
    worse("qsgd-4-8192", "qsgd-4"),
  ),
  Finding(
    "QSGD with 1 bit and uniform levels fails.",
    "Grubic 5.1",
    "accuracy not reached",
    fails(["qsgd-1-uniform"]),
  ),
  Finding(
    "QSGD with the l2 norm as its scale fails.",
    "Grubic 5.1",
    "accuracy not reached",
    fails(["qsgd-4-l2", "qsgd-2-l2"]),
  ),
  Finding(
    "QSGD with 2 bits and one scale a tensor fails.",
    "Grubic 3.2.2",
    "buckets are needed",
    fails(["qsgd-2-tensor"]),
  ),
  Finding(
    "Convolutions are more sensitive to 2 bits than dense layers.",
    "Grubic 5.1",
    "no number",
    worse("qsgd-2:conv", "qsgd-2:dense"),
  ),
  Finding(
    "A recurrent net stands 2 bits.",
    "Grubic 5.1",
    "equal",
    within(["qsgd-2"], 0.2, recurrent),
  ),
  Finding(
    "1-bit SGD without residuals fails.",
    "Grubic 2.2",
    "feedback is needed",
    fails(["onebit-64-nofeedback"]),
  ),
  Finding(
    "TernGrad ends at most 0.22 points below float32, for 2 to 64 workers.",
    "Wen 4.1, figure 3",
    "0.22 on LeNet",
    any_workers("terngrad", 0.22),
  ),
  Finding(
    "TernGrad ends at most 2 points below float32.",
    "Wen abstract, 4.2",
    "2 on GoogLeNet",
    within(["terngrad"], 2.0),
  ),
  Finding(
    "TernGrad is worse without clipping.",
    "Wen 4.2, table 2",
    "2.7 points",
    worse("terngrad-noclip", "terngrad"),
  ),
  Finding(
    "Dettmers' four types of 8 bits end as float32 (analysis of variance).",
    "Dettmers 3.4",
    "p = 0.59",
    alike(_DETTMERS),
  ),
  Finding(
    "APS with 8 bits ends at most 0.3 points below float32.",
    "Han 4.1, table 4",
    "0.3",
    within(["aps-5-2", "aps-4-3"], 0.3),
  ),
  Finding(
    "Casts to 4 bits (3, 0) fail without APS.",
    "Han table 6",
    "diverges",
    fails(["cast-3-0"]),
  ),
  Finding(
    "4 bits (3, 0) with APS are worse than float32 in the last layer.",
    "Han table 7",
    "no number",
    worse("aps-3-0", "aps-3-0:body"),
  ),
  Finding(
    "RedSync with 1 % and 0.1 % ends within a point of float32.",
    "Fang table 1",
    "within 1 %",
    within(["redsync-1", "redsync-0.1"], 1.0),
  ),
  Finding(
    "The largest 1 % without residuals fail.",
    "Fang 2",
    "residuals are needed",
    fails(["topk-1-noresidual"]),
  ),
)

_TWO = ((2, "1gbit", 1, 64), (4, "1gbit", 1, 64))
_LEAVES = ((2, "1gbit", "resnet50", 97.5),)
_SPEED = (
  Finding("Communication falls with the bits.", "Grubic 5.2", "figure 6-9", falls),
  Finding(
    "The time of a sample is a + c w, within 8 %.",
    "Grubic, figures 10 and 11",
    "0.6 to 7.7 %",
    line,
  ),
  Finding(
    "Below 4 bits returns diminish.", "Grubic 5.2", "figures 10 and 11", diminishing
  ),
  Finding(
    "1-bit SGD in buckets of 64 is slower than QSGD with 2 bits.",
    "Grubic 5.2",
    "193.5 against 208.5 images/s",
    slower("onebit-64", "qsgd-2"),
  ),
  Finding(
    "1-bit SGD by columns is slower than float32 on convolutions.",
    "Grubic 3.2.1, 5.2",
    "63 against 114 images/s",
    slower("onebit-column", "f32", "resnet"),
  ),
  Finding(
    "Float32 on a fast link beats few bits on a slow one.",
    "Grubic 5.2",
    "NCCL against MPI",
    fast_link,
  ),
  Finding("On a fast link the gain vanishes.", "Grubic 5.2", "1.1 x at most", vanishes),
  Finding(
    "Nets that communicate much gain, and others do not.",
    "Grubic 5.2",
    "VGG19 against ResNet50",
    bound_nets,
  ),
  Finding(
    "Twice the workers rarely pay their price.", "Grubic 5.3", "none of 16", doubling
  ),
  Finding(
    "The gain rises with MB/GFLOP, to 3.97 at most.",
    "Grubic 6, figure 16",
    "4",
    rises,
  ),
  Finding(
    "TernGrad as a sum of integers is faster than float32.",
    "Wen 5",
    "3.04 x",
    of_links("plain f32 mean", "terngrad psum", 1.0, _TWO),
  ),
  Finding(
    "APS with 8 bits is faster than 16 bits.",
    "Han 4.3, figure 11",
    "1.33 x, merged",
    of_links("f16 ring", "aps-8 ring", 1.0, _TWO),
  ),
  Finding(
    "APS with merged layers is faster than layer by layer.",
    "Han 4.3, figure 11",
    "figure",
    of_links("aps-8 in leaves ring", "aps-8 ring", 1.0, _LEAVES),
  ),
  Finding(
    "RedSync with 0.1 % is faster than float32.",
    "Fang figure 7",
    "figure",
    of_links("plain f32 mean", "redsync-0.1% all_gather", 1.0, _TWO),
  ),
  Finding(
    "With naive selection RedSync is slower than float32.",
    "Fang figure 7",
    "figure",
    of_links("redsync-0.1% sorted all_gather", "plain f32 mean", 1.0, _TWO),
  ),
  Finding(
    "NVLink, NCCL, K80 and P100 behave as in the figures.",
    "Grubic 4.1",
    "figures 6-15",
    lambda study: concluded([], "a cluster with GPUs"),
  ),
)
FINDINGS = (*_ACCURACY, *_SPEED)
