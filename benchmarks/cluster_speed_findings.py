"""Lists the papers' findings on speed that a study judges."""

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
from cluster_verdicts import Finding, concluded

_TWO = ((2, "1gbit", 1, 64), (4, "1gbit", 1, 64))
_LEAVES = ((2, "1gbit", "resnet50", 97.5),)
SPEED = (
  Finding("Communication falls with the bits.", "Grubic 5.2", "figure 6-9", falls),
  Finding(
    "The time of a sample is a + c w, within 8 %.",
    "ours, of Grubic's figures 10 and 11",
    "0.6 to 7.7 %",
    line,
  ),
  Finding(
    "2 bits rarely make steps more than 1.2 times as fast as 4 bits do.",
    "Grubic 5.2",
    "0.91 to 1.19 x",
    diminishing,
  ),
  Finding(
    "In many cases 1-bit SGD in buckets of 64 is slower than QSGD with 2 bits.",
    "Grubic 5.2",
    "193.5 against 208.5 images/s",
    slower("onebit-64", "qsgd-2", share=0.5),
  ),
  Finding(
    "1-bit SGD by columns is slower than in buckets of 64.",
    "Grubic 3.2.2",
    "up to 4 x",
    slower("onebit-column", "onebit-64"),
  ),
  Finding(
    "1-bit SGD by columns is slower than float32 on convolutions.",
    "Grubic 3.2.2, figure 10",
    "63 against 114 images/s",
    slower("onebit-column", "f32", "resnet"),
  ),
  Finding(
    "Float32 on a fast link beats few bits on a slow one.",
    "Grubic 5.2",
    "NCCL against MPI",
    fast_link,
  ),
  Finding(
    "On a fast link few bits gain less, 1.25 x at most.",
    "Grubic 5.2, figure 11",
    "1.03 to 1.25 x",
    vanishes,
  ),
  Finding(
    "The net that communicates most gains most.",
    "Grubic 5.2",
    "VGG19 against ResNet50",
    bound_nets,
  ),
  Finding(
    "Twice the workers rarely pay their price.", "Grubic 1", "few scenarios", doubling
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
    of_links("plain f32 mean", "terngrad psum", _TWO),
  ),
  Finding(
    "APS with 8 bits is faster than 16 bits.",
    "Han 4.3, figure 11",
    "1.33 x, merged",
    of_links("f16 ring", "aps-8 ring", _TWO),
  ),
  Finding(
    "APS with merged layers is faster than layer by layer.",
    "Han 4.3, figure 11",
    "figure",
    of_links("aps-8 in leaves ring", "aps-8 ring", _LEAVES),
  ),
  Finding(
    "RedSync with 0.1 % is faster than float32.",
    "Fang figure 7",
    "figure",
    of_links("plain f32 mean", "redsync-0.1% all_gather", _TWO),
  ),
  Finding(
    "With naive selection RedSync is slower than float32.",
    "Fang figure 7",
    "figure",
    of_links("redsync-0.1% sorted all_gather", "plain f32 mean", _TWO),
  ),
  Finding(
    "NVLink, NCCL, K80 and P100 behave as in the figures.",
    "Grubic 4.3",
    "figures 6-15",
    lambda study: concluded([], "a cluster with GPUs"),
  ),
)
