"""Grubic's measured speeds make lines and prices, and Han's steps are counted."""

import pytest

from benchmarks.models.papers import grubic, han
from gradcomp.cost import Link

# Milliseconds an image: a, c; the largest error in percent, communication in percent.
FITS = {
  ("MPI", "ResNet50", 2): (10.45, 1.90, 1.3, 15),
  ("MPI", "ResNet50", 4): (5.72, 1.33, 3.7, 19),
  ("MPI", "ResNet50", 8): (2.93, 1.10, 0.6, 27),
  ("MPI", "ResNet50", 16): (1.98, 1.70, 1.1, 46),
  ("MPI", "ResNet152", 2): (28.5, 9.30, 3.3, 25),
  ("MPI", "ResNet152", 4): (15.0, 7.05, 5.1, 32),
  ("MPI", "ResNet152", 8): (7.58, 5.92, 1.6, 44),
  ("MPI", "ResNet152", 16): (4.41, 4.39, 1.5, 50),
  ("MPI", "BN-Inception", 2): (5.69, 0.353, 0.9, 6),
  ("MPI", "BN-Inception", 4): (2.86, 0.284, 1.1, 9),
  ("MPI", "BN-Inception", 8): (1.68, 0.494, 7.0, 23),
  ("MPI", "BN-Inception", 16): (1.27, 0.742, 2.7, 37),
  ("MPI", "VGG19", 16): (4.32, 20.7, 1.7, 83),
  ("NCCL", "AlexNet", 8): (0.804, 0.082, 2.2, 9),
  ("NCCL", "ResNet50", 8): (3.28, 0.070, 7.4, 2),
  ("NCCL", "ResNet152", 8): (8.42, 0.604, 2.1, 7),
  ("NCCL", "VGG19", 8): (5.56, 0.605, 1.5, 10),
  ("NCCL", "BN-Inception", 8): (1.71, 0.419, 7.7, 20),
}


@pytest.mark.parametrize("case", FITS, ids=str)
def test_grubic_fits(case):
  """Within half of the last of three digits, and of a tenth and of a whole percent."""
  primitive, network, gpus = case
  table, counts = {
    "MPI": (grubic.MPI, grubic.MPI_GPUS),
    "NCCL": (grubic.NCCL, grubic.NCCL_GPUS),
  }[primitive]
  found = grubic.fit(grubic.column(table[network], counts, gpus))
  a, c, error, share = FITS[case]
  assert 1e3 * found.computation == pytest.approx(a, rel=0.005)
  assert 1e3 * found.communication == pytest.approx(c, rel=0.007)
  assert 100 * found.error == pytest.approx(error, abs=0.0501)
  assert 100 * found.share == pytest.approx(share, abs=0.5)


def test_grubic_fit_of_a_line_is_that_line():
  speeds = {b: 1 / (0.002 + 0.003 * grubic.wire_share(b)) for b in (32, 8, 2)}
  found = grubic.fit(speeds)
  assert found[:2] == pytest.approx((0.002, 0.003), rel=1e-9)
  assert found.error < 1e-12
  assert found.seconds(16) == pytest.approx(0.002 + 0.003 * 0.5001220703125, rel=1e-9)


def test_grubic_figure_16():
  """Gains to their digits; the prices are read off a plot, within 15 %."""
  alexnet = grubic.fit(grubic.column(grubic.NCCL["AlexNet"], grubic.NCCL_GPUS, 8))
  gains = (1.074, 1.145, 1.277, 1.506, 1.865, 2.34, 2.85, 3.28)
  found = [grubic.size_gain(alexnet, 2**k) for k in range(8)]
  assert found == pytest.approx(gains, abs=0.005)
  assert grubic.size_gain(alexnet, 1e9) == pytest.approx(3.97, abs=0.005)
  prices = {
    "AlexNet": (1, 151),
    "BN-Inception": (1, 1104),
    "ResNet50": (1, 826),
    "ResNet152": (1, 2308),
    "VGG19": (8, 1187),
  }
  for network, (gpus, dollars) in prices.items():
    assert grubic.cheapest(network)[0] == gpus
    assert grubic.cheapest(network)[1] == pytest.approx(dollars, abs=0.5)
  steps = (("AlexNet", "ResNet50", 600), ("ResNet50", "ResNet152", 1500))
  for first, second, printed in steps:
    found = grubic.cheapest(second)[1] - grubic.cheapest(first)[1]
    assert found == pytest.approx(printed, rel=0.15)


def test_grubic_16_gpus_pay_nowhere():
  """They cost twice as much as 8, and ResNet110 is slower on them."""
  found = {
    (network, bits): grubic.sixteen_over_eight(network, bits)
    for network, rows in grubic.MPI.items()
    for bits, row in rows.items()
    if row[2] and row[3]
  }
  assert max(found.values()) == pytest.approx(1.89, abs=0.005)
  assert min(found.values()) == pytest.approx(0.62, abs=0.005)
  slower = {network for (network, _), ratio in found.items() if ratio < 1}
  assert slower == {"AlexNet", "ResNet110", "VGG19", "BN-Inception"}
  assert all(found["ResNet110", bits] < 0.67 for bits in (8, 4, "1bit", "1bit*"))


def test_grubic_numbers_that_the_text_lost():
  """They are in no column, and no ratio is made of them."""
  at_8 = grubic.column(grubic.MPI["ResNet110"], grubic.MPI_GPUS, 8)
  assert at_8 == {8: 1193.1, 4: 1257.1}
  assert grubic.column(grubic.MPI["AlexNet"], grubic.MPI_GPUS, 2) == {}
  for network, bits in (("ResNet110", 2), ("AlexNet", "1bit"), ("LeNet", 8)):
    with pytest.raises(ValueError, match="`network` and `bits` must be in MPI"):
      grubic.sixteen_over_eight(network, bits)


def test_han_counts_steps():
  assert han.ring_steps(256) == 510
  assert han.three_step_steps(256, 16) == han.three_step_steps(256, 8) == 90
  assert han.three_step_steps(256, 32) == 138
  assert han.three_step_steps(128, 16) == 74  # what the paper prints for 256
  best = {64: ((4, 8), 42), 256: ((8, 16), 90), 1024: ((16, 32), 186)}
  for workers, (sizes, steps) in best.items():
    assert han.best_group_sizes(workers) == sizes
    assert {han.three_step_steps(workers, k) for k in sizes} == {steps}


def test_han_aps_against_half_precision():
  """The speed-up that was solved for comes back; latency alone halves, bytes double."""
  ratio = han.implied_latency_bytes(1.33, han.RES5C, 32)
  assert ratio == pytest.approx(56.2e3, rel=1e-3)

  def speedup(latency, merged=True):
    link = Link(latency=latency, bytes_per_second=10e9)
    half = han.half_seconds(han.RES5C, 32, link, merged=merged)
    return half / han.aps_seconds(han.RES5C, 32, link, merged=merged)

  assert speedup(ratio / 10e9) == pytest.approx(1.33, rel=1e-12)
  assert speedup(1.0) == pytest.approx(0.5, rel=1e-4)
  assert speedup(0.0) == pytest.approx(2, rel=1e-5)
  assert speedup(ratio / 10e9, merged=False) < 1.33


def test_han_merging_saves_the_latencies_of_all_leaves_but_one():
  link = Link(latency=1e-3, bytes_per_second=1e9)
  for seconds, rings in ((han.half_seconds, 1), (han.aps_seconds, 2)):
    apart = seconds(han.RES5C, 32, link)
    merged = seconds(han.RES5C, 32, link, merged=True)
    assert apart - merged == pytest.approx(2 * rings * 2 * 31 * 1e-3, rel=1e-9)


def test_han_group_of_one_is_a_ring_and_of_all_a_master():
  link = Link(latency=1e-5, bytes_per_second=1e9)
  ring = 2 * 7 * (1e-5 + 1e6 / 8 / 1e9)
  assert han.three_step_seconds(1e6, 8, 1, link) == pytest.approx(ring, rel=1e-12)
  master = 2 * 7 * (1e-5 + 1e6 / 1e9)
  assert han.three_step_seconds(1e6, 8, 8, link) == pytest.approx(master, rel=1e-12)
