"""A report of overlaps: the work, the bytes that nothing hides, and words."""

import jax
import jax.numpy as jnp
import pytest

from gradcomp import overlap_report, wire_report
from tests.report import schedules, texts
from tests.report.schedules import DONE, FLOPS, GROUPS, PRODUCT, START, program


def test_of_branches_the_one_that_sends_most_counts():
  inside = f"""one {{
  p = X parameter(0)
  ROOT a = X all-to-all(p), {GROUPS}
}}
both {{
  q = X parameter(0)
  b = X all-to-all(q), {GROUPS}
  ROOT c = X all-to-all(b), {GROUPS}
}}"""
  line = "r = X conditional(s, x, x), true_computation=one, false_computation=both"
  text = program(line, inside=inside)
  found = overlap_report(text)
  assert found.bytes_sent == wire_report(text).bytes_sent == 2 * 7 * 4 * 64
  assert (found.exposed_bytes, found.exposed_share) == (2 * 7 * 4 * 64, 1)


LINES = {"cheap": "c = W add(w, w)", "dear": PRODUCT}.items()
BRANCHES = [f"{x} {{\n  w = W parameter(0)\n  ROOT {line}\n}}" for x, line in LINES]
WORKS = {
  "dearest branch": """m = W conditional(s, w, w), true_computation=cheap,
    false_computation=dear""",
  # XLA calls cuBLAS with the dimensions of the dot.
  "product of a library": """m = (W, s8[1024]) custom-call(w, w),
    custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{
    "dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],
    "rhs_contracting_dimensions":["0"]}}}""",
}


@pytest.mark.parametrize("line", WORKS.values(), ids=WORKS)
def test_all_that_multiplies_is_work(line):
  found = schedules.the_one(START, line, DONE, inside="\n".join(BRANCHES))
  assert schedules.names(found) == ["m"] and found.flops == FLOPS


REFUSED = [
  (program(START), ValueError, "a -done for each -start"),
  (program().replace("is_scheduled=true, ", ""), ValueError, r"scheduled.*compile\("),
  (len, TypeError, "`program` must be a jax.stages.Compiled"),
  ("HLO", ValueError, "HloModule"),
]


@pytest.mark.parametrize(("text", "error", "rule"), REFUSED)
def test_what_cannot_be_read_is_refused(text, error, rule):
  with pytest.raises(error, match=rule):
    overlap_report(text)


def test_on_a_cpu_all_is_synchronous():
  """Of what lower() returns, of what compile() does, and of its text."""
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  step = lambda x: jax.lax.all_gather(jax.lax.psum(x @ x, "data"), "data")
  specs = dict(in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
  mapped = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
  lowered = mapped.lower(jax.ShapeDtypeStruct((128, 128), jnp.float32))
  compiled, report = lowered.compile(), overlap_report(lowered)
  assert report.exposed_share == 1 and report.hints == ()
  assert all(x.synchronous and not x.beside for x in report.collectives)
  assert report.bytes_sent == wire_report(compiled).bytes_sent > 0
  assert overlap_report(compiled) == report
  assert {x.collective.axis for x in report.collectives} == {"data"}
  count = len(overlap_report(compiled.as_text()).collectives)
  header, *lines, last = str(report).splitlines()
  assert header.split()[:3] == ["collective", "dtype", "axis"]
  assert "kcycles" not in header and len(lines) == count == len(report.collectives)
  assert all(" synchronous " in line for line in lines)
  assert last.startswith(f"Exposed: {count} of {count} collectives, 1 of ")


def test_a_program_without_collectives_exposes_nothing():
  report = overlap_report(program(PRODUCT))
  assert report.exposed_share == report.bytes_sent == 0
  assert str(report) == "The program has no collectives."
  text = program("t = token[] after-all()", "i = ((f32[8]), token[]) infeed(t)")
  assert str(overlap_report(text)).endswith("Not counted: i.")


TILED = f"a = u32[8,64]{{1,0:T(8,128)}} all-to-all(x), {GROUPS}"
COMBINED = f"""y = u32[8] parameter(3)
  z = u32[8] parameter(4)
  a = ((u32[8], u32[8]), (u32[64], u32[64])) all-gather-start(y, z),
    {GROUPS}, backend_config={{"collective_backend_config":{{"is_sync":false}}}}
  b = (u32[64], u32[64]) all-gather-done(a)"""
FLAGS = [
  (TILED, "'xla_tpu_enable_async_all_to_all': True"),
  (COMBINED, "'xla_gpu_all_gather_combine_threshold_bytes': 1"),
  (TILED.replace(":T(8,128)", ""), None),
  (f"{START}\n  {PRODUCT}\n  {DONE}", None),
]


@pytest.mark.parametrize(("lines", "flag"), FLAGS)
def test_a_flag_that_would_help_is_named(lines, flag):
  report = overlap_report(program(lines))
  last = str(report).splitlines()[-1]
  assert report.hints == ((last,) if flag else ())
  assert (flag or "Exposed: ") in last


# How many products are beside each all-to-all and all-gather; - if it is synchronous.
SCHEDULED = texts.read("scheduled")
RECORDED = {
  "v5e": "to- gather6 to- to- to- gather- gather- gather-",
  "v5p_async": "to1 gather- to1 gather- to0 to0 gather- gather-",
  "tpu7x": "to- gather6 to- gather4 to- gather2 to- gather0",
  # Gathers between slices, and inside.
  "two_slices": f"to6 to4 to1 to0 {'gather0 ' * 4}{'gather- ' * 4}",
  "h100": "to2 to1 to0 to0 gather0",
}
# Of all, also by XLA's parser: four layers of 1,024 rows of 520 words, both stages.
NBYTES = 4 * 2 * 7 * 1024 * 520 * 4 // 8


@pytest.mark.parametrize("file", RECORDED)
def test_programs_of_compilers_have_their_overlaps(file):
  text, kinds = SCHEDULED[file], {"all-to-all": "to", "all-gather": "gather"}
  report = overlap_report(text)
  found = report.collectives
  products = [sum(work.flops > 0 for work in x.beside) for x in found]
  beside = ["-" if x.synchronous else n for x, n in zip(found, products, strict=True)]
  shown = [f"{kinds[x.collective.kind]}{n}" for x, n in zip(found, beside, strict=True)]
  assert shown == RECORDED[file].split()
  assert report.bytes_sent == wire_report(text).bytes_sent == NBYTES
  assert 0 < report.exposed_share < 1
  # Each product is that of a worker's batch and a layer, both of 2048.
  assert [x.flops for x in found] == [n * 2**34 for n in products]
  timed = file != "h100"  # only compilers for TPUs estimate cycles
  assert [x.cycles > 0 for x in found] == [timed and n > 0 for n in products]
