"""One instruction counts the bytes that it sends, or is refused."""

import math
import re

import numpy as np
import pytest

from gradcomp import wire_report
from tests.report import texts
from tests.report.texts import G8, NBYTES, fields, hlo, only, rows

PAIRS = "source_target_pairs={{0,1},{1,0}}"
CHANNEL = f"channel_id=1, frontend_attributes={{_xla_send_recv_{PAIRS}}}"
STARTED = "(X, X) NAME-start(x), G; d = X NAME-done(s)"
# The kind, workers and bytes of what is sent, and the lines. NAME is the kind, G are
# groups of eight, and P the pairs of two.
SENT = f"""
all-reduce | 8 | 2 * 7 * NBYTES / 8 | s = {STARTED}, to_apply=add
all-reduce | 8 | 2 * 7 * (NBYTES + 3) / 8 | s = (X, u8[3]) NAME-start(x, y), G; \
d = (X, u8[3]) NAME-done(s)
all-gather | 8 | 7 * NBYTES | s = {STARTED}, dimensions={{0}}
all-gather | 8 | 7 * (NBYTES + 3) | s = ((X, u8[3]), (f32[64,128], u8[24])) \
NAME-start(X{{1,0:T(8,128)}} x, u8[3]{{0}} y), G; d = (f32[64,128], u8[24]) NAME-done(s)
reduce-scatter | 8 | 7 * NBYTES / 8 | u = ((X), f32[1,128], u32[], u32[]) \
NAME-start(x), async_execution_thread="m", G; s = ((X), f32[1,128]) NAME-update(u); \
d = f32[1,128] NAME-done(s)
all-to-all | 8 | 7 * NBYTES / 8 | s = {STARTED}
collective-permute | 2 | NBYTES | s = {STARTED.replace("G", "P")}
collective-broadcast | 8 | NBYTES | s = {STARTED}
ragged-all-to-all | 8 | NBYTES | r = u8[3] NAME(x, y, y, y, y, /*index=5*/y), G
ragged-all-to-all | 8 | NBYTES | s = {STARTED.replace("(x)", "(x, y, y)")}
# In place: a slice of 2 rows.
collective-permute | 2 | NBYTES / 4 | r = f32[64,128] NAME(x, f32[64,128] o, \
(s32[]) t, (s32[]) t), P, slice_sizes={{{{2,128}}}}
collective-permute | 2 | NBYTES + 3 | r = (X, u8[3]) NAME(x, y), P
collective-permute | 2 | NBYTES | k = token[] after-all(); \
v = (X, u32[], token[]) recv(k), {CHANNEL}; s = (X, u32[], token[]) send(x, k), \
{CHANNEL}; e = (X, token[]) recv-done(v); f = token[] send-done(s)
# A fraction of a byte counts as one.
all-reduce | 8 | 2 * 7 * 3 / 8 | c = f32[1] NAME(y)
all-reduce | 3 | 6 | c = f32[1] NAME(f32[1] y), replica_groups=[1,3]<=[3]
all-to-all | 3 | 2 | c = u8[1] NAME(u8[1] y, u8[1] y, u8[1] y), \
replica_groups={{{{0,1,2}}}}
all-gather | 8 | 28 | c = f32[8] NAME(f32[] x)
all-gather | 8 | 7 * 72 | c = f32[8] NAME(f32[<=9,2] x)
all-gather | 8 | 0 | c = f32[8] NAME(f32[0,128] x)
reduce-scatter | 3 | 64 | c = f32[8] NAME(f32[24] x), replica_groups=[2,3]<=[6]
collective-broadcast | 1 | 0 | c = X NAME(x), replica_groups={{{{0}}}}
ragged-all-to-all | 1 | 0 | c = X NAME(x, y), replica_groups={{{{0}}}}
"""


@pytest.mark.parametrize(("kind", "workers", "sent", "lines"), fields(SENT))
def test_each_instruction_counts_once(kind, workers, sent, lines):
  text = lines.replace("NAME", kind).replace("G", G8).replace("P", PAIRS)
  text = hlo(text.replace("; ", "\n  "))
  assert rows(text) == [(kind, int(workers), math.ceil(eval(sent)))]


def test_a_sum_that_is_cut_in_a_fusion_is_a_reduce_scatter():
  _, scatter = rows(texts.read("compiled")["tpu_fsdp"])
  assert scatter == ("reduce-scatter", 8, 7 * 4 * 1024 * 512 // 8)


# Of each dtype of numpy and ml_dtypes the name in XLA, and the width.
ITEM_SIZES = {}
for name in """bool int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32
uint64 bfloat16 float16 float32 float64 complex64 complex128 float4_e2m1fn float6_e2m3fn
float6_e3m2fn float8_e3m4 float8_e4m3 float8_e4m3fn float8_e4m3b11fnuz float8_e4m3fnuz
float8_e5m2 float8_e5m2fnuz float8_e8m0fnu""".split():
  kind, rest = re.fullmatch("([a-z]+)(.*)", name.replace("_", "")).groups()
  short = {"bool": "pred", "int": "s", "bfloat": "bf"}.get(kind, kind[0])
  ITEM_SIZES[short + rest] = np.dtype(name).itemsize


def test_every_dtype_has_its_width():
  lines = [
    f"g{i} = {dtype}[40] all-gather({dtype}[5]{{0:T(1024)}} x), {G8}"
    for i, dtype in enumerate(ITEM_SIZES)
  ]
  found = wire_report(hlo("\n  ".join(lines))).collectives
  sent = {dtype: 7 * 5 * size for dtype, size in ITEM_SIZES.items()}
  assert {x.dtype: x.bytes_sent for x in found} == sent
  assert len(found) == 30
  mixed = only(wire_report(hlo("g = (f32[], u8[]) all-gather(x, y, y)")))
  assert mixed.dtype == "f32+u8"
  assert mixed.operands == (("f32", (8, 128)), ("u8", (3,)), ("u8", (3,)))


def test_narrow_types_in_packed_layouts_take_their_bits():
  """As on GPUs, where 5 numbers of 4 bits take 3 bytes."""
  for dtype, nbytes in {"s4": 3, "u2": 2, "f4e2m1fn": 3, "f6e2m3fn": 4}.items():
    packed = f"{dtype}[5]{{0:T(1024)E({dtype[1]})}}"
    line = f"g = {dtype}[40] all-gather({packed} x), {G8}"
    assert only(wire_report(hlo(line))).bytes_sent == 7 * nbytes
    both = f"g = {dtype}[40] all-gather({packed} x, {dtype}[5]{{0}} x), {G8}"
    with pytest.raises(ValueError, match="narrow types in one layout, got"):
      wire_report(hlo(both))


@pytest.mark.parametrize(
  ("stage", "sent"),
  [
    ("EVERY", {"all-reduce": ("s8", 2 * 7 * 1024 // 8)}),
    ("BROADCAST", {"reduce-scatter": ("f32", 3584), "all-gather": ("s8", 896)}),
    ("REDUCE", {"reduce-scatter": ("s8", 896), "all-gather": ("f32", 3584)}),
  ],
)
def test_a_quantized_sum_counts_as_it_is_sent(stage, sent):
  """As XLA:TPU writes one with xla_tpu_quantized_all_reduce_level of 3, 1 and 2."""
  config = (
    'backend_config={"quantized_all_reduce_config":{"quantization_type":'
    '"SYMMETRIC_PER_SHARD_QAR","quantized_data_type":"S8",'
    f'"quantized_stage":"{stage}_STAGE"}}}}'
  )
  report = wire_report(hlo(f"a = X all-reduce(x), {G8}, {config}"))
  assert {c.kind: (c.dtype, c.bytes_sent) for c in report.collectives} == sent
  assert report.dense_bytes == 2 * 7 * NBYTES // 8


SEND = "s = (X, u32[], token[]) send(x), frontend_attributes={_xla_megascale_target="
# A name, what an error says, and the line.
REFUSED = f"""
unbounded | arrays of known sizes | r = f32[8] all-reduce(f32[?,8] x)
unknown_opcode | known collectives | r = X all-shuffle(x), replica_groups={{{{0,1}}}}
unknown_channel | known collectives, got | r = X swap(x), channel_id=3
unknown_groups | known replica groups | g = X all-gather(x), replica_groups=@m
unknown_axis | known replica groups | g = X all-gather(x), replica_groups=mesh['a'=8] \
{{'b'}}
too_few_devices | known replica groups | g = X all-gather(x), replica_groups=[2,2]<=[16]
other_devices | groups of its own | g = X all-gather(x), replica_groups={{{{8}}}}
unknown_transfer | known transfers between slices, got 'SWAP' | \
{SEND}"{{1,2}}x{{0:3}}",_xla_megascale_transfer_type="SWAP"}}
unknown_target | known transfers between slices, got | \
{SEND}"all",_xla_megascale_transfer_type="ALL_GATHER"}}
unknown_pairs | known pairs, got | c = X collective-permute(x), \
source_target_pairs=[2,2]<=[4]
no_pairs | known pairs, got | c = X collective-permute(x), channel_id=1
nested | each instruction by itself | r = X add(x, f32[8] all-reduce(x))
quantized | known quantized sums, got | r = X all-reduce(x), \
backend_config={{"quantized_data_type":"S4"}}
dtype | known dtypes, got 'q7 in all-gather. | g = q7[8] all-gather(q7[8] x)
dtype_of_another | known dtypes, got 'q7 in | g = q7[8] all-gather(x, q7[8] x)
token | known dtypes, got 'token in | g = token[] all-reduce(token[] x)
undefined | known dtypes, got 'undefined in | g = X all-reduce(x, nowhere)
slices | a slice of each operand | r = X collective-permute((X, u8[3]) x), \
source_target_pairs={{{{0,1}}}}, slice_sizes={{{{8,128}}}}
computation | computation .*, got 'no'; pass | c = X call(x), to_apply=no
"""


@pytest.mark.parametrize(("name", "rule", "line"), fields(REFUSED))
def test_what_cannot_be_counted_is_refused(name, rule, line):
  with pytest.raises(ValueError, match=rule):
    wire_report(hlo(line))


UNSEEN = """
(X, u32[], token[]) send(x, t), channel_id=1, is_host_transfer=true
(X, u32[], token[]) recv(t), channel_id=1
token[] outfeed(x, t)
((X), token[]) infeed(t)
X custom-call(x), backend_config={"has_communication": true}
(X, u32[], token[]) send(x, t), channel_id=1, frontend_attributes=\
{_xla_megascale_target="{1,2}x{0:3}"}
"""


@pytest.mark.parametrize("line", UNSEEN.strip().splitlines())
def test_a_program_of_transfers_does_not_send_nothing(line):
  report = wire_report(hlo(f"t = token[] after-all()\n  s = {line}"))
  assert report.unseen == ("s",)
  assert str(report).endswith("no collectives. Transfers that are not counted: s.")
  beside = hlo(f"t = token[] after-all()\n  s = {line}\n  g = X all-gather(x)")
  assert "not counted: s. The sum is a lower bound." in str(wire_report(beside))
