"""What computes beside a collective is what the schedule has between its two ends."""

import re

import pytest

from gradcomp import overlap_report, wire_report
from tests.report import schedules
from tests.report.schedules import DONE, FLOPS, PRODUCT, START, STARTED, form, names

every_form = pytest.mark.parametrize("name", schedules.FORMS)
BETWEEN = {
  "product": PRODUCT,
  "scalar": "m = f32[] multiply(s, s)",
  "view": "m = f32[262144] bitcast(w)",
  "transfer": "m = (W, W, u32[]) copy-start(w)",
  "sum": "m = W add(w, w)",
  "nothing": "",
}


@every_form
def test_what_is_between_the_ends_is_beside(name):
  """Of each construct; only work of more bytes than are sent hides it."""
  kind, start, done, inside = form(name)
  before, after = (PRODUCT.replace("m =", f"{x} =") for x in "kn")
  for between, line in BETWEEN.items():
    text = schedules.program(before, start, line, done, after, inside=inside)
    report = overlap_report(text)
    (found,) = report.collectives
    works = between in ("product", "scalar", "sum")
    assert names(found) == ["m"] * works and not found.synchronous, between
    assert found.flops == FLOPS * (between == "product")
    assert found.exposed == (between not in ("product", "sum")), between
    assert report.exposed_share == found.exposed
    assert found.collective == wire_report(text).collectives[0]
    assert found.collective.kind == kind and report.bytes_sent > 0


@every_form
def test_two_on_their_way_have_the_same_work_beside(name):
  """And are not each other's. A third of the bytes is exposed."""
  one, two, three = (form(name, x) for x in "abc")
  lines = [one.start, two.start, PRODUCT, one.done, two.done, three.start, three.done]
  inside = "\n".join([one.inside, two.inside, three.inside])
  text = schedules.program(*lines, inside=inside)
  report = overlap_report(text)
  assert [names(x) for x in report.collectives] == [["m"], ["m"], []]
  assert report.bytes_sent == wire_report(text).bytes_sent == 3 * report.exposed_bytes


MARK = 'backend_config={"collective_backend_config":{"is_sync":true}}'
MARKED = f"a = (X, U) all-gather-start(x), {schedules.GROUPS}, {MARK}"


def test_nothing_is_beside_a_synchronous_one():
  """Also where XLA writes it as a start and marks it."""
  plain = [f"a = U all-gather(x), {schedules.GROUPS}"]
  for lines in (plain, [MARKED, PRODUCT, "b = U all-gather-done(a)"]):
    found = schedules.the_one(*lines)
    assert found.synchronous and found.exposed and not found.beside


CARRIED = "X, W, f32[]"
FILLED = f"t = ({CARRIED}) tuple(x, w, s)"


def loop(body, carried=CARRIED):
  """Computations of a loop over a tuple of x, w, s and more, and its instruction."""
  return (
    f"""
condition {{
  c.p = ({carried}) parameter(0)
  ROOT c.r = pred[] constant(true)
}}
body {{
  p = ({carried}) parameter(0)
  x = X get-tuple-element(p), index=0
  w = W get-tuple-element(p), index=1
  s = f32[] get-tuple-element(p), index=2
  {body}
}}
""",
    f"l = ({carried}) while(t), condition=condition, body=body, "
    'backend_config={"known_trip_count":{"n":"5"}}',
  )


@every_form
def test_in_a_loop_each_trip_is_one_run(name):
  """Each has the work of its own trip beside it, and all of them send."""
  _, start, done, inside = form(name)
  root = f"ROOT r = ({CARRIED}) tuple(x, w, s)"
  called, line = loop("\n  ".join([start, PRODUCT, done, root]))
  text = schedules.program(FILLED, line, inside=inside + called)
  report = overlap_report(text)
  (found,) = report.collectives
  assert found.collective.times == 5 and found.flops == FLOPS
  assert report.bytes_sent == wire_report(text).bytes_sent
  assert report.exposed_share == 0


def carried(name, *lines, before="", after=""):
  """What is beside a collective in front of a loop, and beside those that it carries.

  ``lines`` are those of the body: START and DONE in them become the start of the next
  and the end of the last.
  """
  one, two = form(name, "a"), form(name, "b")
  value = {"slices": "a.in", "updated": "a.next"}.get(name, "a")
  (type_,) = re.findall(rf"^\s*{re.escape(value)} = (\(.*\)|S) \S+\(", one.start, re.M)
  inside = f"{CARRIED}, {type_}"
  # The ends of the body and of the program read the loop's tuple.
  end = lambda source: one.done.replace(f"({value})", f"({source})")
  parts = {"START": two.start, "DONE": end("last")}
  body = [f"last = {type_} get-tuple-element(p), index=3"]
  body += [parts.get(line, line) for line in lines]
  body += [f"ROOT r = ({inside}) tuple(x, w, s, {value.replace('a', 'b', 1)})"]
  called, line = loop("\n  ".join(body), inside)
  text = schedules.program(
    *(one.start, before, f"t = ({inside}) tuple(x, w, s, {value})", line),
    *(f"final = {type_} get-tuple-element(l), index=3", after, end("final")),
    inside="\n".join([one.inside, two.inside, called]),
  )
  report = overlap_report(text)
  assert report.bytes_sent == wire_report(text).bytes_sent
  assert [x.collective.times for x in report.collectives] == [1, 5]
  return [names(x) for x in report.collectives]


@pytest.mark.parametrize("name", [x for x in schedules.FORMS if x != "chain"])
def test_a_loop_can_carry_a_collective_to_its_next_trip(name):
  """From the start on: the rest of the trip, and the next one up to the end."""
  assert carried(name, "DONE", PRODUCT, "START") == [[], []]
  assert carried(name, "START", PRODUCT, "DONE") == [["m"], ["m", "m"]]
  assert carried(name, "START", "DONE", PRODUCT) == [[], ["m"]]
  assert carried(name, PRODUCT, "START", "DONE") == [["m"], ["m"]]
  around = {x: PRODUCT.replace("m =", f"{x} =") for x in ("before", "after")}
  assert carried(name, "DONE", PRODUCT, "START", **around) == [["before"], []]


def test_a_loop_that_only_carries_it_is_beside():
  """All trips of it, as one piece of work."""
  inside = f"{CARRIED}, {STARTED}"
  last = f"last = {STARTED} get-tuple-element(p), index=3"
  root = f"ROOT r = ({inside}) tuple(x, w, s, last)"
  called, line = loop("\n  ".join([last, PRODUCT, root]), inside)
  final = f"final = {STARTED} get-tuple-element(l), index=3"
  lines = [START, f"t = ({inside}) tuple(x, w, s, a)", line, final]
  found = schedules.the_one(*lines, DONE.replace("(a)", "(final)"), inside=called)
  assert names(found) == ["l"] and found.flops == 5 * FLOPS


ROOT = "ROOT r = X copy(a.end)"
CALL = f"y = ({STARTED}) call(x, w), to_apply=called"
TAKE = f"z = {STARTED} get-tuple-element(y), index=0"
GIVEN = f"a = {STARTED} parameter(2)"
# The lines of a computation that is called, and those around the call: both ends,
# the start or the end is inside.
CALLS = [
  ([START, PRODUCT, DONE, ROOT], ["y = X call(x, w), to_apply=called"]),
  (
    [START, PRODUCT, f"ROOT r = ({STARTED}) tuple(a)"],
    [CALL, TAKE, DONE.replace("(a)", "(z)")],
  ),
  ([GIVEN, PRODUCT, DONE, ROOT], [START, "y = X call(x, w, a), to_apply=called"]),
]


@pytest.mark.parametrize(("inner", "outer"), CALLS)
def test_ends_may_lie_in_computations_that_are_called(inner, outer):
  lines = "\n".join(["x = X parameter(0)", "w = W parameter(1)", *inner])
  found = schedules.the_one(*outer, inside=f"called {{\n{lines}\n}}")
  assert names(found) == ["m"]


def test_a_wrapped_loop_of_collectives_is_asynchronous_as_a_whole():
  """All its trips have what is between the ends of the wrapping beside them."""
  send = f"z = X all-to-all(x), {schedules.GROUPS}"
  called, line = loop(f"{send}\n  ROOT r = ({CARRIED}) tuple(z, w, s)")
  inside = f"{called}inside {{\n  t = ({CARRIED}) parameter(0)\n  ROOT {line}\n}}"
  start = f"a = ((({CARRIED})), ({CARRIED})) async-start(t), calls=inside"
  lines = [FILLED, start, PRODUCT, f"b = ({CARRIED}) async-done(a)"]
  found = schedules.the_one(*lines, inside=inside)
  assert found.collective.times == 5 and names(found) == ["m"]
