"""The report counts the bytes of compiled programs exactly, and says them in words."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp import wire_report
from tests.report.texts import G8, hlo, named, only

ROWS, COLUMNS = 16, 24  # of what one worker holds
NBYTES = 4 * ROWS * COLUMNS
PLAIN = 2 * 7 * NBYTES // 8  # of a mean over eight workers


def make_mesh(**sizes):
  devices = jax.devices()[: math.prod(sizes.values())]
  types = (AxisType.Auto,) * len(sizes)
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)


def compile_mapped(function, dtype=jnp.float32, **sizes):
  """Compiles a function of each worker's array, on a mesh with these axes."""
  mesh, spec = make_mesh(**sizes), P(tuple(sizes))
  x = jax.ShapeDtypeStruct((ROWS * mesh.size, COLUMNS), dtype)
  specs = dict(in_specs=spec, out_specs=spec, check_vma=False)
  return jax.jit(jax.shard_map(function, mesh=mesh, **specs)).lower(x).compile()


def permute(x):
  workers = lax.axis_size("d")
  return lax.ppermute(x, "d", [(i, (i + 1) % workers) for i in range(workers)])


psum = lambda x: lax.psum(x, "d")
gathered = lambda n, b: (n - 1) * b
cut = lambda n, b: (n - 1) * b // n
# The function of a worker's array, the opcode, and the bytes that one of n workers
# sends of b bytes.
REAL = [
  (psum, "all-reduce", lambda n, b: 2 * (n - 1) * b // n),
  (lambda x: lax.all_gather(x, "d"), "all-gather", gathered),
  (lambda x: lax.all_gather(x, "d", tiled=True), "all-gather", gathered),
  (lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True), "all-to-all", cut),
  (lambda x: lax.psum_scatter(x, "d", tiled=True), "reduce-scatter", cut),
  (permute, "collective-permute", lambda n, b: b),
]


@pytest.mark.parametrize(
  ("dtype", "workers"), [("uint32", 2), ("float32", 8), ("bfloat16", 8)]
)
def test_real_collectives(dtype, workers):
  """XLA:CPU widens bf16 to f32, and that is what is sent and reported."""
  each = lambda x: [function(x * (i + 2)) for i, (function, *_) in enumerate(REAL)]
  found = wire_report(compile_mapped(each, dtype, d=workers)).collectives
  assert sorted((x.kind, x.bytes_sent) for x in found) == sorted(
    (kind, sent(workers, NBYTES)) for _, kind, sent in REAL
  )
  for x in found:
    assert x.dtype == {"uint32": "u32"}.get(dtype, "f32")
    assert (x.workers, x.times, x.in_loop, x.in_branch) == (workers, 1, False, False)
    assert sum(map(math.prod, x.shapes)) == ROWS * COLUMNS
    assert x.dense_bytes == x.bytes_sent


# int2 is missing: XLA for CPUs ends the process.
ON_THE_WIRE = {"float8_e5m2": "f16", "float8_e4m3fn": "f16", "float4_e2m1fn": "f16"}
ON_THE_WIRE |= {"int4": "s8", "uint4": "u8", "uint8": "u8", "uint32": "u32"}


@pytest.mark.parametrize("number", [1, 3])
def test_cpus_widen_narrow_types_but_no_words(number):
  """Each dtype has a number of rows of its own, so that no two share a sum of bytes."""
  _, _, sent = REAL[number]

  def function(x):
    own = lambda i, dtype: jnp.broadcast_to(x[:1], (2 << i, COLUMNS)).astype(dtype)
    return [REAL[number][0](own(*pair)) for pair in enumerate(ON_THE_WIRE)]

  expected = collections.Counter()
  for i, dtype in enumerate(ON_THE_WIRE.values()):
    size = int(re.sub("[a-z]", "", dtype)) // 8
    expected[dtype] += sent(2, size * (2 << i) * COLUMNS)
  found = collections.Counter()
  for x in wire_report(compile_mapped(function, d=2)).collectives:
    found[x.dtype] += x.bytes_sent
  assert found == expected


def test_arrays_of_one_dtype_share_a_sum_and_groups_have_their_own():
  groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

  def function(x):
    whole = lax.psum((x, x[0, :3] * 2, x.astype(jnp.int32)), "d")
    return whole, lax.psum(3 * x, "d", axis_index_groups=groups)

  report = wire_report(compile_mapped(function, d=8))
  shapes = {(c.dtype, c.workers): set(c.shapes) for c in report.collectives}
  whole = (ROWS, COLUMNS)
  assert shapes == {("f32", 8): {whole, (3,)}, ("s32", 8): {whole}, ("f32", 4): {whole}}
  assert report.bytes_sent == 2 * 7 * (2 * NBYTES + 12) // 8 + 2 * 3 * NBYTES // 4


def test_each_axis_has_a_name_and_a_total():
  """Two axes of one size, which the number of workers cannot tell apart."""
  sizes = dict(host=2, chip=2, model=2)
  mesh = make_mesh(**sizes)

  def function(x):
    y = lax.psum(x, "host") + lax.psum(2 * x, ("host", "model"))
    with jax.named_scope("gradcomp_mean_384_over_2"):
      return lax.ppermute(lax.all_gather(y, "chip")[0], "model", [(0, 1), (1, 0)])

  compiled = compile_mapped(function, **sizes)
  report = wire_report(compiled)
  sent = {axis: part.bytes_sent for axis, part in report.by_axis.items()}
  expected = {"host": NBYTES, "host,model": 3 * NBYTES // 2, "chip": NBYTES}
  assert sent == expected | {"model": NBYTES}
  assert sum(sent.values()) == report.bytes_sent
  assert report.by_axis["chip"].ratio == 1.0
  assert "mean over host, 1 x over host,model, 1 x over chip" in str(report)
  for given in (mesh, mesh.abstract_mesh):
    assert wire_report(compiled.as_text(), mesh=given) == report
  assert set(wire_report(compiled.as_text()).by_axis) == {""}
  assert type(report)(report.collectives).by_axis.keys() == sent.keys()


def test_collectives_of_the_partitioner_and_of_pmap():
  """Part of a mesh axis: 8 workers hold rows, each pair of them half of a sum."""
  sharding = NamedSharding(make_mesh(d=8), P("d"))
  x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
  summed = jax.jit(lambda x: x.reshape(4, 16, 128).sum(1), in_shardings=sharding)
  mapped = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
  for lowered, sent in (
    (summed.lower(x), [("all-reduce", 2, 512), ("all-gather", 4, 1536)]),
    (mapped.lower(jnp.ones((8, 33))), [("all-reduce", 8, 2 * 7 * 33 * 4 // 8)]),
  ):
    report = wire_report(lowered.compile())
    assert [(x.kind, x.workers, x.bytes_sent) for x in report.collectives] == sent
    assert wire_report(lowered) == report


def test_scan_multiplies_by_the_trip_count():
  """And the plain mean of an exchange."""

  def outer(carry, _):
    inner = lambda carry, _: (permute(carry) + 1.0, None)
    carry = lax.scan(inner, carry, None, length=3)[0]
    with jax.named_scope("gradcomp_mean_3000_over_8"):
      return lax.all_to_all(carry, "d", 0, 0, tiled=True), None

  report = wire_report(compile_mapped(lambda x: lax.scan(outer, x, None, 5)[0], d=8))
  times = {c.kind: c.times for c in report.collectives}
  assert times == {"collective-permute": 15, "all-to-all": 5}
  assert all(c.in_loop and not c.trips_unknown for c in report.collectives)
  assert report.bytes_sent == 15 * NBYTES + 5 * 7 * NBYTES // 8
  assert report.dense_bytes == 15 * NBYTES + 5 * (2 * 7 * 4 * 3000 // 8)
  assert "loop" not in str(report)


def test_the_branch_with_the_most_counts():
  def function(x):
    gathered = lambda: lax.all_gather(x, "d").sum(0)
    return lax.cond(x[0, 0] > 0, lambda: psum(x), gathered)

  report = wire_report(compile_mapped(function, d=8))
  assert {c.kind for c in report.collectives} == {"all-reduce", "all-gather"}
  assert all(c.in_branch and not c.in_loop for c in report.collectives)
  assert report.bytes_sent == report.dense_bytes == 7 * NBYTES
  assert [*report.branch_ratios.values()] == [(1.0, 0.25)]
  assert "branch with the most counts, an upper bound" in str(report)
  assert str(report).endswith(": 1 x or 0.25 x, by branch.")


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


def exchanged(x, workers=8, axis="d"):
  """An exchange of the gradient x, as wire_report sees one."""
  with jax.named_scope(f"gradcomp_mean_{ROWS * COLUMNS}_over_{workers}"):
    return lax.all_gather(lax.bitcast_convert_type(x, jnp.uint32), axis)


def accumulated(x):
  add = lambda total, _: (total + psum(x * total), None)
  return exchanged(lax.scan(add, x, None, 3)[0])


def in_groups(x):
  mean = lax.psum(x, ("a", "b"))
  with jax.named_scope("gradcomp_stage"):
    part = lax.psum_scatter(mean, "b", tiled=True)
  return exchanged(part, 8, "a")


parts = lambda x: jnp.concatenate([psum(jnp.sin(y)) for y in jnp.split(x, 2)])
ONE = {"d": 8}
# The function of a worker's gradient, the mesh, and how often a mean runs that an
# exchange takes again.
IN_FRONT = {
  "mean": (lambda x: exchanged(psum(x)), ONE, 1),
  "parts": (lambda x: exchanged(parts(x)), ONE, 1),
  "accumulated": (accumulated, ONE, 3),
  "groups": (in_groups, {"a": 2, "b": 4}, 1),
  "behind": (lambda x: psum(exchanged(x) * 1.5), ONE, 0),
  "both": (lambda x: psum(x * exchanged(psum(x)).sum()), ONE, 1),
  "aside": (lambda x: (exchanged(x), psum(x)), ONE, 0),
  "small": (lambda x: exchanged(x * psum(x.sum())), ONE, 0),
  "model": (lambda x: exchanged(lax.psum(x, "m"), 2), {"d": 2, "m": 2}, 0),
  "integers": (lambda x: exchanged(x * psum(x.astype(jnp.int32))), ONE, 0),
}


@pytest.mark.parametrize("case", IN_FRONT.values(), ids=IN_FRONT)
def test_a_mean_in_front_of_an_exchange_is_no_part_of_the_plain_mean(case):
  """A plain step takes one mean. What else there is counts as it is sent."""
  function, sizes, runs = case
  compiled = compile_mapped(function, **sizes)
  report = wire_report(compiled)
  again = sum(c.times * c.bytes_sent for c in report.collectives if c.again)
  assert again == runs * PLAIN
  own = [c for c in report.collectives if "gradcomp" in c.scope]
  others = [c for c in report.collectives if c not in own and not c.again]
  plain = sum(c.dense_bytes for c in own) + sum(c.bytes_sent for c in others)
  assert report.dense_bytes == plain
  said = f"{again:,} bytes are a mean of the gradient" in str(report)
  assert said == (runs > 0)
  assert wire_report(compiled.as_text()).dense_bytes == report.dense_bytes


def test_bytes_without_a_plain_mean_have_no_ratio_in_words():
  line = f"a = u32[64,128] all-gather(x), {G8}{named('gradcomp_stage/all_gather')}"
  report = wire_report(hlo(line))
  assert report.ratio == math.inf
  assert str(report).endswith("Sends 28,672 bytes where a plain f32 mean sends none.")


def test_table():
  scoped = lambda scope: f"{G8}{named(f'jit(step)/shard_map/{scope}')}"
  first, second = "gradcomp_mean_320000_over_8/all_to_all", "gradcomp_stage/all_gather"
  pieces = ", ".join(["u32[1,5000] x"] * 8)
  entry = f"""a = u8[9] all-to-all({pieces}), {scoped(first)}
  b = u8[9] all-gather(u32[1,5000] x), {scoped(second)}
  c = u8[9] all-reduce(f32[] x, u8[4] x, f32[] x, u8[3] x), replica_groups={{{{0,1}}}}
  d = u8[9] all-reduce(u8[] x, u8[1] x, u8[2] x, u8[3] x, u8[3] x)"""
  expected = f"""\
collective  dtype   operands        workers  times  bytes sent  as f32 mean  scope
all-to-all  u32     8 x [1, 5000]         8      1     140,000    2,240,000  {first}
all-gather  u32     [1, 5000]             8      1     140,000            0  {second}
all-reduce  f32+u8  2 x [] [4] [3]        2      1          15           15  x
all-reduce  u8      5 arrays              8      1          18           18  x
total                                                  280,033    2,240,033
Sends 0.125 x the bytes of a plain f32 mean."""
  assert str(wire_report(hlo(entry))) == expected


def test_other_programs_are_errors_and_one_without_collectives_is_none():
  lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
  report = wire_report(lowered)
  assert (report.collectives, report.bytes_sent, report.ratio) == ((), 0, 1.0)
  assert str(report) == "The program has no collectives: it sends nothing."
  for program in (None, jax.jit(jnp.sin), 3.0, b"HloModule"):
    with pytest.raises(TypeError, match=r"`program` must be .*, got \w+; pass jax.jit"):
      wire_report(program)
  headless = hlo("").replace("HloModule", "module")
  for other in (lowered.as_text(), "", "HloModule m", headless, hlo("") + hlo("")):
    with pytest.raises(ValueError, match="one HloModule with one ENTRY, got '"):
      wire_report(other)
