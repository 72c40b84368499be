"""The plain mean is read from names of scopes, and nothing is guessed without them."""

import re

import pytest

from gradcomp import wire_report
from tests.report import texts
from tests.report.texts import G8, NBYTES, hlo, named, only

COMPILED = texts.read("compiled")
ONE_SUM = COMPILED["h200_one_sum"]
# The share of a plain f32 mean that an exchange of QSGD of 4 bits sends: 520 words for
# each 4,096 numbers. Hierarchical sends 3/4 of one f32 inside of slices of 4, of the
# 7/4 of a plain mean, and 2/14 and 12/14 of the words. XLA:GPU adds the loss in one sum
# with 1 % of the numbers, or with the second factors of rank 4. XLA:TPU makes two sums
# of 1 % of four leaves, and adds 256 numbers of small leaves and the loss in one.
QSGD = 520 / 4096
RATIOS = {
  "tpu_two_slices_hierarchical": (3 / 4 + QSGD * (1 / 8 + 1 / 8 + 6 / 8)) / (7 / 4),
  "h200_one_sum": (4 * 2622 + 1) / 2**20,
  "tpu_split_sum": (2 * (10486 + 2622 + 11) + 7865 + 256 + 1) / 3410176,
  "h200_sums": (4 * 4 * (512 + 512) + 1) / 2**20,
  "tpu_quantized": 1 / 4,
  "tpu_fsdp": 1,
}


@pytest.mark.parametrize("name", COMPILED)
def test_the_ratio_is_that_of_explain(name):
  """Of the exchange; the mean of the loss takes no part of it."""
  found = wire_report(COMPILED[name]).collectives
  own = [x for x in found if "gradcomp" in x.scope] or found
  sent = sum(x.times * x.bytes_sent for x in own)
  dense = sum(x.times * x.dense_bytes for x in own)
  assert sent / dense == pytest.approx(RATIOS.get(name, QSGD), rel=1e-12)


def dense_bytes(scope, operands="x"):
  line = f"a = u32[64,128] all-gather({operands}), {G8}{named(scope)}"
  return only(wire_report(hlo(line))).dense_bytes


# Of 16 workers, although 8 exchange with each other here: a stage inside groups.
SCOPES = {
  "gradcomp_mean_1234_over_8": 2 * 7 * 4 * 1234 // 8,
  "gradcomp_mean_1234_over_16": 2 * 15 * 4 * 1234 // 16,
  **{"gradcomp_mean_0_over_8": 0, "gradcomp_stage": 0, "another_scope": 7 * NBYTES},
}


@pytest.mark.parametrize("longer", ["{}/psum", "jit(f)/{}/a", "vmap({})/psum", "{}"])
def test_scopes_inside_longer_names(longer):
  assert {x: dense_bytes(longer.format(x)) for x in SCOPES} == SCOPES


TWO = "(gradcomp_mean_96_over_8/a:gradcomp_mean_4096_over_8/a)"
COMBINED = [
  (TWO, [520, 96], 4192),
  ("gradcomp_mean_4096_over_8/a", [520, 520, 520], 3 * 4096),
  (TWO, [520, 96, 520], 96 + 2 * 4096),
  ("(gradcomp_stage/a:gradcomp_mean_96_over_8/a)", [520, 96], 96),
]


@pytest.mark.parametrize(("names", "sizes", "elements"), COMBINED)
def test_combined_collectives_complete_the_mean_of_each_message(names, sizes, elements):
  """XLA:GPU joins their names, and leaves one of equal names."""
  operands = ", ".join(f"u32[1,{size}] x" for size in sizes)
  assert dense_bytes(f"jit(step)/{names}", operands) == 2 * 7 * 4 * elements // 8


def without_names(text, pattern):
  """The text, without the metadata of the lines that match."""
  strip = lambda line: re.sub(r", metadata=\{[^{}]*\}", "", line)
  lines = text.splitlines()
  return "\n".join(strip(x) if re.search(pattern, x) else x for x in lines)


@pytest.mark.parametrize("lost", ["bitcast", "bitcast|region"])
def test_a_ratio_that_no_name_tells_is_refused(lost):
  """The sum has no name, and neither have its parts; encoding still has."""
  whole, report = map(wire_report, (ONE_SUM, without_names(ONE_SUM, lost)))
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
  loss += f"calls=%wrapped_slice_computation.1{named('loss/psum')}"
  assert part in ONE_SUM
  (collective,) = wire_report(ONE_SUM.replace(part, f"{loss}\n  {part}")).collectives
  assert collective.scope.startswith("loss/psum:jit(step)")
  assert collective.means == [(2**20, 8)]


def test_a_mean_that_no_collective_completes_is_missed():
  """A sum may keep the name of one of its parts, and lose that of a mean."""
  name = "gradcomp_mean_1048576_over_8"
  text = ONE_SUM.replace(f"{name}/psum_invariant", "loss/psum")
  computation = lambda x: f"x {{\n  ROOT x = f32[] parameter(0){named(x)}\n}}\n"
  assert wire_report(text + computation(f"{name}/div")).untold == (name,)
  for nothing in ("gradcomp_mean_0_over_8", "gradcomp_mean_8_over_1"):
    assert wire_report(ONE_SUM + computation(nothing)).untold == ()


def test_a_program_without_any_exchange_needs_no_names():
  report = wire_report(without_names(ONE_SUM, ""))
  assert (report.untold, report.ratio) == ((), 1.0)
