"""Who exchanges with whom: groups, pairs and slices, and the axes of a mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from gradcomp import wire_report
from tests.report import texts
from tests.report.texts import NBYTES, hlo, only, rows

CUBE = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"))
# Groups, the workers of the largest, and the axes of a cube along which they lie.
GROUPS = [
  ("{{0,1},{2,3},{4,5},{6,7}}", 2, "c"),
  ("{{0,4},{1,5},{2,6},{3,7}}", 2, "a"),
  ("{{0,2,4,6},{1,3,5,7}}", 4, "a,b"),
  ("{{0,1,2}, {3,4,5,6,7}}", 5, "a,b,c"),
  ("{{0},{1},{2},{3},{4},{5},{6},{7}}", 1, ""),
  *(("{}", 8, "a,b,c"), ("", 8, "a,b,c")),
  ("[2,4]<=[8]", 4, "b,c"),
  ("[2,4]<=[4,2]T(1,0)", 4, "a,b"),
  ("[4,2]<=[2,2,2]T(0,2,1)", 2, "b"),
  ("mesh['data axis'=8] {'data axis'}", 8, "a,b,c"),
  ("mesh['x'=4,'y'=2] {'x'}", 4, "a,b"),
  ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", 4, "a,c"),
  *((f"mesh['x'=8] {{'x':({n})2}}", 2, x) for n, x in ((1, "a"), (2, "b"), (4, "c"))),
  ("mesh['a'=4,'b'=2] {'a':(1)2,'b'}", 4, "a,c"),
  ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", 4, "b,c"),
  ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", 2, "c"),
  ("mesh['x'=2,'y'=4], device_ids=(7,6,5,4,3,2,1,0) {'x'}", 2, "a"),
]


@pytest.mark.parametrize(("groups", "workers", "axis"), GROUPS)
def test_groups_have_workers_along_the_axes_of_a_mesh(groups, workers, axis):
  given = f"replica_groups={groups}, " * bool(groups)
  for after in ("use_global_device_ids=true", "dimensions={0}"):
    text = hlo(f"g = f32[64,128] all-gather(x), channel_id=1, {given}{after}")
    assert rows(text) == [("all-gather", workers, (workers - 1) * NBYTES)]
  assert only(wire_report(text, mesh=CUBE)).axis == axis


SUM, CHANNEL = "all-reduce(x), to_apply=add, replica_groups=", ", channel_id=1"
GLOBAL = f"{CHANNEL}, use_global_device_ids=true"
BOTH = "replica_count=2, num_partitions=4"
WHOLE = f"all-gather(x), replica_groups={{}}{GLOBAL}"
# The devices of a program, a collective, and the workers of a group.
MODES = {
  "replicas": (BOTH, f"{SUM}{{}}", 2),
  "replicas_of_a_channel": (BOTH, f"{SUM}{{{{0,1}}}}{CHANNEL}", 8),
  "all_devices": (BOTH, f"{SUM}[1,8]<=[8]{GLOBAL}", 8),
  "partitions": (BOTH, f"all-to-all(x), replica_groups={{}}{CHANNEL}", 4),
  "of_partitions": ("num_partitions=8", WHOLE, 8),
  "of_replicas": ("replica_count=8", WHOLE, 8),
  "of_both": ("replica_count=2, num_partitions=3", WHOLE, 6),
  "of_one": ("allow_spmd_sharding_propagation_to_output={true}", WHOLE, 1),
}


@pytest.mark.parametrize("name", MODES)
def test_groups_are_of_replicas_or_partitions_or_both(name):
  sizes, op, workers = MODES[name]
  assert only(wire_report(hlo(f"r = X {op}", sizes=sizes))).workers == workers


CONNECTED = [
  ("{{0,1},{1,0},{2,3},{3,2}}", "c", 2),
  ("{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", "a,b", 4),
  ("{{0,0},{1,3},{2,2},{3,1}}", "b", 2),
  ("{{0,1},{1,2},{2,3},{3,0}}", "b,c", 4),
  ("{{0,0},{1,1}}", "", 1),
  ("{}", "", 1),
]


@pytest.mark.parametrize(("pairs", "axis", "workers"), CONNECTED)
def test_pairs_that_are_connected_are_a_group(pairs, axis, workers):
  line = f"p = X collective-permute(x), source_target_pairs={pairs}"
  found = only(wire_report(hlo(line), mesh=CUBE))
  assert (found.axis, found.workers) == (axis, workers)
  assert found.bytes_sent == NBYTES * (workers > 1)


def test_devices_of_several_slices_have_the_axes_of_the_mesh():
  """A text is the program of one slice, of four chips."""
  text = texts.read("compiled")["tpu_two_slices_hierarchical"]
  report = wire_report(text, mesh=AbstractMesh((2, 4), ("slice", "chip")))
  words = 4 * 8320  # bytes of a worker's share
  loss = 4 * 128  # bytes of a number, as XLA pads it
  loss_inside = 2 * 3 * loss // 4
  # A plain mean of 2**19 numbers adds inside slices first, and the quarters between.
  found = [(axis, x.bytes_sent, x.dense_bytes) for axis, x in report.by_axis.items()]
  assert found == [  # as in the mesh
    ("slice", 2 * words + loss, 2**19 + loss),
    ("chip", 3 * 2**19 + 6 * words + loss_inside, 2 * 3 * 2**19 + loss_inside),
  ]
  dense = sum(x for *_, x in found)
  assert dense == report.dense_bytes == wire_report(text).dense_bytes
  ratios = [f"{part.ratio:.4g}" for part in report.by_axis.values()]
  last = f"Sends {ratios[0]} x the bytes of a plain f32 mean over slice, {ratios[1]} x "
  assert str(report).endswith(f"{last}over chip, {report.ratio:.4g} x in all.")
  with pytest.raises(ValueError, match="with 8 devices, got 4"):
    wire_report(text, mesh=AbstractMesh((4,), ("chip",)))
