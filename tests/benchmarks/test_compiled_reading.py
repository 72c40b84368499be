"""The facts of a program are those that its scheduled text has."""

import pytest

from benchmarks.compilers import program as hlo

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
  %y = f32[8]{0:T(128)} fusion(%x), kind=kLoop, calls=%fused, \
metadata={op_name="jit(step)/gradcomp_mean_8_over_8/gradcomp_encode/add"}, \
backend_config={"estimated_cycles":"10"}
  %sent = f32[8]{0:T(128)} collective-permute(%y), source_target_pairs={{0,1},{1,0}}
  ROOT %r = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%n, %sent)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0:T(128)} parameter(0)
  %flat = f32[2,4]{1,0:T(8,128)} reshape(%a)
  %zero = s32[]{:T(128)} constant(0)
  %in = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(128)}) tuple(%zero, %a)
  %loop = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%in), \
condition=%condition, body=%body
  ROOT %out = f32[8]{0:T(128)} get-tuple-element(%loop), index=1
}
"""


def trips(text):
  program = hlo.Program(text)
  (loop,) = [x.instruction for x in program.runs() if x.instruction.opcode == "while"]
  return hlo.trips_of(program.module, loop)


def test_what_a_loop_runs_counts_as_often_as_it_runs():
  program = hlo.Program(LOOP)
  runs = {x.instruction.name: x for x in program.runs() if hlo.launches(x.instruction)}
  assert {name: run.times for name, run in runs.items()} == {
    "flat": 1,
    "y": 6,
    "sent": 6,
  }
  # A fusion's own estimate counts, and not those of what is inside.
  assert hlo.cycles(runs["y"].instruction) == 10
  assert trips(LOOP) == 6
  assert [x["times"] for x in program.collectives()] == [6]


@pytest.mark.parametrize(
  ("old", "new"),
  [("constant(6)", "parameter(1)"), ("direction=LT", "direction=NE")],
)
def test_a_loop_whose_trips_the_text_does_not_say_has_none(old, new):
  assert trips(LOOP.replace(old, new)) is None


def test_a_known_number_of_trips_is_taken():
  known = 'body=%body, backend_config={"known_trip_count":{"n":"3"}}'
  assert trips(LOOP.replace("body=%body", known)) == 3


def test_an_update_of_a_slice_writes_the_slice():
  text = """\
HloModule m, is_scheduled=true

ENTRY %main (a: u32[4,256], b: u32[1,256], i: s32[]) -> u32[4,256] {
  %a = u32[4,256]{1,0:T(4,128)} parameter(0)
  %b = u32[1,256]{1,0:T(1,128)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  ROOT %c = u32[4,256]{1,0:T(4,128)} dynamic-update-slice(%a, %b, %i, %i)
}
"""
  program = hlo.Program(text)
  (run,) = [run for run in program.runs() if hlo.unpriced(run.instruction)]
  assert program.moved(run) == 1024


def test_a_kernel_moves_half_of_what_it_reads_and_writes():
  text = """\
HloModule m, is_scheduled=true

ENTRY %main (a: f32[64,128]) -> u32[8,128] {
  %a = f32[64,128]{1,0:T(8,128)} parameter(0)
  ROOT %k = u32[8,128]{1,0:T(8,128)} custom-call(%a), custom_call_target="NAME"
}
"""
  program = hlo.Program(text.replace("NAME", "tpu_custom_call"))
  (run,) = [run for run in program.runs() if hlo.unpriced(run.instruction)]
  assert program.moved(run) == (64 + 8) * 128 * 4 // 2
  other = hlo.Program(text.replace("NAME", "AllocateBuffer"))
  assert not [run for run in other.runs() if hlo.unpriced(run.instruction)]


def test_what_only_moves_and_has_no_estimate_is_known():
  (flat,) = [
    run.instruction for run in hlo.Program(LOOP).runs() if hlo.unpriced(run.instruction)
  ]
  assert flat.name == "flat"
  assert [a.padded for a in hlo.arrays(flat.type)] == [4 * 8 * 128]


# Each from a compiled program: dtype, shape and layout, bytes, and with the tiles'.
@pytest.mark.parametrize(
  ("text", "size", "padded"),
  [
    ("f32[4096,4096]{1,0:T(8,128)}", 1 << 26, 1 << 26),
    ("u32[8,1,130]{2,1,0:T(1,128)}", 8 * 130 * 4, 8 * 256 * 4),
    ("u32[8,1,130]{2,0,1:T(8,128)}", 8 * 130 * 4, 8 * 256 * 4),
    ("f32[16384,1,16,4]{3,2,1,0:T(8,128)}", 1 << 22, 1 << 27),
    ("bf16[3,130]{1,0:T(8,128)(2,1)S(1)}", 780, 8 * 256 * 2),
    ("f32[5]{0:T(1024)}", 20, 4096),
    ("s4[9]{0:T(128)E(4)}", 5, 64),
    ("pred[]{:T(512)}", 1, 512),
    ("f32[7,3]{1,0}", 84, 84),
    ("f32[7,3]", 84, 84),
  ],
)
def test_an_array_takes_its_tiles(text, size, padded):
  (array,) = hlo.arrays(text)
  assert (array.bytes, array.padded) == (size, padded)


def test_an_asynchronous_fusion_repeats_a_collective_that_runs_once():
  step = """
%NAME (p: u32[16]) -> u32[16] {
  %p = u32[16]{0:T(128)} parameter(0)
  ROOT %gathered.NAME = u32[16]{0:T(128)} all-gather(%p), dimensions={0}, \
frontend_attributes={chain_id="0"}
}
"""
  call = "  %f.NAME = u32[16]{0:T(128)} fusion(%a), kind=kCustom, calls=%NAME\n"
  names = ("start", "step", "end")
  bodies, calls = (
    "".join(x.replace("NAME", name) for name in names) for x in (step, call)
  )
  entry = "ENTRY %main (a: u32[16]) -> u32[16] {\n  %a = u32[16]{0} parameter(0)\n"
  text = f"HloModule m, is_scheduled=true\n{bodies}\n{entry}{calls}}}\n"
  (found,) = hlo.Program(text).collectives()
  assert (found["kind"], found["asynchronous"], found["bytes"]) == (
    "all-gather",
    True,
    64,
  )


def test_what_another_core_gathers_is_asynchronous():
  text = """\
HloModule m, is_scheduled=true

%gather (p: u32[16]) -> u32[128] {
  %p = u32[16]{0:T(128)} parameter(0)
  ROOT %g = u32[128]{0:T(128)} all-gather(%p), dimensions={0}
}

ENTRY %main (a: u32[16]) -> u32[128] {
  %a = u32[16]{0:T(128)} parameter(0)
  %s = ((u32[16]{0}), u32[128]{0}) call-start(%a), to_apply=%gather
  ROOT %d = u32[128]{0} call-done(%s)
}
"""
  (found,) = hlo.Program(text).collectives()
  assert (found["kind"], found["asynchronous"]) == ("all-gather", True)


def test_a_start_that_the_compiler_made_synchronous_is_so():
  text = """\
HloModule m, is_scheduled=true

ENTRY %main (a: u32[16]) -> u32[16] {
  %a = u32[16]{0} parameter(0)
  %s = (u32[16]{0}, u32[16]{0}) all-to-all-start(%a), backend_config={"is_sync":SYNC}
  ROOT %d = u32[16]{0} all-to-all-done(%s)
}
"""
  for sync in ("true", "false"):
    (found,) = hlo.Program(text.replace("SYNC", sync)).collectives()
    assert found["asynchronous"] is (sync == "false")


def test_the_part_of_a_step_is_the_innermost_that_is_named():
  parts = {
    "jit(step)/dot_general": "model",
    "jit(step)/gradcomp_mean_8_over_8/gradcomp_two_shot/concatenate": "exchange",
    "a/gradcomp_mean_8_over_8/gradcomp_two_shot/gradcomp_encode/mul": "encode",
    "a/gradcomp_two_shot/gradcomp_decode/mul": "decode",
    "a/gradcomp_encode/gradcomp_decode/mul": "decode",
  }
  assert {scope: hlo.part(scope) for scope in parts} == parts
