"""The report counts the bytes of compiled programs, and of any HLO text, exactly."""

import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp.wire import wire_report

ROWS, COLUMNS = 16, 24  # of what one worker holds


def make_mesh(**sizes):
  devices = np.array(jax.devices()[: math.prod(sizes.values())])
  types = (AxisType.Auto,) * len(sizes)
  return Mesh(devices.reshape(*sizes.values()), tuple(sizes), axis_types=types)


def compile_mapped(function, dtype=jnp.float32, **sizes):
  """Compiles a function of each worker's array, on a mesh with these axes."""
  mesh = make_mesh(**sizes)
  x = jax.ShapeDtypeStruct((ROWS * mesh.size, COLUMNS), dtype)
  spec = P(tuple(sizes))
  mapped = jax.shard_map(
    function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )
  return jax.jit(mapped).lower(x).compile()


def only(report):
  (collective,) = report.collectives
  return collective


def rotation(workers):
  return [(i, (i + 1) % workers) for i in range(workers)]


# The function of a worker's array, the opcode, and the bytes that one of n workers
# sends of b bytes.
REAL = {
  "psum": (lambda x: lax.psum(x, "d"), "all-reduce", lambda n, b: 2 * (n - 1) * b // n),
  "all_gather": (
    lambda x: lax.all_gather(x, "d"),
    "all-gather",
    lambda n, b: (n - 1) * b,
  ),
  "all_gather_tiled": (
    lambda x: lax.all_gather(x, "d", tiled=True),
    "all-gather",
    lambda n, b: (n - 1) * b,
  ),
  "all_to_all": (
    lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True),
    "all-to-all",
    lambda n, b: (n - 1) * b // n,
  ),
  "psum_scatter": (
    lambda x: lax.psum_scatter(x, "d", tiled=True),
    "reduce-scatter",
    lambda n, b: (n - 1) * b // n,
  ),
  "ppermute": (
    lambda x: lax.ppermute(x, "d", rotation(lax.axis_size("d"))),
    "collective-permute",
    lambda n, b: b,
  ),
}


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("dtype", ["uint32", "float32", "bfloat16"])
def test_real_collectives(name, dtype, workers):
  """XLA:CPU widens bf16 to f32, and that is what is sent and reported."""
  function, kind, expected = REAL[name]
  collective = only(wire_report(compile_mapped(function, dtype, d=workers)))
  assert collective.kind == kind
  assert collective.dtype == {"uint32": "u32"}.get(dtype, "f32")
  assert collective.workers == workers
  assert collective.times == 1
  assert not collective.in_loop and not collective.in_branch
  elements = sum(math.prod(shape) for shape in collective.shapes)
  assert elements == ROWS * COLUMNS
  assert collective.bytes_sent == expected(workers, ROWS * COLUMNS * 4)
  assert collective.dense_bytes == collective.bytes_sent


@pytest.mark.parametrize("columns", [1, 1 << 20])
def test_all_to_all_as_a_tuple(columns):
  """XLA:CPU hands over a piece for each worker, whether they are small or large."""

  def function(x):
    wide = jnp.broadcast_to(x[:, :1], (ROWS, columns)) * x[0, 0]
    return lax.all_to_all(wide, "d", 0, 0, tiled=True)

  collective = only(wire_report(compile_mapped(function, d=8)))
  assert collective.shapes == ((ROWS // 8, columns),) * 8
  assert collective.bytes_sent == 7 * (ROWS // 8) * columns * 4


def test_tuple_psum():
  """Arrays of one dtype share an all-reduce."""

  def function(x):
    return lax.psum((x, x[0, :3] * 2, x.astype(jnp.int32)), "d")

  report = wire_report(compile_mapped(function, d=8))
  shapes = {c.dtype: set(c.shapes) for c in report.collectives}
  assert shapes == {"f32": {(ROWS, COLUMNS), (3,)}, "s32": {(ROWS, COLUMNS)}}
  assert report.bytes_sent == 2 * 7 * (2 * ROWS * COLUMNS + 3) * 4 // 8


@pytest.mark.parametrize("size", [2, 4])
def test_axis_index_groups(size):
  groups = [list(range(i, i + size)) for i in range(0, 8, size)]
  compiled = compile_mapped(
    lambda x: lax.psum(x, "d", axis_index_groups=groups), "int32", d=8
  )
  collective = only(wire_report(compiled))
  assert (collective.dtype, collective.workers) == ("s32", size)
  assert collective.bytes_sent == 2 * (size - 1) * ROWS * COLUMNS * 4 // size


@pytest.mark.parametrize(
  ("axes", "workers"), [("a", 2), ("b", 4), (("a", "b"), 8), (("b", "a"), 8)]
)
def test_axes_of_a_mesh(axes, workers):
  collective = only(
    wire_report(compile_mapped(lambda x: lax.all_gather(x, axes), a=2, b=4))
  )
  assert collective.workers == workers
  assert collective.bytes_sent == (workers - 1) * ROWS * COLUMNS * 4


def test_each_axis_has_a_name_and_a_total():
  """Two axes of one size, which the number of workers cannot tell apart."""
  mesh = make_mesh(host=2, chip=2, model=2)

  def function(x):
    y = lax.psum(x, "host") + lax.psum(2 * x, ("host", "model"))
    with jax.named_scope("gradcomp_mean_384_over_2"):
      return lax.ppermute(lax.all_gather(y, "chip")[0], "model", [(0, 1), (1, 0)])

  mapped = jax.shard_map(
    function, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names)
  )
  x = jax.ShapeDtypeStruct((8 * ROWS, COLUMNS), jnp.float32)
  compiled = jax.jit(mapped).lower(x).compile()
  report = wire_report(compiled)
  nbytes = 4 * ROWS * COLUMNS
  sent = {axis: part.bytes_sent for axis, part in report.by_axis.items()}
  expected = {"host": nbytes, "host,model": 3 * nbytes // 2, "chip": nbytes}
  assert sent == expected | {"model": nbytes}
  assert sum(sent.values()) == report.bytes_sent
  assert report.by_axis["chip"].ratio == 1.0
  lines = str(report).splitlines()
  assert lines[0].split()[:4] == ["collective", "dtype", "operands", "axis"]
  totals = [line.split() for line in lines if line.startswith("total")]
  assert [words[1:-1] for words in totals[:-1]] == [
    [axis, f"{nbytes:,}"] for axis, nbytes in sent.items()
  ]
  assert "mean over host, 1 x over host,model, 1 x over chip" in lines[-1]
  assert lines[-1].endswith(" in all.")
  assert wire_report(compiled.as_text(), mesh=mesh) == report
  assert wire_report(compiled.as_text(), mesh=mesh.abstract_mesh) == report
  assert set(wire_report(compiled.as_text()).by_axis) == {""}


def test_another_mesh_is_refused():
  compiled = compile_mapped(lambda x: lax.psum(x, "d"), d=8)
  with pytest.raises(
    ValueError, match="`mesh` must .* with 8 devices, got 4; leave it"
  ):
    wire_report(compiled, mesh=make_mesh(d=4))


def test_a_group_of_one_sends_nothing():
  compiled = compile_mapped(lambda x: lax.psum(x, "a"), a=1, b=8)
  report = wire_report(compiled)
  assert [c.workers for c in report.collectives] in ([], [1])
  assert (report.bytes_sent, report.dense_bytes, report.ratio) == (0, 0, 1.0)


def test_collectives_of_the_partitioner():
  """Part of a mesh axis: 8 workers hold rows, each pair of them half of a sum."""
  sharding = NamedSharding(make_mesh(d=8), P("d"))
  x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
  summed = jax.jit(lambda x: x.reshape(4, 16, 128).sum(1), in_shardings=sharding)
  reduce, gather = wire_report(summed.lower(x).compile()).collectives
  assert (reduce.kind, reduce.workers, reduce.bytes_sent) == ("all-reduce", 2, 512)
  assert (gather.kind, gather.workers, gather.bytes_sent) == ("all-gather", 4, 1536)


def test_scan_multiplies_by_the_trip_count():
  def outer(carry, _):
    def inner(carry, _):
      return lax.ppermute(carry, "d", rotation(8)) + 1.0, None

    return lax.psum(lax.scan(inner, carry, None, length=3)[0], "d"), None

  report = wire_report(compile_mapped(lambda x: lax.scan(outer, x, None, 5)[0], d=8))
  times = {c.kind: c.times for c in report.collectives}
  assert times == {"collective-permute": 15, "all-reduce": 5}
  assert all(c.in_loop and not c.trips_unknown for c in report.collectives)
  nbytes = ROWS * COLUMNS * 4
  assert report.bytes_sent == 15 * nbytes + 5 * (2 * 7 * nbytes // 8)
  assert "loop" not in str(report)


def test_unknown_trip_count_counts_once():
  def function(x):
    return lax.while_loop(lambda x: jnp.sum(x) < 9.0, lambda x: lax.psum(x, "d"), x)

  report = wire_report(compile_mapped(function, d=8))
  collective = only(report)
  assert collective.times == 1 and collective.in_loop and collective.trips_unknown
  assert report.bytes_sent == 2 * 7 * ROWS * COLUMNS * 4 // 8
  assert "loop 1" in str(report)
  assert "counted once, a lower bound" in str(report)


def test_the_branch_with_the_most_counts():
  def function(x):
    return lax.cond(
      x[0, 0] > 0,
      lambda: lax.psum(x, "d"),
      lambda: lax.all_gather(x, "d").sum(0),
    )

  report = wire_report(compile_mapped(function, d=8))
  assert {c.kind for c in report.collectives} == {"all-reduce", "all-gather"}
  assert all(c.in_branch and not c.in_loop for c in report.collectives)
  nbytes = ROWS * COLUMNS * 4
  assert report.bytes_sent == report.dense_bytes == 7 * nbytes
  assert [*report.branch_ratios.values()] == [(1.0, 0.25)]
  assert "branch 1" in str(report)
  assert "the branch with the most counts, an upper bound" in str(report)
  assert str(report).endswith(": 1 x or 0.25 x, by branch.")


def test_pmap():
  mapped = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
  collective = only(wire_report(mapped.lower(jnp.ones((8, 33))).compile()))
  assert (collective.kind, collective.workers) == ("all-reduce", 8)
  assert collective.bytes_sent == 2 * 7 * 33 * 4 // 8


def test_an_exchange_knows_the_plain_mean():
  def function(x):
    with jax.named_scope("gradcomp_mean_3000_over_8"):
      received = lax.all_to_all(x, "d", 0, 0, tiled=True)
    mean = received * jnp.uint32(3)
    with jax.named_scope("gradcomp_stage"):
      return lax.all_gather(mean, "d", tiled=True), lax.psum(received.sum(), "d")[None]

  def loop(x):
    return lax.scan(lambda x, _: (function(x)[0][:ROWS], None), x, None, 5)[0]

  report = wire_report(compile_mapped(function, jnp.uint32, d=8))
  dense = {c.kind: c.dense_bytes for c in report.collectives}
  assert dense == {"all-to-all": 21000, "all-gather": 0, "all-reduce": 0}
  assert report.dense_bytes == 2 * 7 * 4 * 3000 // 8
  assert report.bytes_sent == 7 * 192 + 7 * 1536 + 7
  assert report.ratio == report.bytes_sent / report.dense_bytes
  repeated = wire_report(compile_mapped(loop, jnp.uint32, d=8))
  assert repeated.dense_bytes == 5 * report.dense_bytes
  assert repeated.bytes_sent == 5 * (7 * 192 + 7 * 1536)


def test_messages_of_one_size_complete_a_mean_each():
  """XLA adds them in one sum, and gives it the name of one of them."""

  def function(x):
    sums = []
    for scale in (1.0, 2.0):
      with jax.named_scope("gradcomp_mean_4096_over_8"):
        sums.append(lax.psum(x * scale, "d"))
      with jax.named_scope("gradcomp_stage"):
        sums.append(lax.psum(x[0] * scale, "d"))
    return [x + 1.0 for x in sums]

  text = compile_mapped(function, d=8).as_text()
  of_tpus = re.sub(r'(all-reduce\(.*op_name=")[^"]*', r"\1gradcomp_stage/psum", text)
  for program in (text, of_tpus):
    collective = only(wire_report(program))
    assert collective.means == [(4096, 8), (4096, 8)]
    assert collective.dense_bytes == 2 * (2 * 7 * 4 * 4096 // 8)


def test_other_collectives_cost_themselves():
  def function(x):
    with jax.named_scope("gradcomp_mean_384_over_8"):
      gathered = lax.all_gather(x, "d")
    return gathered, lax.psum(x.astype(jnp.float32), "d")

  report = wire_report(compile_mapped(function, jnp.uint8, d=8))
  assert report.dense_bytes == 2 * (2 * 7 * 384 * 4 // 8)
  assert report.bytes_sent == 7 * 384 + 2 * 7 * 384 * 4 // 8


def exchanged(x, workers, axis="d"):
  """An exchange of the gradient x, as wire_report sees one."""
  with jax.named_scope(f"gradcomp_mean_{ROWS * COLUMNS}_over_{workers}"):
    return lax.all_gather(lax.bitcast_convert_type(x, jnp.uint32), axis)


def accumulated(x):
  add = lambda total, _: (total + lax.psum(x * total, "d"), None)
  return exchanged(lax.scan(add, x, None, 3)[0], 8)


def in_groups(x):
  mean = lax.psum(x, ("a", "b"))
  with jax.named_scope("gradcomp_stage"):
    part = lax.psum_scatter(mean, "b", tiled=True)
  return exchanged(part, 8, "a")


# The function of a worker's gradient, the mesh, and how often a mean runs that an
# exchange takes again.
IN_FRONT = {
  "mean": (lambda x: exchanged(lax.psum(x, "d"), 8), {"d": 8}, 1),
  "parts": (
    lambda x: exchanged(
      jnp.concatenate([lax.psum(jnp.sin(y), "d") for y in jnp.split(x, 2)]), 8
    ),
    {"d": 8},
    1,
  ),
  "accumulated": (accumulated, {"d": 8}, 3),
  "groups": (in_groups, {"a": 2, "b": 4}, 1),
  "behind": (lambda x: lax.psum(exchanged(x, 8) * 1.5, "d"), {"d": 8}, 0),
  "both": (
    lambda x: lax.psum(x * exchanged(lax.psum(x, "d"), 8).sum(), "d"),
    {"d": 8},
    1,
  ),
  "aside": (lambda x: (exchanged(x, 8), lax.psum(x, "d")), {"d": 8}, 0),
  "small": (lambda x: exchanged(x * lax.psum(x.sum(), "d"), 8), {"d": 8}, 0),
  "model": (lambda x: exchanged(lax.psum(x, "m"), 2), {"d": 2, "m": 2}, 0),
  "integers": (
    lambda x: exchanged(x * lax.psum(x.astype(jnp.int32), "d"), 8),
    {"d": 8},
    0,
  ),
}


@pytest.mark.parametrize("case", IN_FRONT.values(), ids=IN_FRONT)
def test_a_mean_in_front_of_an_exchange_is_no_part_of_the_plain_mean(case):
  """A plain step takes one mean. What else there is counts as it is sent."""
  function, sizes, runs = case
  compiled = compile_mapped(function, **sizes)
  report = wire_report(compiled)
  nbytes = 2 * 7 * ROWS * COLUMNS * 4 // 8
  again = sum(c.times * c.bytes_sent for c in report.collectives if c.again)
  assert again == runs * nbytes
  own = [c for c in report.collectives if "gradcomp" in c.scope]
  others = [c for c in report.collectives if c not in own and not c.again]
  plain = sum(c.dense_bytes for c in own) + sum(c.bytes_sent for c in others)
  assert report.dense_bytes == plain
  said = f"{again:,} bytes are a mean of the gradient" in str(report)
  assert said == (runs > 0)
  assert wire_report(compiled.as_text()).dense_bytes == report.dense_bytes


def test_no_collectives():
  report = wire_report(jax.jit(lambda x: x + 1).lower(jnp.ones(3)))
  assert report.collectives == ()
  assert (report.bytes_sent, report.dense_bytes, report.ratio) == (0, 0, 1.0)
  assert str(report) == "The program has no collectives: it sends nothing."


def test_lowered_compiled_and_text_agree():
  mesh = make_mesh(d=8)
  mapped = jax.shard_map(
    lambda x: lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()
  )
  lowered = jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, 5), jnp.float32))
  report = wire_report(lowered)
  assert report.bytes_sent == 35
  assert wire_report(lowered.compile()) == report
  assert wire_report(lowered.compile().as_text(), mesh=mesh) == report


# From here on: text that XLA:CPU does not write, in the style of GPUs and TPUs.

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}
"""


def hlo(entry, computations="", sizes="replica_count=8"):
  """A module with the lines as its entry computation, after parameters %x and %y."""
  return f"""HloModule jit_step, is_scheduled=true, \
entry_computation_layout={{(f32[8,128]{{1,0}})->f32[8,128]{{1,0}}}}, {sizes}

FileNames
1 "step.py"

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
{ADD}{computations}
ENTRY %main.0_spmd (x: f32[8,128], y: u8[3]) -> f32[8,128] {{
  %x = f32[8,128]{{1,0:T(8,128)S(1)}} parameter(0), metadata={{op_name="x"}}
  %y = u8[3]{{0:T(1024)(128)(4,1)}} parameter(1)
  {entry}
  ROOT %result = f32[8,128]{{1,0}} copy(%x)
}}
"""


G8 = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"
NBYTES = 8 * 128 * 4


@pytest.mark.parametrize(
  ("line", "kind", "shapes", "nbytes"),
  [
    (
      f"%s = f32[8,128]{{1,0}} all-reduce-start(%x), {G8}, to_apply=%add\n"
      "%d = f32[8,128]{1,0} all-reduce-done(%s)",
      "all-reduce",
      ((8, 128),),
      2 * 7 * NBYTES // 8,
    ),
    (
      f"%s = (f32[8,128]{{1,0}}, u8[3]{{0}}) all-reduce-start(%x, %y), {G8}, "
      "to_apply=%add\n%d = (f32[8,128]{1,0}, u8[3]{0}) all-reduce-done(%s)",
      "all-reduce",
      ((8, 128), (3,)),
      math.ceil(2 * 7 * (NBYTES + 3) / 8),
    ),
    (
      f"%s = (f32[8,128]{{1,0}}, f32[64,128]{{1,0}}) all-gather-start(%x), {G8}, "
      "dimensions={0}\n%d = f32[64,128]{1,0} all-gather-done(%s)",
      "all-gather",
      ((8, 128),),
      7 * NBYTES,
    ),
    (
      "%s = ((f32[8,128]{1,0}, u8[3]{0}), (f32[64,128]{1,0}, u8[24]{0})) "
      f"all-gather-start(f32[8,128]{{1,0:T(8,128)}} %x, u8[3]{{0}} %y), {G8}, "
      "dimensions={0}\n%d = (f32[64,128]{1,0}, u8[24]{0}) all-gather-done(%s)",
      "all-gather",
      ((8, 128), (3,)),
      7 * (NBYTES + 3),
    ),
    (
      "%s = ((f32[8,128]{1,0}), f32[1,128]{1,0}, u32[], u32[]) "
      f'reduce-scatter-start(%x), async_execution_thread="main", {G8}, '
      "dimensions={0}, to_apply=%add\n"
      "%u = ((f32[8,128]{1,0}), f32[1,128]{1,0}) reduce-scatter-update(%s)\n"
      "%d = f32[1,128]{1,0} reduce-scatter-done(%u)",
      "reduce-scatter",
      ((8, 128),),
      7 * NBYTES // 8,
    ),
    (
      f"%s = ((f32[8,128]{{1,0}}), f32[8,128]{{1,0}}) all-to-all-start(%x), {G8}, "
      "dimensions={0}\n%d = f32[8,128]{1,0} all-to-all-done(%s)",
      "all-to-all",
      ((8, 128),),
      7 * NBYTES // 8,
    ),
    (
      "%s = (f32[8,128]{1,0}, f32[8,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
      "collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}\n"
      "%d = f32[8,128]{1,0} collective-permute-done(%s)",
      "collective-permute",
      ((8, 128),),
      NBYTES,
    ),
    (
      f"%s = ((f32[8,128]{{1,0}}), f32[8,128]{{1,0}}) "
      f"collective-broadcast-start(%x), {G8}\n"
      "%d = f32[8,128]{1,0} collective-broadcast-done(%s)",
      "collective-broadcast",
      ((8, 128),),
      NBYTES,
    ),
    (
      "%o = s32[8]{0} constant({...})\n"
      f"%r = u8[3]{{0}} ragged-all-to-all(%x, %y, %o, %o, %o, /*index=5*/%o), {G8}",
      "ragged-all-to-all",
      ((8, 128),),
      NBYTES,
    ),
    (
      f"%s = ((f32[8,128]), u8[3]) ragged-all-to-all-start(%x, %y, %y, %y), {G8}\n"
      "%d = u8[3] ragged-all-to-all-done(%s)",
      "ragged-all-to-all",
      ((8, 128),),
      NBYTES,
    ),
  ],
)
def test_asynchronous_collectives_count_once(line, kind, shapes, nbytes):
  collective = only(wire_report(hlo(line)))
  assert (collective.kind, collective.shapes) == (kind, shapes)
  assert collective.workers == (2 if kind == "collective-permute" else 8)
  assert collective.bytes_sent == nbytes


def test_wrapped_asynchronous_collective_counts_once():
  """In the text of some XLA versions all three instructions name the computation."""
  wrapped = f"""
%async (p: f32[8,128]) -> f32[8,128] {{
  %p = f32[8,128]{{1,0}} parameter(0)
  ROOT %all = f32[8,128]{{1,0}} all-to-all(%p), {G8}, dimensions={{0}}
}}, execution_thread="parallel"
"""
  entry = """%s = ((f32[8,128]{1,0}), f32[8,128]{1,0}) async-start(%x), calls=%async
  %u = ((f32[8,128]{1,0}), f32[8,128]{1,0}) async-update(%s), calls=%async
  %d = f32[8,128]{1,0} async-done(%u), calls=%async"""
  assert wire_report(hlo(entry, wrapped)).bytes_sent == 7 * NBYTES // 8


@pytest.mark.parametrize(
  ("groups", "workers"),
  [
    ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, ", 2),
    ("replica_groups={{0,1,2,3,4,5,6,7}}, ", 8),
    ("replica_groups={{0,1,2},{3,4,5,6,7}}, ", 5),
    ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, ", 1),
    ("replica_groups={}, ", 8),
    ("", 8),
    ("replica_groups=[2,4]<=[8], ", 4),
    ("replica_groups=[2,4]<=[4,2]T(1,0), ", 4),
    ("replica_groups=[4,2]<=[2,2,2]T(2,0,1), ", 2),
    ("replica_groups=mesh['data axis'=8] {'data axis'}, ", 8),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}, ", 4),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c','a'}, ", 4),
    ("replica_groups=mesh['d'=8] {'d':(4)2}, ", 2),
    ("replica_groups=mesh['a'=8,'b'=3] {'a':(1)4,'b'}, ", 12),
    ("replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}, ", 4),
  ],
)
@pytest.mark.parametrize("after", ["use_global_device_ids=true", "dimensions={0}"])
def test_replica_groups(groups, workers, after):
  line = f"%g = f32[64,128]{{1,0}} all-gather(%x), channel_id=1, {groups}{after}"
  collective = only(wire_report(hlo(line)))
  assert collective.workers == workers
  assert collective.bytes_sent == (workers - 1) * NBYTES


@pytest.mark.parametrize(
  ("groups", "axis"),
  [
    ("{{0,1},{2,3},{4,5},{6,7}}", "c"),
    ("{{0,4},{1,5},{2,6},{3,7}}", "a"),
    ("{{0,2,4,6},{1,3,5,7}}", "a,b"),
    ("{{0,3},{1,2},{4,7},{5,6}}", "b,c"),
    ("{{0},{1},{2},{3},{4},{5},{6},{7}}", ""),
    ("{}", "a,b,c"),
    ("[2,4]<=[8]", "b,c"),
    ("[2,4]<=[4,2]T(1,0)", "a,b"),
    ("[4,2]<=[2,2,2]T(0,2,1)", "b"),
    ("mesh['x'=4,'y'=2] {'x'}", "a,b"),
    ("mesh['x'=8] {'x':(1)2}", "a"),
    ("mesh['x'=8] {'x':(2)2}", "b"),
    ("mesh['x'=8] {'x':(4)2}", "c"),
    ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", "c"),
    ("mesh['x'=2,'y'=4], device_ids=(7,6,5,4,3,2,1,0) {'x'}", ""),
  ],
)
def test_axes_of_replica_groups(groups, axis):
  line = f"%g = f32[64,128]{{1,0}} all-gather(%x), replica_groups={groups}, dims={{0}}"
  mesh = make_mesh(a=2, b=2, c=2)
  assert only(wire_report(hlo(line), mesh=mesh)).axis == axis


@pytest.mark.parametrize(
  ("pairs", "axis", "workers"),
  [
    ("{{0,1},{1,0},{2,3},{3,2}}", "c", 2),
    ("{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", "a,b", 4),
    ("{{0,0}}", "", 1),
  ],
)
def test_axes_of_pairs(pairs, axis, workers):
  line = f"%p = f32[8,128] collective-permute(%x), source_target_pairs={pairs}"
  collective = only(wire_report(hlo(line), mesh=make_mesh(a=2, b=2, c=2)))
  assert (collective.axis, collective.workers) == (axis, workers)


@pytest.mark.parametrize(
  ("sizes", "workers"),
  [
    ("num_partitions=8", 8),
    ("replica_count=8", 8),
    ("replica_count=2, num_partitions=3", 6),
    ("allow_spmd_sharding_propagation_to_output={true}", 1),
  ],
)
def test_all_devices(sizes, workers):
  line = f"%g = f32[64,128]{{1,0}} all-gather(%x), {G8}".replace("[1,8]<=[8]", "{}")
  assert only(wire_report(hlo(line, sizes=sizes))).workers == workers


@pytest.mark.parametrize(
  ("pairs", "workers", "nbytes"),
  [
    ("{{0,1},{1,2},{2,3},{3,0}}", 4, NBYTES),
    ("{{0,0},{1,3},{2,2},{3,1}}", 2, NBYTES),
    ("{{0,0},{1,1}}", 1, 0),
    ("{}", 1, 0),
  ],
)
def test_source_target_pairs(pairs, workers, nbytes):
  line = f"%p = f32[8,128] collective-permute(%x), source_target_pairs={pairs}"
  collective = only(wire_report(hlo(line)))
  assert (collective.workers, collective.bytes_sent) == (workers, nbytes)


@pytest.mark.parametrize(
  ("line", "nbytes"),
  [
    ("all-reduce(%y)", math.ceil(2 * 7 * 3 / 8)),
    ("all-reduce(f32[3] %y), replica_groups=[1,3]<=[3]", 16),
    ("all-reduce(f32[1] %y), replica_groups=[1,3]<=[3]", 6),
    ("all-to-all(u8[1] %y, u8[1] %y, u8[1] %y), replica_groups={{0,1,2}}", 2),
    ("all-gather(f32[] %x)", 28),
    ("all-gather(f32[<=9,2] %x)", 7 * 72),
    ("all-gather(f32[0,128] %x)", 0),
    ("reduce-scatter(f32[24] %x), replica_groups=[2,3]<=[6]", 64),
    ("collective-broadcast(%x), replica_groups={{0}}", 0),
    ("ragged-all-to-all(%x, %y), replica_groups={{0}}", 0),
  ],
)
def test_rounding_and_corners(line, nbytes):
  """A fraction of a byte counts as one."""
  assert wire_report(hlo(f"%c = f32[1]{{0}} {line}")).bytes_sent == nbytes


# What numpy and ml_dtypes say about the width of a dtype.
ITEM_SIZES = {
  "pred": jnp.bool_,
  "s2": jnp.int2,
  "u2": jnp.uint2,
  "s4": jnp.int4,
  "u4": jnp.uint4,
  "s8": np.int8,
  "u8": np.uint8,
  "s16": np.int16,
  "u16": np.uint16,
  "s32": np.int32,
  "u32": np.uint32,
  "s64": np.int64,
  "u64": np.uint64,
  "f4e2m1fn": jnp.float4_e2m1fn,
  "f6e2m3fn": ml_dtypes.float6_e2m3fn,
  "f6e3m2fn": ml_dtypes.float6_e3m2fn,
  "f8e3m4": jnp.float8_e3m4,
  "f8e4m3": jnp.float8_e4m3,
  "f8e4m3fn": jnp.float8_e4m3fn,
  "f8e4m3b11fnuz": jnp.float8_e4m3b11fnuz,
  "f8e4m3fnuz": jnp.float8_e4m3fnuz,
  "f8e5m2": jnp.float8_e5m2,
  "f8e5m2fnuz": jnp.float8_e5m2fnuz,
  "f8e8m0fnu": jnp.float8_e8m0fnu,
  "bf16": jnp.bfloat16,
  "f16": np.float16,
  "f32": np.float32,
  "f64": np.float64,
  "c64": np.complex64,
  "c128": np.complex128,
}


@pytest.mark.parametrize("dtype", ITEM_SIZES)
def test_dtypes(dtype):
  line = f"%g = {dtype}[40]{{0:T(1024)}} all-gather({dtype}[5]{{0:T(1024)}} %x), {G8}"
  collective = only(wire_report(hlo(line)))
  assert collective.dtype == dtype
  assert collective.bytes_sent == 7 * 5 * np.dtype(ITEM_SIZES[dtype]).itemsize


@pytest.mark.parametrize(
  ("dtype", "nbytes"), [("s4", 3), ("u2", 2), ("f4e2m1fn", 3), ("f6e2m3fn", 4)]
)
def test_narrow_types_in_packed_layouts_take_their_bits(dtype, nbytes):
  """As on GPUs, where 5 numbers of 4 bits take 3 bytes."""
  bits = int(dtype[1])
  packed = f"{dtype}[5]{{0:T(1024)E({bits})}}"
  line = f"%g = {dtype}[40]{{0}} all-gather({packed} %x), {G8}"
  assert only(wire_report(hlo(line))).bytes_sent == 7 * nbytes
  both = f"%g = {dtype}[40]{{0}} all-gather({packed} %x, {dtype}[5]{{0}} %x), {G8}"
  with pytest.raises(ValueError, match="narrow types in one layout, got"):
    wire_report(hlo(both))


def test_mixed_dtypes():
  collective = only(wire_report(hlo("%g = (f32[], u8[]) all-gather(%x, %y, %y)")))
  assert collective.dtype == "f32+u8"
  assert collective.operands == (("f32", (8, 128)), ("u8", (3,)), ("u8", (3,)))


BODY = """
%body (s: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %s = (s32[], f32[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[8,128]{1,0} get-tuple-element(%s), index=1
  %p = f32[8,128]{1,0} collective-permute(%v), source_target_pairs={{0,1},{1,0}}
  ROOT %t = (s32[], f32[8,128]{1,0}) tuple(%i, %p)
}

%condition (s: (s32[], f32[8,128])) -> pred[] {
  %s = (s32[], f32[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %any = s32[] all-reduce(%i), replica_groups={}, to_apply=%add
  ROOT %r = pred[] compare(%any, %any), direction=LT
}
"""
WHILE = "(s32[], f32[8,128]{1,0}) while(%t), condition=%condition, body=%body"
TRIPS = (
  'backend_config={"known_induction_variable":{"tuple_index":"0"},'
  '"known_trip_count":{"n":"5"}}'
)


def times(text):
  collectives = wire_report(text).collectives
  return {c.kind: (c.times, c.trips_unknown, c.in_branch) for c in collectives}


def test_a_condition_runs_once_more_than_its_body():
  text = hlo(f"%w = {WHILE}, {TRIPS}", BODY)
  assert times(text) == {
    "collective-permute": (5, False, False),
    "all-reduce": (6, False, False),
  }


def test_calls_multiply_and_are_followed():
  """A fusion in a call in a loop, called twice; a loop of unknown count inside."""
  nested = f"""{BODY}
%inner (p: f32[8,128]) -> f32[8,128] {{
  %p = f32[8,128]{{1,0}} parameter(0)
  ROOT %w = {WHILE}
}}

%fused (p: f32[8,128]) -> f32[1,128] {{
  %p = f32[8,128]{{1,0}} parameter(0)
  ROOT %rs = f32[1,128]{{1,0}} reduce-scatter(%p), {G8}, dimensions={{0}}, to_apply=%add
}}

%called (p: f32[8,128]) -> f32[1,128] {{
  %p = f32[8,128]{{1,0}} parameter(0)
  ROOT %f = f32[1,128]{{1,0}} fusion(%p), kind=kCustom, calls=%fused
}}

%outer (s: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %s = (s32[], f32[8,128]{{1,0}}) parameter(0)
  %v = f32[8,128]{{1,0}} get-tuple-element(%s), index=1
  %c = f32[1,128]{{1,0}} call(%v), to_apply=%called
  %h = f32[8,128]{{1,0}} custom-call(%v), called_computations={{%inner}}
  ROOT %t = (s32[], f32[8,128]{{1,0}}) tuple(%s, %v)
}}

%never (s: (s32[], f32[8,128])) -> pred[] {{
  ROOT %no = pred[] constant(false)
}}
"""
  loop = f"(s32[], f32[8,128]{{1,0}}) while(%t), condition=%never, body=%outer, {TRIPS}"
  text = hlo(f"%w = {loop}", nested)
  assert times(text) == {
    "reduce-scatter": (5, False, False),
    "collective-permute": (5, True, False),
    "all-reduce": (5, True, False),
  }
  twice = wire_report(hlo(f"%w = {loop}\n  %z = {loop}", nested))
  assert twice.bytes_sent == 2 * wire_report(text).bytes_sent


def test_known_loop_in_an_unknown_one():
  computations = f"""{BODY}
%outer (s: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %t = (s32[], f32[8,128]{{1,0}}) parameter(0)
  ROOT %w = {WHILE}, {TRIPS}
}}
"""
  loop = "(s32[], f32[8,128]{1,0}) while(%t), condition=%condition, body=%outer"
  collectives = wire_report(hlo(f"%w = {loop}", computations)).collectives
  assert all(c.in_loop for c in collectives)
  assert [(c.kind, c.times, c.trips_unknown) for c in collectives] == [
    ("all-reduce", 1, True),
    ("all-reduce", 6, True),
    ("collective-permute", 5, True),
  ]


@pytest.mark.parametrize(
  "branches",
  [
    "branch_computations={%one, %two}",
    "true_computation=%one, false_computation=%two",
  ],
)
def test_branches(branches):
  computations = f"""{BODY}
%one (p: f32[8,128]) -> f32[8,128] {{
  %p = f32[8,128]{{1,0}} parameter(0)
  ROOT %g = f32[64,128]{{1,0}} all-gather(%p), {G8}, dimensions={{0}}
}}

%two (p: f32[8,128]) -> f32[8,128] {{
  %p = f32[8,128]{{1,0}} parameter(0)
  ROOT %w = {WHILE}
}}
"""
  line = f"%c = f32[8,128]{{1,0}} conditional(%i, %x, %x), {branches}"
  text = hlo(f"{line}\n  %r = f32[8,128]{{1,0}} all-to-all(%x), {G8}", computations)
  assert times(text) == {
    "all-to-all": (1, False, False),
    "all-gather": (1, False, True),
    "collective-permute": (1, True, True),
    "all-reduce": (1, True, True),
  }
  table = str(wire_report(text))
  assert "loop branch 1" in table
  assert "a lower bound" in table and "an upper bound" in table


def gather(scope, nbytes=NBYTES):
  """A gather of that many bytes in a scope."""
  operand = f"u8[{nbytes}] x"
  return f'all-gather({operand}), {G8}, metadata={{op_name="{scope}/all_gather"}}'


MEAN = "gradcomp_mean_1024_over_8"


def test_each_branch_has_a_ratio_of_one_plain_mean():
  """One in another and one beside it, of the same name, and a branch of nothing."""
  dense = 2 * 7 * NBYTES // 8
  computations = f"""
none {{
  ROOT x = u8[8] parameter(0)
}}
half {{
  x = u8[8] parameter(0)
  ROOT g = u8[9] {gather(MEAN, NBYTES // 8)}
}}
two {{
  x = u8[8] parameter(0)
  h = u8[9] {gather(MEAN, NBYTES // 4)}
  ROOT c = u8[9] conditional(i, x, x), branch_computations={{none, half}}
}}
three {{
  x = u8[8] parameter(0)
  ROOT k = u8[9] {gather("gradcomp_stage", NBYTES // 2)}
}}
"""
  line = "conditional(%i, %x, %x)"
  entry = f"""%b = u8[9] {line}, branch_computations={{%half, %three, %two}}
  %c = u8[9] {line}, true_computation=%three, false_computation=%none"""
  report = wire_report(hlo(entry, computations))
  # A step of `two` takes two means.
  assert report.dense_bytes == 2 * dense
  assert report.bytes_sent == 7 * NBYTES // 8 * (4 + 4)
  assert report.ratio == max(map(max, report.branch_ratios.values()))
  main = "main.0_spmd"
  assert report.branch_ratios == {
    f"{main}/b": (5 / 4, 8 / 4, 7 / 4),
    f"{main}/b[2] two/c": (6 / 4, 7 / 4),
    f"{main}/c": (8 / 4, 4 / 4),
  }
  lines = str(report).splitlines()
  assert lines[-4].startswith("branch: of a conditional; the branch with the most")
  assert lines[-2] == f"{main}/b[2] two/c: 1.5 x or 1.75 x, by branch."


def test_of_many_conditionals_the_first_are_printed():
  computations = f"""
none {{
  ROOT x = u8[8] parameter(0)
}}
one {{
  x = u8[8] parameter(0)
  ROOT g = u8[9] {gather(MEAN)}
}}
"""
  branches = "conditional(i, x, x), branch_computations={none, one}"
  entry = "\n".join(f"c.{i} = u8[9] {branches}" for i in range(6))
  *_, last, more = str(wire_report(hlo(entry, computations))).splitlines()
  assert last == "main.0_spmd/c.3: 3.333 x or 4 x, by branch."
  assert more == "2 more: see branch_ratios."


def test_a_repeat_is_of_the_same_plain_mean():
  """A codec that does not fit sends once more, in a branch behind the first send."""
  computations = f"""
none {{
  ROOT x = u8[8] parameter(0)
}}
again {{
  x = u8[8] parameter(0)
  ROOT g = u8[9] {gather(f"cond/gradcomp_repeat/{MEAN}")}
}}
"""
  branches = "conditional(i, x, x), branch_computations={none, again}"
  entry = f"g = u8[9] {gather(MEAN)}\n  c = u8[9] {branches}"
  report = wire_report(hlo(entry, computations))
  assert (report.ratio, [*report.branch_ratios.values()]) == (8, [(4, 8)])


def test_a_mean_in_front_of_branches_is_taken_again():
  """It is as large as the mean of each branch, and not as those of both."""
  computations = f"""
one {{
  x = f32[8,128] parameter(0)
  ROOT g = u8[9] {gather(MEAN)}
}}
two {{
  x = f32[8,128] parameter(0)
  ROOT g = u8[9] {gather(MEAN, 99)}
}}
"""
  entry = f"""%m = f32[8,128] all-reduce(%x), {G8}, to_apply=%add
  %c = u8[9] conditional(%i, %m, %m), branch_computations={{%one, %two}}"""
  report = wire_report(hlo(entry, computations))
  assert [c.again for c in report.collectives] == [True, False, False]
  assert "are a mean of the gradient, which the exchange takes again" in str(report)


def test_short_text_in_any_order():
  """Without percent signs, signatures and layouts, which XLA can leave out."""
  text = """HloModule short, replica_count=4
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT add.1 = f32[] add(a, b)
}
ENTRY main-2.0 {
  x = f32[8] parameter(0)
  y = f32[8] call(x), to_apply=called.1
  ROOT z = (f32[8], f32[8]) conditional(x, y, y), branch_computations={called.1, none}
}
none {
  ROOT x = f32[8] parameter(0)
}
called.1 {
  x = f32[8] parameter(0)
  ROOT y = f32[8] all-reduce(x), replica_groups={{0,1},{2,3}}, to_apply=sum
}"""
  collectives = wire_report(text).collectives
  assert [(c.in_branch, c.bytes_sent) for c in collectives] == [(False, 32), (True, 32)]


def test_strings_are_not_parsed():
  """Names of scopes and the code of kernels may hold anything."""
  entry = (
    '%k = f32[8,128]{1,0} custom-call(%x), custom_call_target="f", '
    'backend_config="body=%missing calls=\\"%gone\\" all-reduce(%x)"\n'
    f"  %a = f32[8,128]{{1,0}} all-reduce(%x), {G8}, to_apply=%add, "
    'metadata={op_type="x" op_name="f/[\\"replica_groups={{0}}\\"]/calls=%no/\\"g\\"" '
    'source_file="calls=%no" source_line=3}'
  )
  collective = only(wire_report(hlo(entry)))
  assert collective.bytes_sent == 2 * 7 * NBYTES // 8
  assert collective.scope == r"f/[\"replica_groups={{0}}\"]/calls=%no/\"g\""


@pytest.mark.parametrize("longer", ["{}/psum", "jit(f)/{}/a", "vmap({})/psum", "{}"])
def test_scopes_inside_longer_names(longer):
  def dense_bytes(scope):
    name = longer.format(scope)
    metadata = f'metadata={{op_name="{name}" stack_frame_id=4}}'
    line = f"%a = u32[64,128]{{1,0}} all-gather(%x), {G8}, {metadata}"
    return only(wire_report(hlo(line))).dense_bytes

  assert dense_bytes("gradcomp_mean_1234_over_8") == 2 * 7 * 4 * 1234 // 8
  # Of 16 workers, although 8 exchange with each other here: a stage inside groups.
  assert dense_bytes("gradcomp_mean_1234_over_16") == 2 * 15 * 4 * 1234 // 16
  assert dense_bytes("gradcomp_mean_0_over_8") == 0
  assert dense_bytes("gradcomp_stage") == 0
  assert dense_bytes("another_scope") == 7 * NBYTES


def test_bytes_without_a_plain_mean_have_no_ratio_in_words():
  metadata = 'metadata={op_name="gradcomp_stage/all_gather"}'
  report = wire_report(hlo(f"%a = u32[64,128] all-gather(%x), {G8}, {metadata}"))
  assert report.ratio == math.inf
  assert str(report).endswith("Sends 28,672 bytes where a plain f32 mean sends none.")


def test_table():
  def scoped(scope):
    return f'{G8}, metadata={{op_name="jit(step)/shard_map/{scope}"}}'

  pieces = ", ".join(["u32[1,5000] %x"] * 8)
  entry = (
    f"%a = u8[9] all-to-all({pieces}), "
    f"{scoped('gradcomp_mean_320000_over_8/all_to_all')}\n"
    f"  %b = u8[9] all-gather(u32[1,5000] %x), "
    f"{scoped('gradcomp_stage/all_gather')}\n"
    "  %c = u8[9] all-reduce(f32[] %x, u8[4] %x, f32[] %x, u8[3] %x), "
    "replica_groups={{0,1}}\n"
    "  %d = u8[9] all-reduce(u8[] %x, u8[1] %x, u8[2] %x, u8[3] %x, u8[3] %x)"
  )
  lines = str(wire_report(hlo(entry))).splitlines()
  expected = """\
collective  dtype   operands        workers  times  bytes sent  as f32 mean  scope
all-to-all  u32     8 x [1, 5000]         8      1     140,000    2,240,000  first
all-gather  u32     [1, 5000]             8      1     140,000            0  second
all-reduce  f32+u8  2 x [] [4] [3]        2      1          15           15  x
all-reduce  u8      5 arrays              8      1          18           18  x
total                                                  280,033    2,240,033
Sends 0.125 x the bytes of a plain f32 mean."""
  first, second = "gradcomp_mean_320000_over_8", "gradcomp_stage"
  expected = expected.replace("first", f"{first}/all_to_all")
  assert lines == expected.replace("second", f"{second}/all_gather").splitlines()


@pytest.mark.parametrize("program", [None, jax.jit(jnp.sin), 3.0, b"HloModule"])
def test_other_programs_are_type_errors(program):
  with pytest.raises(TypeError, match=r"`program` must be .*, got \w+; pass jax.jit"):
    wire_report(program)


def test_text_that_is_not_optimized_hlo():
  text = jax.jit(jnp.sin).lower(1.0).as_text()  # StableHLO
  rule = r"`program` must be .* one HloModule .*, got 'module @jit_sin.*; pass jax.jit"
  with pytest.raises(ValueError, match=rule):
    wire_report(text)
  headless = hlo("").replace("HloModule", "module")
  for other in ["", "HloModule empty", headless, hlo("") + hlo("")]:
    with pytest.raises(ValueError, match="one HloModule with one ENTRY, got '"):
      wire_report(other)


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("%g = q7[8] all-gather(q7[8] %x)", r"known dtypes, got 'q7 in all-gather\("),
    ("%g = q7[8] all-gather(%x, q7[8] %x)", "known dtypes, got 'q7 in"),
    ("%g = token[] all-reduce(token[] %x)", "known dtypes, got 'token in"),
    ("%g = f32[8] all-reduce(%x, %nowhere)", "known dtypes, got 'undefined in"),
    ("%g = f32[8] all-gather(%x), replica_groups=@mesh", "known replica groups, got"),
    ("%g = f32[8] all-gather(%x), replica_groups=mesh['a'=8] {'b'}", "replica groups"),
    ("%c = f32[8] call(%x), to_apply=%nowhere", "computation .*, got 'nowhere'; pass"),
  ],
)
def test_nothing_is_counted_as_zero_silently(line, message):
  with pytest.raises(ValueError, match=message):
    wire_report(hlo(line))


@pytest.mark.parametrize(
  ("names", "sizes", "elements"),
  [
    ("(gradcomp_mean_96_over_8/a:gradcomp_mean_4096_over_8/a)", [520, 96], 4192),
    ("gradcomp_mean_4096_over_8/a", [520, 520, 520], 3 * 4096),
    (
      "(gradcomp_mean_96_over_8/a:gradcomp_mean_4096_over_8/a)",
      [520, 96, 520],
      96 + 2 * 4096,
    ),
    ("(gradcomp_stage/a:gradcomp_mean_96_over_8/a)", [520, 96], 96),
  ],
)
def test_combined_collectives_complete_the_mean_of_each_message(names, sizes, elements):
  """XLA:GPU joins their names, and leaves one of equal names."""
  operands = ", ".join(f"u32[1,{size}] %x" for size in sizes)
  metadata = f'metadata={{op_name="jit(step)/{names}"}}'
  line = f"%a = u32[9] all-gather({operands}), {G8}, {metadata}"
  assert only(wire_report(hlo(line))).dense_bytes == 2 * 7 * 4 * elements // 8


@pytest.mark.parametrize(
  ("stage", "sent"),
  [
    ("EVERY", {"all-reduce": ("s8", 2 * 7 * 1024 // 8)}),
    (
      "BROADCAST",
      {"reduce-scatter": ("f32", 7 * NBYTES // 8), "all-gather": ("s8", 7 * 1024 // 8)},
    ),
    (
      "REDUCE",
      {"reduce-scatter": ("s8", 7 * 1024 // 8), "all-gather": ("f32", 7 * NBYTES // 8)},
    ),
  ],
)
def test_a_quantized_sum_counts_as_it_is_sent(stage, sent):
  """As XLA:TPU writes one with xla_tpu_quantized_all_reduce_level of 3, 1 and 2."""
  config = (
    'backend_config={"quantized_all_reduce_config":{"quantization_type":'
    '"SYMMETRIC_PER_SHARD_QAR","quantized_data_type":"S8",'
    f'"quantized_stage":"{stage}_STAGE"}}}}'
  )
  report = wire_report(hlo(f"%a = f32[8,128] all-reduce(%x), {G8}, {config}"))
  assert {c.kind: (c.dtype, c.bytes_sent) for c in report.collectives} == sent
  assert report.dense_bytes == 2 * 7 * NBYTES // 8
