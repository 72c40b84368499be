"""The facts of a program are those of its text, and the record of programs is whole."""

import pytest

from benchmarks.compilers import bars, pages, record, steps, targets
from benchmarks.compilers import program as hlo
from tests.support import installs
from tests.support.pages import ROOT

LOOP = """\
HloModule jit_step, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(128)} parameter(0)
  ROOT %inside = f32[8]{0:T(128)} add(%p, %p), backend_config={"estimated_cycles":"900"}
}

%less (i: s32[]) -> pred[] {
  %i = s32[]{:T(128)} parameter(0)
  %c = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[]{:T(512)} compare(%i, %c), direction=LT
}

%condition (t: (s32[], f32[8])) -> pred[] {
  %t = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %found = pred[]{:T(512)} fusion(%n), kind=kLoop, calls=%less
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %x = f32[8]{0:T(128)} get-tuple-element(%t), index=1
  %y = f32[8] fusion(%x), calls=%fused, backend_config={"estimated_cycles":"10"}
  %sent = f32[8]{0:T(128)} collective-permute(%y), source_target_pairs={{0,1},{1,0}}
  ROOT %r = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%n, %sent)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0:T(128)} parameter(0)
  %flat = f32[2,4]{1,0:T(8,128)} reshape(%a)
  %zero = s32[]{:T(128)} constant(0)
  %in = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(128)}) tuple(%zero, %a)
  %loop = (s32[], f32[8]) while(%in), condition=%condition, body=%body
  ROOT %out = f32[8]{0:T(128)} get-tuple-element(%loop), index=1
}
"""


def test_what_a_loop_runs_counts_as_often_as_it_runs():
  program = hlo.Program(LOOP)
  runs = {x.instruction.name: x for x in program.runs() if hlo.launches(x.instruction)}
  times = {name: run.times for name, run in runs.items()}
  assert times == {"flat": 1, "y": 6, "sent": 6}
  # A fusion's own estimate counts, and not those of what is inside.
  assert hlo.cycles(runs["y"].instruction) == 10
  assert [x["times"] for x in program.collectives()] == [6]
  assert [name for name, x in runs.items() if hlo.unpriced(x.instruction)] == ["flat"]


def test_a_loop_whose_trips_the_text_does_not_say_has_none():
  for old, new, trips in (
    ("constant(6)", "parameter(1)", None),
    ("direction=LT", "direction=NE", None),
    ("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}', 3),
  ):
    program = hlo.Program(LOOP.replace(old, new))
    (loop,) = (x for x in program.runs() if x.instruction.opcode == "while")
    assert hlo.trips_of(program.module, loop.instruction) == trips


# Each from a compiled program: dtype, shape and layout, bytes, and with the tiles'.
def test_an_array_takes_its_tiles():
  for text, size, padded in (
    ("u32[8,1,130]{2,1,0:T(1,128)}", 8 * 130 * 4, 8 * 256 * 4),
    ("f32[16384,1,16,4]{3,2,1,0:T(8,128)}", 1 << 22, 1 << 27),
    ("bf16[3,130]{1,0:T(8,128)(2,1)S(1)}", 780, 8 * 256 * 2),
    ("s4[9]{0:T(128)E(4)}", 5, 64),
    ("f32[7,3]{1,0}", 84, 84),
  ):
    (array,) = hlo.arrays(text)
    assert (array.bytes, array.padded) == (size, padded)


ONE = """\
HloModule m, is_scheduled=true

%gather (p: u32[16]) -> u32[128] {
  %p = u32[16]{0:T(128)} parameter(0)
  ROOT %g = u32[128]{0:T(128)} all-gather(%p), frontend_attributes={chain_id="0"}
}

ENTRY %main (b: u32[16]) -> u32[16] {
  %b = u32[16]{0:T(128)} parameter(0)
  REST
}
"""
# How a program starts and ends a collective.
START = """%s = (u32[16]{0}, u32[16]{0}) all-to-all-start(%b), \
backend_config={"is_sync":SYNC}
  ROOT %d = u32[16]{0} all-to-all-done(%s)"""
CALL = """%s = ((u32[16]{0}), u32[128]{0}) call-start(%b), to_apply=%gather
  ROOT %d = u32[128]{0} call-done(%s)"""
# An asynchronous fusion repeats a collective that runs once.
FUSED = "".join(f"%{x} = u32[128]{{0}} fusion(%b), calls=%gather\n  " for x in "xyz")


def test_a_start_that_the_compiler_made_synchronous_is_so():
  for text, kind, size, asynchronous in (
    (START.replace("SYNC", "true"), "all-to-all", 64, False),
    (START.replace("SYNC", "false"), "all-to-all", 64, True),
    (CALL, "all-gather", 64, True),
    (FUSED, "all-gather", 64, True),
  ):
    (found,) = hlo.Program(ONE.replace("REST", text)).collectives()
    got = found["kind"], found["bytes"], found["asynchronous"]
    assert got == (kind, size, asynchronous)


TABLES = ("codecs", "steps", "overlap")
ROWS = {name: record.read(record.FOLDER / f"{name}.jsonl") for name in TABLES}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_cases_that_compile_and_its_page(table, tmp_path):
  named = {x: record.cases(table, x, "all") for x in targets.TARGETS}
  assert all(case in named[target] for target, case in ROWS[table])
  assert {target for target, _ in ROWS["steps"]} == set(targets.TARGETS)
  for name, row in ROWS[table].items():
    assert "error" not in row and "host send" not in str(row["collectives"]), name
  record.write(tmp_path / f"{table}.jsonl", ROWS[table])
  pages.write(tmp_path, table)
  for name in (f"{table}.md", f"{table}.jsonl"):
    assert (tmp_path / name).read_text() == (record.FOLDER / name).read_text()


def test_programs_of_codecs_hold_their_bars():
  """A bar of its own is needed, and not higher than it must be."""
  rows = list(bars.held(ROWS["codecs"].values()))
  assert {row["target"] for row in rows} == {"v5e", "v6e", "v5p", "tpu7x"}
  of = lambda row: bars.own().get((row["codec"], row["operation"]))
  common = lambda row: bars.COMMON[row["operation"]]
  assert not [x["case"] for x in rows if bars.above(x, of(x) or common(x))]
  assert bars.own() == bars.needed(rows), "python -m benchmarks.compilers --bars"
  assert all(bar.reason for bar in bars.own().values())


def test_the_wire_of_a_step_is_what_explain_says():
  """And its ratio that to the plain step's bytes, but for a thousandth: the loss.

  XLA adds messages over several slices as it chooses itself, and then sends up to half
  as much again; and it pads small sums between them, of the loss above all.
  """
  summed, plain = ("dense", "qsgd 4 bits, psum", "randomk", "powersgd"), steps.PLAIN
  wrong, between = [], []
  for (target, case), row in ROWS["steps"].items():
    if case == f"{plain}, unrolled, shard_map" and row["cycles"]:
      assert sum(row["cycles"].values()) == row["unit"]["cycles"], target
    sent, explained = row["wire"].get("bytes"), row["wire"]["explained"]
    if explained is None:
      continue
    several = targets.TARGETS[target].slices > 1
    if several and case.rsplit(", ", 2)[0] in summed:
      between.append(sent / explained)
      continue
    dense = ROWS["steps"][target, f"{plain}, unrolled, shard_map"]["wire"]["bytes"]
    ratio = row["wire"]["ratio"]
    ratio = sent / dense if ratio is None and several else ratio
    wanted = pytest.approx(explained, rel=1e-3, abs=10_000 if several else 0)
    if sent != wanted or ratio != pytest.approx(sent / dense, rel=1e-3):
      wrong.append((target, case))
  assert not wrong
  assert between and 0.999 < min(between) and max(between) < 1.6


def test_what_rose_is_said():
  row = next(iter(ROWS["codecs"].values()))
  layer = ROWS["overlap"]["H100", "a message a layer"]
  exposed = "exposed bytes rose from 7,454,720 to 14,909,440"
  temporaries = "temporaries rose from 100,000,000 to 1,000,000,000"
  for new, old, *said in (
    (row, row),
    (row, None),
    (row | {"versions": {"jax": "0"}}, row | {"temporaries": 0}),
    (*(row | {"temporaries": x} for x in (10**9, 10**8)), temporaries),
    (*(layer | {"exposed_share": x} for x in (1.0, 0.5)), exposed),
    ({"error": "no"}, row, "it does not compile: no"),
  ):
    assert [x[: len(said[0])] for x in record.dearer(new, old)] == said


@pytest.mark.parametrize("target", ["v5e", "H100"])
def test_a_codec_compiles_as_the_table_says(target):
  """In a process of its own, since compilers read the environment at their start."""
  if missing := targets.TARGETS[target].missing():
    pytest.skip(f"there is not {missing} here")
  options = ["--tables", "codecs", "--targets", target, "--quick"]
  options += ["--cases", "4 bits, encode"]
  said = installs.run("-m", "benchmarks.compilers", *options, cwd=ROOT)
  assert f"{target}, QSGD 4 bits, encode, 4096 x 4096:" in said


# What docs/results/overlap.md says of the programs of these targets: of each all-to-all
# in turn, whether nothing waits for it, and whether products are beside it.
EACH, INSIDE = "a message a layer", "inside of a loop of layers"
FLAG = "xla_tpu_enable_async_all_to_all"
CORE = "xla_tpu_enable_sparse_core_collective_offload_"
CORES = f"{CORE}all_gather, {CORE}dense_all_to_all"
GPUS, SLICES, THREE = ("H100", "H200", "B200"), "2 slices of v5e", ("v5e", "v6e", "v5p")


def test_messages_of_layers_are_sent_beside_products():
  """One message has none beside it, and behind a loop of layers all is exposed."""
  for (_, case), row in ROWS["overlap"].items():
    assert case != "one message" or not any(x["products"] for x in row["overlaps"])
    assert case != "behind a loop of layers" or row["exposed_share"] == 1
  for chips, case, told, beside in (
    (GPUS, EACH, "exposed", None),
    (THREE, f"{EACH}, {FLAG}", "synchronous", None),  # in a slice they need the flag
    (THREE, f"{EACH}, in turn, {FLAG}", None, [True, True, True, False]),
    (["tpu7x"], f"{EACH}, in turn, {FLAG}", None, [True, True, False, False]),
    ([SLICES], EACH, None, [True, True, True, False]),  # between slices they do not
    ([SLICES], f"{EACH}, hierarchical", None, [True, True, True, False]),
  ):
    for chip in chips:
      found = ROWS["overlap"][chip, case]["overlaps"]
      sent = [x for x in found if x["kind"] == "all-to-all"]
      assert sent and not any(x[told] for x in sent if told), (chip, case)
      if chip == SLICES:
        sent = [x for x in sent if not x["synchronous"]]
      assert beside in (None, [x["products"] > 0 for x in sent]), (chip, case)
  sent = [x for x in ROWS["overlap"][SLICES, INSIDE]["overlaps"] if x["times"] == 6]
  assert all(x["products"] > 0 for x in sent if not x["synchronous"])
  assert [x["kind"] for x in sent if x["synchronous"]] == ["all-gather"]


def test_no_collective_in_a_loop_of_layers_is_exposed():
  """Each stage of an exchange has work beside it, and some have products."""
  flags = [("v5e", FLAG), ("tpu7x", FLAG), ("v6e", CORES), ("tpu7x", CORES)]
  given = [(target, f"{INSIDE}, {flag}", 6) for target, flag in flags]
  given += [(SLICES, f"{INSIDE}, hierarchical, {FLAG}", 4)]
  for target, case, trips in given + [(gpu, INSIDE, 6) for gpu in GPUS]:
    loop = [x for x in ROWS["overlap"][target, case]["overlaps"] if x["times"] > 1]
    kinds = {(kind, trips) for kind in ("all-to-all", "all-gather")}
    assert {(x["kind"], x["times"]) for x in loop} == kinds, target
    assert not [x for x in loop if x["synchronous"] or x["exposed"]], target
    assert any(x["products"] for x in loop), target
