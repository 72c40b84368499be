"""The papers' models refuse what they cannot compute, and name the argument."""

import pytest

from benchmarks.models.papers import dettmers, fang, grubic, han, wen
from gradcomp.cost import Link

LINK = Link(latency=0.0, bytes_per_second=1e9)
CALLS = [
  ("bits", lambda: dettmers.dense_penalty_seconds(16)),
  ("penalty", lambda: dettmers.single_node_speedup(-1)),
  (
    "forward_backward",
    lambda: dettmers.single_node_speedup(0, forward_backward=1e-3),
  ),
  ("gpus", lambda: dettmers.single_node_speedup(0, gpus=0)),
  ("sub_batch", lambda: dettmers.cluster_pass(100)),
  ("sub_batch", lambda: dettmers.message_bytes(0, 8)),
  ("sub_batch", lambda: dettmers.dense_latency_seconds(512)),
  ("sizes", lambda: dettmers.cluster_pass(128, sizes="right")),
  ("penalty", lambda: dettmers.cluster_pass(128, penalty="none")),
  ("total", lambda: dettmers.cluster_speedup(float("nan"))),
  ("nbytes", lambda: dettmers.latency_seconds(0)),
  ("parameters", lambda: dettmers.naive_sync_seconds(1.5)),
  ("profiled", lambda: wen.weak_scaling_seconds(0, 1, 1, 1, wen.ETHERNET)),
  ("profiled", lambda: wen.strong_scaling_seconds(1e-3, 244e6, 1, 1, wen.ETHERNET)),
  ("nbytes", lambda: wen.exchange_seconds(-1, 1, 1, wen.ETHERNET)),
  ("gpus", lambda: wen.exchange_seconds(1, 0, 1, wen.ETHERNET)),
  ("machines", lambda: wen.gain(1, 1, 1, 1.5, wen.ETHERNET)),
  ("ratio", lambda: wen.gain(1, 1, 1, 1, wen.ETHERNET, ratio=0)),
  ("speedup", lambda: wen.implied_profile(1, 1e6, 4, 2, wen.ETHERNET)),
  ("speedup", lambda: wen.implied_profile(17, 1e6, 4, 2, wen.INFINIBAND)),
  ("speedup", lambda: wen.implied_profile(2, 1e6, 1, 1, wen.ETHERNET)),
  ("workers", lambda: wen.pull_bits(0)),
  ("density", lambda: fang.sparse_seconds(1, 1.1, 2, LINK)),
  ("density", lambda: fang.union_density(0, 2)),
  ("workers", lambda: fang.sparse_seconds(1, 0.1, 3, LINK)),
  ("workers", lambda: fang.crossover_density(1, 1, LINK)),
  ("elements", lambda: fang.dense_seconds(-1, 2, LINK)),
  ("speeds.select", lambda: fang.sparse_seconds(1, 1, 2, LINK, fang.Speeds(-1))),
  ("speeds.add", lambda: fang.dense_seconds(1, 2, LINK, fang.Speeds(add=-1))),
  ("entry_bytes", lambda: fang.crossover_workers(0.1, entry_bytes=0)),
  ("dense", lambda: wen.mixed_ratio(1.5)),
  ("images_per_second", lambda: grubic.fit({32: 1.0})),
  ("images_per_second", lambda: grubic.fit({32: 1.0, 8: 0.0})),
  ("bits", lambda: grubic.wire_share(3)),
  ("gpus", lambda: grubic.column(grubic.MPI["VGG19"], grubic.MPI_GPUS, 3)),
  ("network", lambda: grubic.cheapest("LeNet")),
  ("network", lambda: grubic.sixteen_over_eight("VGG19", 32)),
  ("images_per_second", lambda: grubic.dollars(1, 0, 1)),
  ("group_size", lambda: han.three_step_steps(256, 3)),
  ("group_size", lambda: han.three_step_seconds(1, 8, 0, LINK)),
  ("workers", lambda: han.ring_steps(0)),
  ("elements", lambda: han.half_seconds([], 2, LINK)),
  ("elements", lambda: han.aps_seconds([0], 2, LINK)),
  ("speedup", lambda: han.implied_latency_bytes(0.5, [1000], 2)),
  ("speedup", lambda: han.implied_latency_bytes(2, [1000], 2)),
]


@pytest.mark.parametrize(
  ("name", "call"), CALLS, ids=[f"{at} {name}" for at, (name, _) in enumerate(CALLS)]
)
def test_bad_input_is_refused(name, call):
  with pytest.raises(ValueError, match=f"`{name}`"):
    call()
