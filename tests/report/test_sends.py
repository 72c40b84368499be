"""One instruction counts the bytes that it sends, or is refused."""

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gradcomp.wire import wire_report
from tests.report.texts import G8, NBYTES, hlo, only, rows

PAIRS = "source_target_pairs={{0,1},{1,0}}"
CHANNEL = f"channel_id=1, frontend_attributes={{_xla_send_recv_{PAIRS}}}"
ASYNC = "(X, X) NAME-start(x), G\n d = X NAME-done(s)"
# The lines, and the kind, workers and bytes of what they send. NAME and G are the kind
# and groups of eight.
SENT = {
  "all-reduce": (f"s = {ASYNC}, to_apply=add", 8, 2 * 7 * NBYTES // 8),
  "all-reduce, of two": (
    "s = (X, u8[3]) all-reduce-start(x, y), G\n d = (X, u8[3]) all-reduce-done(s)",
    8,
    math.ceil(2 * 7 * (NBYTES + 3) / 8),
  ),
  "all-gather": (f"s = {ASYNC}, dimensions={{0}}", 8, 7 * NBYTES),
  "all-gather, of two": (
    "s = ((X, u8[3]), (f32[64,128], u8[24])) all-gather-start(X{1,0:T(8,128)} x, "
    "u8[3]{0} y), G, dimensions={0}\n d = (f32[64,128], u8[24]) all-gather-done(s)",
    8,
    7 * (NBYTES + 3),
  ),
  "reduce-scatter": (
    'u = ((X), f32[1,128], u32[], u32[]) NAME-start(x), async_execution_thread="m", G\n'
    "s = ((X), f32[1,128]) NAME-update(u)\n d = f32[1,128] NAME-done(s)",
    8,
    7 * NBYTES // 8,
  ),
  "all-to-all": (f"s = {ASYNC}", 8, 7 * NBYTES // 8),
  "collective-permute": (f"s = {ASYNC}".replace("G", PAIRS), 2, NBYTES),
  "collective-broadcast": (f"s = {ASYNC}", 8, NBYTES),
  "ragged-all-to-all": ("r = u8[3] NAME(x, y, y, y, y, /*index=5*/y), G", 8, NBYTES),
  "ragged-all-to-all, started": (f"s = {ASYNC}".replace("(x)", "(x, y, y)"), 8, NBYTES),
  "collective-permute, in place: a slice of 2 rows": (
    "r = f32[64,128] NAME(x, f32[64,128] o, (s32[]) t, (s32[]) t), "
    f"{PAIRS}, slice_sizes={{{{2,128}}}}",
    2,
    NBYTES // 4,
  ),
  "collective-permute, of two": (f"r = (X, u8[3]) NAME(x, y), {PAIRS}", 2, NBYTES + 3),
  "collective-permute, by a send": (
    f"k = token[] after-all()\n v = (X, u32[], token[]) recv(k), {CHANNEL}\n"
    f"s = (X, u32[], token[]) send(x, k), {CHANNEL}\n"
    "e = (X, token[]) recv-done(v)\n f = token[] send-done(s)",
    2,
    NBYTES,
  ),
  # A fraction of a byte counts as one.
  "all-reduce, rounded": ("c = f32[1] NAME(y)", 8, math.ceil(2 * 7 * 3 / 8)),
  "all-reduce, of three": (
    "c = f32[1] NAME(f32[1] y), replica_groups=[1,3]<=[3]",
    3,
    6,
  ),
  "all-to-all, pieces": (
    "c = u8[1] NAME(u8[1] y, u8[1] y, u8[1] y), replica_groups={{0,1,2}}",
    3,
    2,
  ),
  "all-gather, a scalar": ("c = f32[8] NAME(f32[] x)", 8, 28),
  "all-gather, a bound": ("c = f32[8] NAME(f32[<=9,2] x)", 8, 7 * 72),
  "all-gather, nothing": ("c = f32[8] NAME(f32[0,128] x)", 8, 0),
  "reduce-scatter, of three": (
    "c = f32[8] NAME(f32[24] x), replica_groups=[2,3]<=[6]",
    3,
    64,
  ),
  "collective-broadcast, to itself": ("c = X NAME(x), replica_groups={{0}}", 1, 0),
  "ragged-all-to-all, to itself": ("c = X NAME(x, y), replica_groups={{0}}", 1, 0),
}


@pytest.mark.parametrize("name", SENT)
def test_each_instruction_counts_once(name):
  lines, workers, nbytes = SENT[name]
  kind = name.partition(",")[0]
  text = hlo(lines.replace("NAME", kind).replace("G", G8))
  assert rows(text) == [(kind, workers, nbytes)]


CUT = """
cut {
  p = f32[1024] parameter(0)
  r = f32[1024] all-reduce(p), replica_groups={{0,1,2,3}}, to_apply=add
  i = u32[] partition-id()
  ROOT d = f32[256] dynamic-slice(r, i), dynamic_slice_sizes={256}
}
"""


def test_a_sum_that_is_cut_in_a_fusion_is_a_reduce_scatter():
  text = hlo("f = f32[256] fusion(x), kind=kCustom, calls=cut", CUT)
  assert rows(text) == [("reduce-scatter", 4, 3 * 4096 // 4)]


# What numpy and ml_dtypes say about the width of a dtype.
NAMES = {
  "int": ("s", jnp, (2, 4, 8, 16, 32, 64)),
  "uint": ("u", jnp, (2, 4, 8, 16, 32, 64)),
  "float": ("f", jnp, (16, 32, 64)),
  "complex": ("c", jnp, (64, 128)),
}
ITEM_SIZES = {"pred": np.bool_, "bf16": jnp.bfloat16, "f4e2m1fn": jnp.float4_e2m1fn}
ITEM_SIZES |= {
  f"{short}{bits}": getattr(module, f"{name}{bits}")
  for name, (short, module, widths) in NAMES.items()
  for bits in widths
}
ITEM_SIZES |= {
  f"f{name}": getattr(ml_dtypes, f"float{name[0]}_{name[1:]}")
  for name in "6e2m3fn 6e3m2fn 8e3m4 8e4m3 8e4m3fn 8e4m3b11fnuz 8e4m3fnuz 8e5m2 "
  "8e5m2fnuz 8e8m0fnu".split()
}


def test_every_dtype_has_its_width():
  lines = [
    f"g{i} = {dtype}[40] all-gather({dtype}[5]{{0:T(1024)}} x), {G8}"
    for i, dtype in enumerate(ITEM_SIZES)
  ]
  found = wire_report(hlo("\n  ".join(lines))).collectives
  assert {x.dtype: x.bytes_sent for x in found} == {
    dtype: 7 * 5 * np.dtype(kind).itemsize for dtype, kind in ITEM_SIZES.items()
  }
  assert len(found) == 30
  mixed = only(wire_report(hlo("g = (f32[], u8[]) all-gather(x, y, y)")))
  assert mixed.dtype == "f32+u8"
  assert mixed.operands == (("f32", (8, 128)), ("u8", (3,)), ("u8", (3,)))


@pytest.mark.parametrize(
  ("dtype", "nbytes"), [("s4", 3), ("u2", 2), ("f4e2m1fn", 3), ("f6e2m3fn", 4)]
)
def test_narrow_types_in_packed_layouts_take_their_bits(dtype, nbytes):
  """As on GPUs, where 5 numbers of 4 bits take 3 bytes."""
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


def between(target, kind):
  hints = f'_xla_megascale_target="{target}",_xla_megascale_transfer_type="{kind}"'
  return f"s = (X, u32[], token[]) send(x), frontend_attributes={{{hints}}}"


REFUSED = {
  "unbounded": ("r = f32[8] all-reduce(f32[?,8] x)", "arrays of known sizes"),
  "unknown_opcode": ("r = X all-shuffle(x), replica_groups={{0,1}}", "known collecti"),
  "unknown_channel": ("r = X swap(x), channel_id=3", "known collectives, got"),
  "unknown_groups": ("g = X all-gather(x), replica_groups=@m", "known replica groups"),
  "unknown_axis": (
    "g = X all-gather(x), replica_groups=mesh['a'=8] {'b'}",
    "known replica groups",
  ),
  "too_few_devices": (
    "g = X all-gather(x), replica_groups=[2,2]<=[16]",
    "known replic",
  ),
  "unknown_transfer": (
    between("{1,2}x{0:3}", "SWAP"),
    "known transfers between slices, got 'SWAP'",
  ),
  "unknown_target": (
    between("all", "ALL_GATHER"),
    "known transfers between slices, got",
  ),
  "unknown_pairs": (
    "c = X collective-permute(x), source_target_pairs=[2,2]<=[4]",
    "known pairs, got",
  ),
  "no_pairs": ("c = X collective-permute(x), channel_id=1", "known pairs, got"),
  "nested": ("r = X add(x, f32[8] all-reduce(x))", "each instruction by itself"),
  "quantized": (
    'r = X all-reduce(x), backend_config={"quantized_data_type":"S4"}',
    "known quantized sums, got",
  ),
  "dtype": ("g = q7[8] all-gather(q7[8] x)", r"known dtypes, got 'q7 in all-gather\("),
  "dtype_of_another": ("g = q7[8] all-gather(x, q7[8] x)", "known dtypes, got 'q7 in"),
  "token": ("g = token[] all-reduce(token[] x)", "known dtypes, got 'token in"),
  "undefined": ("g = X all-reduce(x, nowhere)", "known dtypes, got 'undefined in"),
  "slices": (
    "r = X collective-permute((X, u8[3]) x), source_target_pairs={{0,1}}, "
    "slice_sizes={{8,128}}",
    "a slice of each operand",
  ),
  "computation": ("c = X call(x), to_apply=no", "computation .*, got 'no'; pass"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_counted_is_refused(case):
  line, rule = REFUSED[case]
  with pytest.raises(ValueError, match=rule):
    wire_report(hlo(line))


@pytest.mark.parametrize(
  "line",
  [
    "s = (X, u32[], token[]) send(x, t), channel_id=1, is_host_transfer=true",
    "s = (X, u32[], token[]) recv(t), channel_id=1",
    "s = token[] outfeed(x, t)",
    "s = ((X), token[]) infeed(t)",
    's = X custom-call(x), backend_config={"has_communication": true}',
    "s = (X, u32[], token[]) send(x, t), channel_id=1, frontend_attributes="
    '{_xla_megascale_target="{1,2}x{0:3}"}',
  ],
)
def test_a_program_of_transfers_does_not_send_nothing(line):
  report = wire_report(hlo(f"t = token[] after-all()\n  {line}"))
  assert report.unseen == ("s",)
  assert str(report) == (
    "The program has no collectives. Transfers that are not counted: s."
  )


def test_of_known_and_unseen_transfers_the_sum_is_a_lower_bound():
  text = hlo("t = token[] outfeed(x)\n  g = X all-gather(x)")
  assert "not counted: t. The sum is a lower bound." in str(wire_report(text))
