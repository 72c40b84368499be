"""The walk through a program: called computations, loops, branches and fusions."""

import pytest
from jaxlib import _hlo

from gradcomp import wire_report
from tests.report import texts
from tests.report.texts import G8, NBYTES, gather, hlo, only, rows

COMPILED = texts.read("compiled")
SWAP = "collective-permute(y), source_target_pairs={{0,1},{1,0}}"
PAIRS = "channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs={{0,1}}}"


def loop(next_, limit):
  """A body whose counter goes from i over i + 1 to the next one, and its condition."""
  return f"""
body {{
  s = (s32[], X) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  o = s32[] constant(1)
  m = s32[] add(i, o)
  n = s32[] {next_}
  y = X get-tuple-element(s), index=1
  p = X {SWAP}
  ROOT t = (s32[], X) tuple(n, p)
}}
condition {{
  s = (s32[], X) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  k = s32[] {limit}
  ROOT c = pred[] compare(i, k), direction=LT
}}
"""


BEGIN = """o = s32[] constant(1)
  c = s32[] copy(o)
  t = (s32[], X) tuple(c, x)
  """
WHILE = "(s32[], X) while(t), condition=condition, body=body"
TRIPS = (
  'backend_config={"known_induction_variable":{"tuple_index":"0"},'
  '"known_trip_count":{"n":"5"}}'
)
SENT = ("collective-permute", 2, NBYTES)
# A program, the kind, workers and bytes of what it sends, and how often: a computation
# with a thread, a send that XLA prints as send-start, a sum that it prints as calls
# where it is in place, and loops whose condition is known, of one or two additions.
WRITTEN = {
  "thread": (
    hlo(
      f"""s = ((X), X, u32[]) async-start(x), async_execution_thread="h", calls=inside
  e = X async-done(s)
  g = f32[64,128] all-gather(e), {G8}, dimensions={{0}}""",
      """on_the_host {
  x = X parameter(0)
  ROOT y = X negate(x)
}, execution_thread="h"
inside {
  x = X parameter(0)
  ROOT y = X custom-call(x), custom_call_target="f", called_computations={on_the_host}
}, execution_thread="h"
""",
    ),
    ("all-gather", 8, 7 * NBYTES),
    1,
  ),
  "send_wrapped": (
    hlo(
      f"""k = token[] after-all()
  v = (X, u32[], token[]) recv(k), {PAIRS}
  vd = (X, token[]) recv-done(v), channel_id=1
  s = ((X, token[]), (X, u32[], token[]), s32[]) async-start(x, k), calls=inside
  sd = (X, u32[], token[]) async-done(s)""",
      f"""inside {{
  x = X parameter(0)
  k = token[] parameter(1)
  ROOT s = (X, u32[], token[]) send(x, k), {PAIRS}
}}""",
    ),
    SENT,
    1,
  ),
  "sum_in_place": (
    hlo(f"r = f32[1,128] reduce-scatter(x), {G8}, dimensions={{0}}, to_apply=add"),
    ("reduce-scatter", 8, 7 * NBYTES // 8),
    1,
  ),
}
for name, next_, times in (("trips", "copy(m)", 7), ("trips_by_steps", "add(o, m)", 4)):
  text = hlo(f"{BEGIN}w = {WHILE}", loop(next_, "constant(8)"))
  WRITTEN[name] = (text, SENT, times)


@pytest.mark.parametrize("name", WRITTEN)
def test_each_construct_is_counted(name):
  text, sent, times = WRITTEN[name]
  found = only(wire_report(text))
  assert (rows(text), found.times) == ([sent], times)
  assert not found.trips_unknown and found.in_loop == (times > 1)


PROGRAMS = COMPILED | {name: text for name, (text, *_) in WRITTEN.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_form_of_as_text_has_the_same_bytes(name):
  """With the types of operands and percent signs, or without."""
  module, text = _hlo.hlo_module_from_text(PROGRAMS[name]), PROGRAMS[name]
  forms = _hlo.HloPrintOptions(), _hlo.HloPrintOptions.short_parsable()
  sent = {wire_report(module.to_string(form)).bytes_sent for form in forms}
  assert sent == {wire_report(text).bytes_sent}


SUM = "all-reduce(i), replica_groups={}, to_apply=add"  # a limit that nobody knows
NESTED = f"""{loop("copy(i)", SUM)}
inner {{
  p = X parameter(0)
  ROOT w = {WHILE}
}}
fused {{
  p = X parameter(0)
  ROOT rs = f32[1,128] reduce-scatter(p), {G8}, dimensions={{0}}, to_apply=add
}}
called {{
  p = X parameter(0)
  ROOT f = f32[1,128] fusion(p), kind=kCustom, calls=fused
}}
outer {{
  s = (s32[], X) parameter(0)
  v = X get-tuple-element(s), index=1
  c = f32[1,128] call(v), to_apply=called
  h = X custom-call(v), called_computations={{inner}}
  ROOT t = (s32[], X) tuple(s, v)
}}
never {{
  ROOT no = pred[] constant(false)
}}
known {{
  t = (s32[], X) parameter(0)
  ROOT w = {WHILE}, {TRIPS}
}}
one {{
  p = X parameter(0)
  ROOT g = f32[64,128] all-gather(p), {G8}, dimensions={{0}}
}}
"""
LOOP = f"(s32[], X) while(t), condition=never, body=outer, {TRIPS}"
BRANCH = f"r = X all-to-all(x), {G8}\n  c = X conditional(i, x, x), "
CALLED = "all-reduce 5?, collective-permute 5?, reduce-scatter 5"
SEVERAL = "all-gather 1|, all-reduce 1?|, all-to-all 1, collective-permute 1?|"
# Lines, and of each collective its runs: ? where a loop around it has no known trip
# count, and | in a branch. A condition runs once more than its body.
RUNS = {
  "a loop": (f"w = {WHILE}, {TRIPS}", "all-reduce 6, collective-permute 5"),
  # A fusion in a call in a loop, which runs twice; a loop of unknown count inside.
  "calls in a loop": (f"w = {LOOP}\n  z = {LOOP}", f"{CALLED}, {CALLED}"),
  "a known loop in an unknown one": (
    "w = (s32[], X) while(t), condition=condition, body=known",
    "all-reduce 1?, all-reduce 6?, collective-permute 5?",
  ),
  "branches": (f"{BRANCH}branch_computations={{one, inner}}", SEVERAL),
  "two branches": (f"{BRANCH}true_computation=one, false_computation=inner", SEVERAL),
}


@pytest.mark.parametrize("name", RUNS)
def test_calls_multiply_and_are_followed(name):
  lines, expected = RUNS[name]
  report = wire_report(hlo(lines, NESTED))
  marks = lambda c: "?" * c.trips_unknown + "|" * c.in_branch
  runs = [f"{c.kind} {c.times}{marks(c)}" for c in report.collectives]
  assert sorted(runs) == sorted(expected.split(", "))
  assert [c.in_loop for c in report.collectives].count(False) == 2 * ("branch" in name)
  assert ("a lower bound" in str(report)) == ("?" in expected)
  assert ("an upper bound" in str(report)) == ("branch" in name)


MEAN = "gradcomp_mean_1024_over_8"
NONE = "none {\n  ROOT x = u8[8] parameter(0)\n}\n"


def sending(name, scope, nbytes=NBYTES):
  """A computation that gathers so many bytes."""
  line = f"ROOT g = u8[9] {gather(scope, nbytes)}"
  return f"{name} {{\n  x = u8[8] parameter(0)\n  {line}\n}}\n"


def test_each_branch_has_a_ratio_of_one_plain_mean():
  """One in another and one beside it, of the same name, and a branch of nothing."""
  dense = 2 * 7 * NBYTES // 8
  computations = f"""
{NONE}{sending("half", MEAN, NBYTES // 8)}two {{
  x = u8[8] parameter(0)
  h = u8[9] {gather(MEAN, NBYTES // 4)}
  ROOT c = u8[9] conditional(i, x, x), branch_computations={{none, half}}
}}
{sending("three", "gradcomp_stage", NBYTES // 2)}"""
  line = "conditional(i, x, x)"
  entry = f"""b = u8[9] {line}, branch_computations={{half, three, two}}
  c = u8[9] {line}, true_computation=three, false_computation=none"""
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
  assert f"\n{main}/b[2] two/c: 1.5 x or 1.75 x, by branch.\n" in str(report)


def test_of_many_conditionals_the_first_are_printed():
  branches = "conditional(i, x, x), branch_computations={none, one}"
  entry = "\n".join(f"c.{i} = u8[9] {branches}" for i in range(6))
  text = hlo(entry, NONE + sending("one", MEAN))
  *_, last, more = str(wire_report(text)).splitlines()
  assert last == "main.0_spmd/c.3: 3.333 x or 4 x, by branch."
  assert more == "2 more: see branch_ratios."


def test_a_repeat_is_of_the_same_plain_mean():
  """A codec that does not fit sends once more, in a branch behind the first send."""
  branches = "conditional(i, x, x), branch_computations={none, again}"
  entry = f"g = u8[9] {gather(MEAN)}\n  c = u8[9] {branches}"
  again = sending("again", f"cond/gradcomp_repeat/{MEAN}")
  report = wire_report(hlo(entry, NONE + again))
  assert (report.ratio, [*report.branch_ratios.values()]) == (8, [(4, 8)])


def test_a_mean_in_front_of_branches_is_taken_again():
  """It is as large as the mean of each branch, and not as those of both."""
  entry = f"""m = X all-reduce(x), {G8}, to_apply=add
  c = u8[9] conditional(i, m, m), branch_computations={{one, two}}"""
  report = wire_report(hlo(entry, sending("one", MEAN) + sending("two", MEAN, 99)))
  assert [c.again for c in report.collectives] == [True, False, False]


def test_strings_and_names_are_not_parsed():
  """Names of scopes and instructions, and the code of kernels, may hold anything."""
  entry = rf"""all-gather = X copy(x), sharding={{replicated}}
  k = X custom-call(all-gather), custom_call_target="all-reduce(x)",
    backend_config="body=%missing calls=\"%gone\" all-reduce(%x)"
  a = X all-reduce(all-gather), {G8}, to_apply=add, metadata={{op_type="x"
    op_name="f/[\"replica_groups={{{{0}}}}\"]/calls=%no/\"g\""}}"""
  collective = only(wire_report(hlo(entry)))
  assert collective.bytes_sent == 2 * 7 * NBYTES // 8
  assert collective.scope == r"f/[\"replica_groups={{0}}\"]/calls=%no/\"g\""
