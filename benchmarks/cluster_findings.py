"""Lists the papers' findings on accuracy that a study judges, and all findings.

What Grubic warns of is judged by his algorithm, the codecs whose names end in
``-paper``.
"""

from cluster_codecs import TYPES
from cluster_elsewhere import ELSEWHERE
from cluster_speed_findings import SPEED
from cluster_verdicts import (
  Finding,
  alike,
  any_workers,
  fails,
  images_by_adam,
  images_of_many,
  large_batches,
  later,
  lenet_of_wen,
  less_dropout,
  little_perplexed,
  long,
  no_better,
  recurrent,
  usual_batches,
  within,
  worse,
)

_DETTMERS = [name.replace("_", "-") for name in TYPES]
_ACCURACY = (
  Finding(
    "QSGD with 8 bits in buckets of 512 ends as float32.",
    "Grubic 5.1",
    "equal",
    within(["qsgd-8", "qsgd-8-paper"], 0.2),
  ),
  Finding(
    "QSGD with 4 bits in buckets of 512 ends within 0.2 points.",
    "Grubic 1, 5.1",
    "0.1",
    within(["qsgd-4", "qsgd-4-paper"], 0.2),
  ),
  Finding(
    "QSGD with 16 bits in buckets of 8192 ends as float32.",
    "Grubic figure 5",
    "equal",
    within(["qsgd-16"], 0.2),
  ),
  Finding(
    "Fitted levels do not improve QSGD.",
    "Grubic 2.3",
    "no significant improvement",
    no_better("qsgd-2-fitted", "qsgd-2"),
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
    "64 is needed",
    worse("onebit-512", "onebit-64"),
  ),
  Finding(
    "1-bit SGD loses by its convolutions.",
    "Grubic 5.1, AlexNet",
    "almost catches up",
    worse("onebit-64", "onebit-64:dense"),
  ),
  Finding(
    "QSGD with 2 bits in buckets of 128 is worse than float32.",
    "Grubic 5.1",
    "1 point or more",
    worse("qsgd-2-paper", "f32"),
  ),
  Finding(
    "QSGD with 2 bits is worse with one scale a tensor than in buckets.",
    "Grubic 3.2.2",
    "no number",
    worse("qsgd-2-tensor-paper", "qsgd-2-paper"),
  ),
  Finding(
    "QSGD with 4 bits is worse in buckets of 8192 than of 512.",
    "Grubic 5.1",
    "0.6 points or more",
    worse("qsgd-4-8192-paper", "qsgd-4-paper"),
  ),
  Finding(
    "QSGD with 1 bit and uniform levels fails.",
    "Grubic 5.1",
    "accuracy not reached",
    fails(["qsgd-1-uniform-paper"]),
  ),
  Finding(
    "QSGD with 4 bits and the l2 norm as its scale fails.",
    "Grubic 5.1",
    "accuracy not reached",
    fails(["qsgd-4-l2-paper"]),
  ),
  Finding(
    "QSGD with 2 bits and the l2 norm as its scale fails.",
    "Grubic 5.1",
    "accuracy not reached",
    fails(["qsgd-2-l2-paper"]),
  ),
  Finding(
    "Convolutions are more sensitive to 2 bits than dense layers.",
    "Grubic 5.1",
    "no number",
    worse("qsgd-2-paper:conv", "qsgd-2-paper:dense"),
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
    "0.22 on MNIST after 10,000 iterations",
    any_workers("terngrad", 0.22, (2, 64), lenet_of_wen),
  ),
  Finding(
    "TernGrad with Adam and a batch a worker ends at most a point below.",
    "Wen 4.1, table 1",
    "less than 1",
    within(["terngrad"], 1.0, images_by_adam),
  ),
  Finding(
    "TernGrad ends at most 2 points below float32.",
    "Wen abstract, 4.2",
    "less than 2 on average, GoogLeNet, top-5",
    within(["terngrad"], 2.0),
  ),
  Finding(
    "TernGrad is worse without clipping.",
    "Wen 4.2, table 2",
    "2.98 points",
    worse("terngrad-noclip", "terngrad"),
  ),
  Finding(
    "TernGrad loses less with less dropout.",
    "Wen 4.2",
    "no number",
    less_dropout("terngrad"),
  ),
  Finding(
    "TernGrad is worse if the last layer has it, too.",
    "Wen 4.2",
    "last layer in float32",
    worse("terngrad", "terngrad:body"),
  ),
  Finding(
    "Dettmers' four types of 8 bits end as float32 (analysis of variance).",
    "Dettmers 3.4",
    "p = 0.59",
    alike(_DETTMERS),
  ),
  Finding(
    "APS with 8 bits ends within 0.2 points of float32.",
    "Han table 4",
    "0 to 0.4 better",
    within(["aps-5-2", "aps-4-3"], 0.2),
  ),
  Finding(
    "4 bits (3, 0) with APS are worse than float32.",
    "Han table 4",
    "4.7 and 6.9 points",
    worse("aps-3-0", "f32"),
  ),
  Finding(
    "Casts to (3, 0) without APS fail.",
    "Han table 4",
    "diverges",
    fails(["cast-3-0"]),
  ),
  Finding(
    "Casts to (4, 3) are worse without APS.",
    "Han table 4",
    "1.2 points, or diverges",
    worse("cast-4-3", "aps-4-3"),
  ),
  Finding(
    "APS with 8 bits, the last layer in float32, does for 256 workers.",
    "Han table 6",
    "0.04 and 0.09 points",
    within(["aps-5-2-h16:body", "aps-4-3-h16:body"], 0.2, images_of_many),
  ),
  Finding(
    "APS with 8 bits behind a third of float32 ends as float32 for 256 workers.",
    "Han table 6",
    "0.07 better",
    within(["aps-4-3-h16-hybrid:body"], 0.2, images_of_many),
  ),
  Finding(
    "With 256 workers (5, 2) is worse if the last layer has it, too.",
    "Han table 7",
    "0.90 points",
    worse("aps-5-2-h16", "aps-5-2-h16:body", images_of_many),
  ),
  Finding(
    "With 256 workers (5, 2) is worse in a ring than in groups of 16.",
    "Han 4.2, table 9",
    "85 and 42 % of round-off",
    worse("aps-5-2:body", "aps-5-2-h16:body", images_of_many),
  ),
  Finding(
    "Groups of 32 are worse than groups of 16 for (5, 2) and 256 workers.",
    "Han table 8",
    "0.17 points",
    worse("aps-5-2-h32", "aps-5-2-h16", images_of_many),
  ),
  Finding(
    "RedSync with 1 % ends within a point of float32.",
    "Fang table 1",
    "within 1 %, with 0.1 %",
    within(["redsync-1"], 1.0, usual_batches),
  ),
  Finding(
    "RedSync with 0.1 % ends within a point of float32.",
    "Fang table 1",
    "within 1 %",
    within(["redsync-0.1"], 1.0, long),
  ),
  Finding(
    "RedSync with 1 % and 512 images a step or more ends at most 1.1 points below.",
    "Fang table 2",
    "0.71 above to 1.03 below, with 0.1 %",
    within(["redsync-1"], 1.1, large_batches),
  ),
  Finding(
    "RedSync on a recurrent net has at most 1 % more perplexity.",
    "Fang table 1",
    "1 % less, on words after full training",
    little_perplexed(["redsync-1"], 1.0),
  ),
  Finding(
    "The largest 1 % without residuals fail.",
    "Fang algorithm 1",
    "it keeps residuals",
    fails(["topk-1-noresidual"]),
  ),
)
FINDINGS = (*_ACCURACY, *ELSEWHERE, *SPEED)
