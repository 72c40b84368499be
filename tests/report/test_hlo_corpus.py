"""Texts of compilers and of people are counted as XLA reads them, or refused.

``hlo/compiled`` has texts of ``record_hlo``, and ``hlo/written`` one of each construct.
The first line of these says the bytes that each worker sends.
"""

import re
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh
from jaxlib import _hlo as hlo

from gradcomp.wire import wire_report
from tests.report import oracle

FOLDER = Path(__file__).parent / "hlo"
COMPILED = {path.stem: path.read_text() for path in (FOLDER / "compiled").iterdir()}
WRITTEN = {path.stem: path.read_text() for path in (FOLDER / "written").iterdir()}
TEXTS = COMPILED | WRITTEN


def bytes_of(text):
  """What the first line says: "// 32 bytes: ..."."""
  return int(re.match(r"// (\d+) bytes", text)[1])


@pytest.mark.parametrize("name", TEXTS)
def test_a_second_count_by_the_parser_of_xla_agrees(name):
  assert wire_report(TEXTS[name]).bytes_sent == oracle.bytes_sent(TEXTS[name])


@pytest.mark.parametrize("name", WRITTEN)
def test_each_construct_is_counted(name):
  text = WRITTEN[name]
  assert wire_report(text).bytes_sent == bytes_of(text)


# The share of a plain f32 mean that an exchange of QSGD of 4 bits sends: 520 words for
# each 4,096 numbers. Hierarchical sends 3/4 of one f32 inside of slices of 4, of the
# 7/4 of a plain mean, and 2/14 and 12/14 of the words. XLA:GPU adds the loss in one sum
# with 1 % of the numbers, or with the second factors of rank 4. XLA:TPU makes two sums
# of 1 % of four leaves, and adds 256 numbers of small leaves and the loss in one.
QSGD = 520 / 4096
RATIOS = {
  **dict.fromkeys(("tpu_async_fusions", "tpu_ring", "tpu_sparsecore"), QSGD),
  **dict.fromkeys(("tpu_two_slices", "tpu_two_slices_ring"), QSGD),
  **dict.fromkeys(("h200_messages", "h200_combined"), QSGD),
  "tpu_two_slices_hierarchical": (3 / 4 + QSGD * (1 / 8 + 1 / 8 + 6 / 8)) / (7 / 4),
  "h200_one_sum": (4 * 2622 + 1) / 2**20,
  "tpu_split_sum": (2 * (10486 + 2622 + 11) + 7865 + 256 + 1) / 3410176,
  "h200_sums": (4 * 4 * (512 + 512) + 1) / 2**20,
  "tpu_quantized": 1 / 4,
  "tpu_fsdp": 1,
}


@pytest.mark.parametrize("name", RATIOS)
def test_the_ratio_is_that_of_explain(name):
  """Of the exchange; the mean of the loss takes no part of it."""
  found = wire_report(COMPILED[name]).collectives
  own = [x for x in found if "gradcomp" in x.scope] or found
  sent = sum(x.times * x.bytes_sent for x in own)
  dense = sum(x.times * x.dense_bytes for x in own)
  assert sent / dense == pytest.approx(RATIOS[name], rel=1e-12)


@pytest.mark.parametrize("name", TEXTS)
def test_every_form_that_xla_prints_has_the_same_bytes(name):
  """Called computations in their place, too; that form leaves out trip counts."""
  module = hlo.hlo_module_from_text(TEXTS[name])
  in_place = hlo.HloPrintOptions()
  in_place.print_operand_shape = True
  in_place.is_in_nested_computation = False
  options = [hlo.HloPrintOptions(), hlo.HloPrintOptions.short_parsable(), in_place]
  expected = wire_report(TEXTS[name]).bytes_sent
  assert [wire_report(module.to_string(x)).bytes_sent for x in options] == [
    expected
  ] * 3
  if "known_trip_count" not in TEXTS[name] and "quantized" not in TEXTS[name]:
    full = module.to_string(hlo.HloPrintOptions.canonical())
    assert wire_report(full).bytes_sent == expected


def without_names(text, pattern):
  """The text, without the metadata of the lines that match."""
  strip = lambda line: re.sub(r", metadata=\{[^{}]*\}", "", line)
  lines = text.splitlines()
  return "\n".join(strip(x) if re.search(pattern, x) else x for x in lines)


@pytest.mark.parametrize("lost", ["bitcast", "bitcast|region"])
def test_a_ratio_that_no_name_tells_is_refused(lost):
  """The sum has no name, and neither have its parts; encoding still has."""
  whole = wire_report(COMPILED["h200_one_sum"])
  report = wire_report(without_names(COMPILED["h200_one_sum"], lost))
  (collective,) = report.collectives
  assert (collective.scope, report.bytes_sent) == ("", whole.bytes_sent)
  assert report.untold[0] == "all-reduce-start"
  for name in ("dense_bytes", "ratio"):
    with pytest.raises(ValueError, match="`ratio` must be read from the names of coll"):
      getattr(report, name)
  *_, total, last = str(report).splitlines()
  assert total.split() == ["total", "73,423", "?"]
  assert last.endswith("the bytes of a plain f32 mean cannot be told.")


def test_a_sum_has_the_names_of_all_its_parts():
  """In whichever order they are taken from it."""
  part = "%wrapped_slice = "
  loss = part.replace("slice", "loss") + "f32[1] fusion(%all-reduce-done), kind=kLoop, "
  loss += 'calls=%wrapped_slice_computation.1, metadata={op_name="loss/psum"}'
  text = COMPILED["h200_one_sum"].replace(part, f"{loss}\n  {part}")
  (collective,) = wire_report(text).collectives
  assert collective.scope.startswith("loss/psum:jit(step)")
  assert collective.means == [(2**20, 8)]


def named(scope):
  """A computation with a name."""
  return f'x {{\n  ROOT x = f32[] parameter(0), metadata={{op_name="{scope}"}}\n}}\n'


def test_a_mean_that_no_collective_completes_is_missed():
  """A sum may keep the name of one of its parts, and lose that of a mean."""
  name = "gradcomp_mean_1048576_over_8"
  text = COMPILED["h200_one_sum"].replace(f"{name}/psum_invariant", "loss/psum")
  text += (
    f'x {{\n  ROOT x = f32[] parameter(0), metadata={{op_name="{name}/div"}}\n}}\n'
  )
  assert wire_report(text).untold == (name,)


@pytest.mark.parametrize("scope", ["gradcomp_mean_0_over_8", "gradcomp_mean_8_over_1"])
def test_a_mean_of_nothing_is_not_missed(scope):
  assert wire_report(COMPILED["h200_one_sum"] + named(scope)).untold == ()


def test_a_program_without_any_exchange_needs_no_names():
  report = wire_report(without_names(COMPILED["h200_one_sum"], ""))
  assert (report.untold, report.ratio) == ((), 1.0)


REFUSED = {
  "unbounded": ("all-reduce(x), to_apply=add", "f32[?,8]", "arrays of known sizes"),
  "unknown_opcode": ("all-shuffle(x), replica_groups={{0,1}}", "f32[8]", "known coll"),
  "unknown_channel": ("swap(x), channel_id=3", "f32[8]", "known collectives, got"),
  "unknown_groups": ("all-gather(x), replica_groups=@m", "f32[8]", "known replica gr"),
  "unknown_transfer": (
    'send(x), channel_id=1, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",'
    '_xla_megascale_transfer_type="SWAP"}',
    "f32[8]",
    "known transfers between slices, got 'SWAP'",
  ),
  "unknown_target": (
    'send(x), channel_id=1, frontend_attributes={_xla_megascale_target="all",'
    '_xla_megascale_transfer_type="ALL_GATHER"}',
    "f32[8]",
    "known transfers between slices, got",
  ),
  "unknown_pairs": (
    "collective-permute(x), source_target_pairs=[2,2]<=[4]",
    "f32[8]",
    "known pairs, got",
  ),
  "too_few_devices": ("all-gather(x), replica_groups=[2,2]<=[16]", "f32[8]", "known"),
  "nested": ("add(x, f32[8] all-reduce(x))", "f32[8]", "each instruction by itself"),
  "no_pairs": ("collective-permute(x), channel_id=1", "f32[8]", "known pairs, got"),
  "quantized": (
    'all-reduce(x), backend_config={"quantized_data_type":"S4"}',
    "f32[8]",
    "known quantized sums, got",
  ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_counted_is_refused(case):
  op, shape, rule = case
  text = WRITTEN["replicas"].partition("ENTRY")[0]
  text += f"ENTRY e {{\n  x = {shape} parameter(0)\n  ROOT r = {shape} {op}\n}}\n"
  with pytest.raises(ValueError, match=rule):
    wire_report(text)


@pytest.mark.parametrize(
  "line",
  [
    "s = (f32[8], u32[], token[]) send(x, t), channel_id=1, is_host_transfer=true",
    "s = (f32[8], u32[], token[]) recv(t), channel_id=1",
    "s = token[] outfeed(x, t)",
    "s = ((f32[8]), token[]) infeed(t)",
    's = f32[8] custom-call(x), backend_config={"has_communication":true}',
    's = f32[8] custom-call(x), backend_config={"has_communication": true}',
    "s = (f32[8], u32[], token[]) send(x, t), channel_id=1, frontend_attributes="
    '{_xla_megascale_target="{1,2}x{0:3}"}',
  ],
)
def test_a_program_of_transfers_does_not_send_nothing(line):
  text = (
    "HloModule m\nENTRY e {\n  x = f32[8] parameter(0)\n  t = token[] after-all()\n"
  )
  report = wire_report(f"{text}  {line}\n  ROOT r = f32[8] copy(x)\n}}")
  assert report.unseen == ("s",)
  assert str(report) == (
    "The program has no collectives. Transfers that are not counted: s."
  )


def test_devices_of_several_slices_have_the_axes_of_the_mesh():
  """A text is the program of one slice, of four chips."""
  mesh = AbstractMesh((2, 4), ("slice", "chip"))
  text = COMPILED["tpu_two_slices_hierarchical"]
  report = wire_report(text, mesh=mesh)
  sent = {axis: part.bytes_sent for axis, part in report.by_axis.items()}
  words = 4 * 8320  # bytes of a worker's share
  loss = 4 * 128  # bytes of a number, as XLA pads it
  inside = 3 * 2**19 + 6 * words + 2 * 3 * loss // 4
  assert sent == {"chip": inside, "slice": 2 * words + loss}
  # A plain mean of 2**19 numbers adds inside slices first, and the quarters between.
  dense = {axis: part.dense_bytes for axis, part in report.by_axis.items()}
  loss_inside = 2 * 3 * loss // 4
  assert dense == {"slice": 2**19 + loss, "chip": 2 * 3 * 2**19 + loss_inside}
  assert sum(dense.values()) == report.dense_bytes == wire_report(text).dense_bytes
  assert [*report.by_axis] == ["slice", "chip"]  # as in the mesh
  ratios = [f"{part.ratio:.4g}" for part in report.by_axis.values()]
  last = f"Sends {ratios[0]} x the bytes of a plain f32 mean over slice, {ratios[1]} x "
  assert str(report).endswith(f"{last}over chip, {report.ratio:.4g} x in all.")
  with pytest.raises(ValueError, match="with 8 devices, got 4"):
    wire_report(
      COMPILED["tpu_two_slices_hierarchical"], mesh=AbstractMesh((4,), ("chip",))
    )
