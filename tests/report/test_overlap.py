"""What computes beside a collective is what the schedule has between its two ends."""

import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import gradcomp
from gradcomp import overlap_report, wire_report
from tests.report import oracle

HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=8\n"
GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"
MEGASCALE = (
  "is_host_transfer=true, frontend_attributes={"
  '_xla_host_transfer_handler_name="xla_megascale_runtime",'
  '_xla_host_transfer_rendezvous="NAME",'
  "_xla_megascale_target={{100000,100001,100002,100003,200000,200001,200002,200003}},"
  '_xla_megascale_transfer_type="ALL_TO_ALL"}'
)
PAIRS = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,0}}}"
SEND = "(u32[8,64], u32[], token[])"
# They sum over the second axis of the first operand and the first of the second.
SUM = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
FLOPS = 2 * 512**3


class Form(NamedTuple):
  """An asynchronous collective of ``x``: NAME is its own in all its parts."""

  kind: str
  start: str
  done: str
  others: str = ""  # the computations that it calls


FORMS = {
  "all-gather": Form(
    "all-gather",
    f"NAME = (u32[8,64], u32[64,64]) all-gather-start(x), {GROUPS}, dimensions={{0}}",
    "NAME.end = u32[64,64] all-gather-done(NAME)",
  ),
  "all-to-all": Form(
    "all-to-all",
    f"NAME = ((u32[8,64]), u32[8,64]) all-to-all-start(x), {GROUPS}, dimensions={{0}}",
    "NAME.end = u32[8,64] all-to-all-done(NAME)",
  ),
  "collective-permute": Form(
    "collective-permute",
    "NAME = (u32[8,64], u32[8,64], u32[], u32[]) collective-permute-start(x), "
    "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}",
    "NAME.end = u32[8,64] collective-permute-done(NAME)",
  ),
  "wrapped": Form(
    "all-to-all",
    "NAME = ((u32[8,64]), u32[8,64]) async-start(x), calls=NAME.inside",
    "NAME.end = u32[8,64] async-done(NAME)",
    f"""NAME.inside {{
      NAME.y = u32[8,64] parameter(0)
      ROOT NAME.z = u32[8,64] all-to-all(NAME.y), {GROUPS}, dimensions={{0}}
    }}""",
  ),
  "wrapped_send": Form(
    "collective-permute",
    f"""NAME.t = token[] after-all()
    NAME = ((u32[8,64], token[]), ({SEND}, {SEND}), s32[]) async-start(x, NAME.t),
      calls=NAME.inside""",
    f"NAME.end = ({SEND}, {SEND}) async-done(NAME)",
    f"""NAME.inside {{
      NAME.y = u32[8,64] parameter(0)
      NAME.k = token[] parameter(1)
      NAME.s = {SEND} send(NAME.y, NAME.k), channel_id=1, {PAIRS}
      NAME.r = {SEND} recv(NAME.k), channel_id=1, {PAIRS}
      ROOT NAME.z = ({SEND}, {SEND}) tuple(NAME.s, NAME.r)
    }}""",
  ),
  "updated": Form(
    "all-to-all",
    """NAME = ((u32[8,64]), u32[8,64]) async-start(x), calls=NAME.inside
    NAME.next = ((u32[8,64]), u32[8,64]) async-update(NAME)""",
    "NAME.end = u32[8,64] async-done(NAME.next)",
    f"""NAME.inside {{
      NAME.y = u32[8,64] parameter(0)
      ROOT NAME.z = u32[8,64] all-to-all(NAME.y), {GROUPS}, dimensions={{0}}
    }}""",
  ),
  "SparseCore": Form(
    "all-gather",
    "NAME = ((u32[8,64]), u32[64,64]) call-start(x), to_apply=NAME.inside, "
    'async_execution_thread="sparsecore"',
    "NAME.end = u32[64,64] call-done(NAME)",
    f"""NAME.inside {{
      NAME.y = u32[8,64] parameter(0)
      ROOT NAME.z = u32[64,64] all-gather(NAME.y), {GROUPS}, dimensions={{0}}
    }}""",
  ),
  "slices": Form(
    "all-to-all",
    f"""NAME.token = token[] after-all()
    NAME = (u32[8,64], u32[], token[]) send(x, NAME.token), channel_id=1, {MEGASCALE}
    NAME.in = (u32[8,64], u32[], token[]) recv(NAME.token), channel_id=2, {MEGASCALE}
    NAME.out = token[] send-done(NAME), channel_id=1, is_host_transfer=true""",
    "NAME.end = (u32[8,64], token[]) recv-done(NAME.in), channel_id=2, "
    "is_host_transfer=true",
  ),
  "chain": Form(
    "all-gather",
    "NAME = (u32[8,64], u32[64,64], u32[]) fusion(x), kind=kCustom, calls=NAME.first",
    "NAME.end = u32[64,64] fusion(x), kind=kCustom, calls=NAME.last",
    "\n".join(
      f"""NAME.{part} {{
        NAME.{part}.y = u32[8,64] parameter(0)
        NAME.{part}.g = u32[64,64] all-gather(NAME.{part}.y), channel_id=1, {GROUPS},
          dimensions={{0}}, frontend_attributes={{chain_id="CHAIN"}}
        ROOT NAME.{part}.r = {result} custom-call(NAME.{part}.g),
          custom_call_target="{target}"
      }}"""
      for part, target, result in (
        ("first", "AsyncCollectiveStart", "(u32[8,64], u32[64,64], u32[])"),
        ("last", "AsyncCollectiveDone", "u32[64,64]"),
      )
    ),
  ),
}
every_form = pytest.mark.parametrize("name", FORMS)
INPUTS = """
  x = u32[8,64] parameter(0)
  w = f32[512,512] parameter(1)
  s = f32[] parameter(2)
"""
BETWEEN = {
  "product": f"m = f32[512,512] dot(w, w), {SUM}",
  "scalar": "m = f32[] multiply(s, s)",
  "view": "m = f32[262144] bitcast(w)",
  "transfer": "m = (f32[512,512], f32[512,512], u32[]) copy-start(w)",
  "sum": "m = f32[512,512] add(w, w)",
  "nothing": "",
}


def form(name, own="a"):
  """A form whose names begin with a letter of its own."""
  number = str(ord(own))
  fill = lambda text: text.replace("NAME", own).replace("CHAIN", number)
  kind, *texts = FORMS[name]
  return Form(kind, *map(fill, texts))


def program(*lines, others=""):
  body = "\n  ".join(lines)
  return f"{HEAD}{others}\nENTRY main {{{INPUTS}  {body}\n}}"


def names(overlap):
  return [work.name for work in overlap.beside]


@every_form
@pytest.mark.parametrize("between", BETWEEN)
def test_what_is_between_the_ends_is_beside(name, between):
  """Of each construct; only work of more bytes than are sent hides it."""
  _, start, done, others = form(name)
  report = overlap_report(program(start, BETWEEN[between], done, others=others))
  (found,) = report.collectives
  works = between in ("product", "scalar", "sum")
  assert names(found) == ["m"] * works and not found.synchronous
  assert found.flops == FLOPS * (between == "product")
  assert found.exposed == (between not in ("product", "sum"))
  assert report.exposed_share == found.exposed
  assert found.collective.kind == form(name).kind


@every_form
def test_work_in_front_and_behind_is_not_beside(name):
  _, start, done, others = form(name)
  after = BETWEEN["product"].replace("m =", "n =")
  report = overlap_report(
    program(BETWEEN["product"], start, done, after, others=others)
  )
  (found,) = report.collectives
  assert found.exposed and not found.beside


@every_form
def test_two_on_their_way_have_the_same_work_beside(name):
  """And are not each other's."""
  one, two = form(name, "a"), form(name, "b")
  lines = [one.start, two.start, BETWEEN["product"], one.done, two.done]
  others = "\n".join([one.others, two.others])
  report = overlap_report(program(*lines, others=others))
  assert [names(x) for x in report.collectives] == [["m"], ["m"]]
  assert report.exposed_bytes == 0 < report.bytes_sent


@every_form
def test_the_bytes_are_those_of_the_wire(name):
  """Half of them are exposed."""
  one, two = form(name, "a"), form(name, "b")
  lines = [one.start, one.done, two.start, BETWEEN["product"], two.done]
  others = "\n".join([one.others, two.others])
  text = program(*lines, others=others)
  report = overlap_report(text)
  assert tuple(x.collective for x in report.collectives) == (
    wire_report(text).collectives
  )
  assert report.bytes_sent == wire_report(text).bytes_sent > 0
  assert report.exposed_share == 0.5


SYNCHRONOUS = {
  "plain": f"a = u32[64,64] all-gather(x), {GROUPS}, dimensions={{0}}",
  "marked": f"""a = (u32[8,64], u32[64,64]) all-gather-start(x), {GROUPS},
    dimensions={{0}}, backend_config={{"collective_backend_config":{{"is_sync":true}}}}
  {BETWEEN["product"]}
  b = u32[64,64] all-gather-done(a)""",
}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_nothing_is_beside_a_synchronous_one(name):
  """Also where XLA writes it as a start and marks it."""
  (found,) = overlap_report(program(SYNCHRONOUS[name])).collectives
  assert found.synchronous and found.exposed and not found.beside


def loop(body, inside, trips=5):
  """A loop over a tuple of the inputs, and of what else it carries."""
  return (
    f"""
  condition {{
    c.p = ({inside}) parameter(0)
    ROOT c.r = pred[] constant(true)
  }}
  body {{
    p = ({inside}) parameter(0)
    x = u32[8,64] get-tuple-element(p), index=0
    w = f32[512,512] get-tuple-element(p), index=1
    s = f32[] get-tuple-element(p), index=2
    {body}
  }}
  """,
    (
      f"l = ({inside}) while(t), condition=condition, body=body, "
      f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    ),
  )


CARRIED = "u32[8,64], f32[512,512], f32[]"


@every_form
def test_in_a_loop_each_trip_is_one_run(name):
  """Each has the work of its own trip beside it, and all of them send."""
  _, start, done, others = form(name)
  body = f"""{start}
    {BETWEEN["product"]}
    {done}
    ROOT r = ({CARRIED}) tuple(x, w, s)"""
  computations, line = loop(body, CARRIED)
  text = program(f"t = ({CARRIED}) tuple(x, w, s)", line, others=others + computations)
  report = overlap_report(text)
  (found,) = report.collectives
  assert found.collective.times == 5 and found.flops == FLOPS
  assert report.bytes_sent == wire_report(text).bytes_sent
  assert report.exposed_share == 0


def carried(name, lines, before="", after=""):
  """A program whose loop carries a collective from one trip to the next.

  It starts one in front of the loop. ``lines`` are those of the body: START and DONE in
  them become the start of the next and the end of the last.
  """
  one, two = form(name, "a"), form(name, "b")
  value = {"slices": "a.in", "updated": "a.next"}.get(name, "a")
  (type_,) = re.findall(
    rf"^\s*{re.escape(value)} = (\(.*\)|token\[\]) \S+\(", one.start, re.M
  )
  inside = f"{CARRIED}, {type_}"
  # The ends of the body and of the program read the loop's tuple.
  end = lambda source: one.done.replace(f"({value})", f"({source})")
  body = "\n    ".join(
    {"START": two.start, "DONE": end("last")}.get(line, line) for line in lines
  )
  computations, line = loop(
    f"""last = {type_} get-tuple-element(p), index=3
    {body}
    ROOT r = ({inside}) tuple(x, w, s, {value.replace("a", "b", 1)})""",
    inside,
  )
  text = program(
    one.start,
    before,
    f"t = ({inside}) tuple(x, w, s, {value})",
    line,
    f"final = {type_} get-tuple-element(l), index=3",
    after,
    end("final"),
    others="\n".join([one.others, two.others, computations]),
  )
  report = overlap_report(text)
  assert report.bytes_sent == wire_report(text).bytes_sent
  assert [x.collective.times for x in report.collectives] == [1, 5]
  return [names(x) for x in report.collectives]


carried_forms = pytest.mark.parametrize("name", [x for x in FORMS if x != "chain"])
PRODUCT = BETWEEN["product"]


@carried_forms
def test_a_loop_can_carry_a_collective_to_its_next_trip(name):
  """From the start on: the rest of the trip, and the next one up to the end."""
  between = lambda *lines: carried(name, lines)
  assert between("DONE", PRODUCT, "START") == [[], []]
  assert between("START", PRODUCT, "DONE") == [["m"], ["m", "m"]]
  assert between("START", "DONE", PRODUCT) == [[], ["m"]]
  assert between(PRODUCT, "START", "DONE") == [["m"], ["m"]]


@carried_forms
def test_work_in_front_of_the_loop_is_beside_what_it_carries_in(name):
  before, after = (PRODUCT.replace("m =", f"{x} =") for x in ("k", "n"))
  found = carried(name, ["DONE", PRODUCT, "START"], before, after)
  assert found == [["k"], []]


def test_a_loop_that_only_carries_it_is_beside():
  """All trips of it, as one piece of work."""
  one = form("all-to-all")
  inside = f"{CARRIED}, ((u32[8,64]), u32[8,64])"
  computations, line = loop(
    f"""last = ((u32[8,64]), u32[8,64]) get-tuple-element(p), index=3
    {PRODUCT}
    ROOT r = ({inside}) tuple(x, w, s, last)""",
    inside,
  )
  text = program(
    one.start,
    f"t = ({inside}) tuple(x, w, s, a)",
    line,
    "final = ((u32[8,64]), u32[8,64]) get-tuple-element(l), index=3",
    one.done.replace("(a)", "(final)"),
    others=computations,
  )
  (found,) = overlap_report(text).collectives
  assert names(found) == ["l"] and found.flops == 5 * FLOPS


START, DONE = form("all-to-all").start, form("all-to-all").done
STARTED = "((u32[8,64]), u32[8,64])"  # the type of what is on its way
PARAMETERS = "x = u32[8,64] parameter(0)\n    w = f32[512,512] parameter(1)"
CALLS = {
  "both ends inside": (
    [START, PRODUCT, DONE, "ROOT r = u32[8,64] copy(a.end)"],
    ["y = u32[8,64] call(x, w), to_apply=called"],
  ),
  "the start inside": (
    [START, PRODUCT, f"ROOT r = ({STARTED}) tuple(a)"],
    [
      f"y = ({STARTED}) call(x, w), to_apply=called",
      f"z = {STARTED} get-tuple-element(y), index=0",
      DONE.replace("(a)", "(z)"),
    ],
  ),
  "the end inside": (
    [f"a = {STARTED} parameter(2)", PRODUCT, DONE, "ROOT r = u32[8,64] copy(a.end)"],
    [START, "y = u32[8,64] call(x, w, a), to_apply=called"],
  ),
}


@pytest.mark.parametrize("where", CALLS)
def test_ends_may_lie_in_computations_that_are_called(where):
  inner, outer = CALLS[where]
  lines = "\n    ".join([PARAMETERS, *inner])
  text = program(*outer, others=f"called {{\n    {lines}\n}}")
  (found,) = overlap_report(text).collectives
  assert names(found) == ["m"]


def test_the_dearest_branch_is_the_work_of_a_conditional():
  """And a loop's work is that of all its trips."""
  start, done = form("all-to-all").start, form("all-to-all").done
  others = f"""
  cheap {{
    w = f32[512,512] parameter(0)
    ROOT c = f32[512,512] add(w, w)
  }}
  dear {{
    w = f32[512,512] parameter(0)
    ROOT {PRODUCT}
  }}"""
  line = (
    "b = f32[512,512] conditional(s, w, w), true_computation=cheap, "
    "false_computation=dear"
  )
  (found,) = overlap_report(program(start, line, done, others=others)).collectives
  assert names(found) == ["b"] and found.flops == FLOPS


def test_of_branches_the_one_that_sends_most_counts():
  others = f"""
  one {{
    p = u32[8,64] parameter(0)
    ROOT a = u32[8,64] all-to-all(p), {GROUPS}, dimensions={{0}}
  }}
  both {{
    q = u32[8,64] parameter(0)
    b = u32[8,64] all-to-all(q), {GROUPS}, dimensions={{0}}
    ROOT c = u32[8,64] all-to-all(b), {GROUPS}, dimensions={{0}}
  }}"""
  line = (
    "r = u32[8,64] conditional(s, x, x), true_computation=one, false_computation=both"
  )
  text = program(line, others=others)
  found = overlap_report(text)
  assert found.bytes_sent == wire_report(text).bytes_sent == 2 * 7 * 4 * 64
  assert (found.exposed_bytes, found.exposed_share) == (2 * 7 * 4 * 64, 1)


def test_a_wrapped_loop_of_collectives_is_asynchronous_as_a_whole():
  """All its trips have what is between the ends of the wrapping beside them."""
  others = f"""
  condition {{
    c.p = (u32[8,64]) parameter(0)
    ROOT c.r = pred[] constant(true)
  }}
  trip {{
    p = (u32[8,64]) parameter(0)
    y = u32[8,64] get-tuple-element(p), index=0
    z = u32[8,64] all-to-all(y), {GROUPS}, dimensions={{0}}
    ROOT r = (u32[8,64]) tuple(z)
  }}
  inside {{
    v = u32[8,64] parameter(0)
    u = (u32[8,64]) tuple(v)
    ROOT l = (u32[8,64]) while(u), condition=condition, body=trip,
      backend_config={{"known_trip_count":{{"n":"3"}}}}
  }}"""
  start = "a = ((u32[8,64]), (u32[8,64])) async-start(x), calls=inside"
  text = program(start, PRODUCT, "b = (u32[8,64]) async-done(a)", others=others)
  (found,) = overlap_report(text).collectives
  assert found.collective.times == 3 and names(found) == ["m"]


def test_the_products_of_libraries_count():
  """XLA calls cuBLAS with the dimensions of the dot."""
  start, done = form("all-to-all").start, form("all-to-all").done
  line = """m = (f32[512,512], s8[1024]) custom-call(w, w),
    custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{
    "dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],
    "rhs_contracting_dimensions":["0"]}}}"""
  (found,) = overlap_report(program(start, line, done)).collectives
  assert names(found) == ["m"] and found.flops == FLOPS


def test_a_text_without_an_order_is_refused():
  """That is what lower() has before it compiles."""
  text = program("a = u32[64,64] all-gather(x), dimensions={0}")
  with pytest.raises(ValueError, match=r"`program` must be scheduled.*compile\(\)"):
    overlap_report(text.replace("is_scheduled=true, ", ""))


def test_a_start_without_an_end_is_refused():
  with pytest.raises(ValueError, match="a -done for each -start"):
    overlap_report(program(form("all-to-all").start))


def test_all_that_the_wire_report_refuses_is_refused():
  with pytest.raises(TypeError, match="`program` must be a jax.stages.Compiled"):
    overlap_report(lambda x: x)
  with pytest.raises(ValueError, match="HloModule"):
    overlap_report("HLO")


@pytest.fixture(scope="module")
def stepped():
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  optimizer = gradcomp.qsgd(bits=4, axis_name="data", message_bytes=1)

  def step(layers, x):
    loss = lambda layers: jnp.sum((x @ layers[0] @ layers[1]) ** 2)
    grads = jax.grad(loss)(layers)
    return optimizer.update(grads, optimizer.init(grads))[0]

  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(jax.P(), jax.P("data")),
    out_specs=jax.P(),
    check_vma=False,
  )
  shapes = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 2
  return jax.jit(mapped).lower(shapes, jax.ShapeDtypeStruct((8, 128), jnp.float32))


def test_on_a_cpu_all_is_synchronous(stepped):
  """Of what lower() returns, of what compile() does, and of its text."""
  compiled = stepped.compile()
  report = overlap_report(stepped)
  assert report.exposed_share == 1 and report.hints == ()
  assert all(x.synchronous and not x.beside for x in report.collectives)
  assert report.bytes_sent == wire_report(compiled).bytes_sent > 0
  assert overlap_report(compiled) == report
  assert {x.collective.axis for x in report.collectives} == {"data"}
  assert len(overlap_report(compiled.as_text()).collectives) == len(report.collectives)


def test_the_table_says_what_is_exposed(stepped):
  lines = str(overlap_report(stepped)).splitlines()
  assert lines[0].split()[:3] == ["collective", "dtype", "axis"]
  assert "kcycles" not in lines[0]
  count = len(lines) - 2
  assert all(" synchronous " in line for line in lines[1:-1])
  assert lines[-1].startswith(f"Exposed: {count} of {count} collectives, 1 of ")


def test_a_program_without_collectives_exposes_nothing():
  report = overlap_report(program(PRODUCT))
  assert report.exposed_share == report.bytes_sent == 0
  assert str(report) == "The program has no collectives."


def test_what_the_wire_report_cannot_count_is_said():
  text = program("t = token[] after-all()", "i = ((f32[8]), token[]) infeed(t)")
  assert str(overlap_report(text)).endswith("Not counted: i.")


TILED = f"a = u32[8,64]{{1,0:T(8,128)}} all-to-all(x), {GROUPS}, dimensions={{0}}"
COMBINED = f"""a = ((u32[8], u32[8]), (u32[64], u32[64])) all-gather-start(y, z),
    {GROUPS}, dimensions={{0}},
    backend_config={{"collective_backend_config":{{"is_sync":false}}}}
  b = (u32[64], u32[64]) all-gather-done(a)"""


@pytest.mark.parametrize(
  ("lines", "flag"),
  [
    ([TILED], "'xla_tpu_enable_async_all_to_all': True"),
    (
      ["y = u32[8] parameter(3)", "z = u32[8] parameter(4)", COMBINED],
      "'xla_gpu_all_gather_combine_threshold_bytes': 1",
    ),
    ([TILED.replace(":T(8,128)", "")], None),
    ([form("all-to-all").start, PRODUCT, form("all-to-all").done], None),
  ],
)
def test_a_flag_that_would_help_is_named(lines, flag):
  report = overlap_report(program(*lines))
  last = str(report).splitlines()[-1]
  if flag is None:
    assert report.hints == () and last.startswith("Exposed: ")
  else:
    assert report.hints == (last,) and flag in last


# Cut from programs of the compilers by benchmarks/compilers/cut.py: a net of four
# layers. How many products are beside each collective; None for a synchronous one.
HLO = pathlib.Path(__file__).parent / "hlo" / "scheduled"
SENT, GATHERED = "all-to-all", "all-gather"
RECORDED = {
  "v5e": [
    *[(SENT, None), (GATHERED, 6), (SENT, None), (SENT, None), (SENT, None)],
    *[(GATHERED, None)] * 3,
  ],
  "v5p_async": [
    *[(SENT, 1), (GATHERED, None), (SENT, 1), (GATHERED, None)],
    *[(SENT, 0), (SENT, 0), (GATHERED, None), (GATHERED, None)],
  ],
  "tpu7x": [
    *[(SENT, None), (GATHERED, 6), (SENT, None), (GATHERED, 4)],
    *[(SENT, None), (GATHERED, 2), (SENT, None), (GATHERED, 0)],
  ],
  "two_slices": [
    *[(SENT, 6), (SENT, 4), (SENT, 1), (SENT, 0)],
    *[(GATHERED, 0)] * 4,  # between slices
    *[(GATHERED, None)] * 4,  # inside
  ],
  "h100": [(SENT, 2), (SENT, 1), (SENT, 0), (SENT, 0), (GATHERED, 0)],
}


@pytest.mark.parametrize("file", RECORDED)
def test_their_bytes_are_those_that_the_parser_of_xla_reads(file):
  text = (HLO / f"{file}.hlo").read_text()
  assert overlap_report(text).bytes_sent == oracle.bytes_sent(text)


@pytest.mark.parametrize("file", RECORDED)
def test_programs_of_compilers_have_their_overlaps(file):
  text = (HLO / f"{file}.hlo").read_text()
  report = overlap_report(text)
  found = [
    (
      x.collective.kind,
      None if x.synchronous else sum(work.flops > 0 for work in x.beside),
    )
    for x in report.collectives
  ]
  assert found == RECORDED[file]
  assert report.bytes_sent == wire_report(text).bytes_sent
  assert 0 < report.exposed_share < 1
  # Each product is that of a worker's batch and a layer, both of 2048.
  assert [x.flops for x in report.collectives] == [(n or 0) * 2**34 for _, n in found]
  timed = file != "h100"  # only compilers for TPUs estimate cycles
  assert [x.cycles > 0 for x in report.collectives] == [
    timed and bool(n) for _, n in found
  ]
