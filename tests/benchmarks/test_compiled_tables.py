"""The committed tables of compiled programs are whole, and hold their bars."""

import itertools
import subprocess

import pytest

from benchmarks.common import cli
from benchmarks.compilers import bars, codecs, pages, record, steps, targets, worker

TABLES = ("codecs", "steps", "overlap")
ROWS = {name: record.read(record.FOLDER / f"{name}.jsonl") for name in TABLES}


@pytest.mark.parametrize("table", TABLES)
def test_what_is_in_the_table_is_a_case_and_compiles(table):
  cases = {
    (target, case)
    for target in targets.TARGETS
    for case in worker.names(table, target, "all")
  }
  assert set(ROWS[table]) <= cases
  assert not [name for name, row in ROWS[table].items() if "error" in row]


def test_each_codec_and_each_method_is_in_the_tables():
  found = {(row["codec"], row["operation"]) for row in ROWS["codecs"].values()}
  assert {codec for codec, _ in found} == set(codecs.CODECS)
  assert {operation for _, operation in found} == set(codecs.OPERATIONS)
  named = {tuple(case.rsplit(", ", 2)) for _, case in ROWS["steps"]}
  assert {method for method, *_ in named} == set(steps.METHODS)
  nets, forms = ("scanned", "unrolled"), ("shard_map", "jit")
  assert {(net, form) for _, net, form in named} == set(itertools.product(nets, forms))
  assert {target for target, _ in ROWS["steps"]} == set(targets.TARGETS)


@pytest.mark.parametrize("table", TABLES)
def test_the_page_is_that_of_the_rows(table, tmp_path):
  record.write(tmp_path / f"{table}.jsonl", ROWS[table])
  pages.write(tmp_path, table)
  for suffix in ("md", "jsonl"):
    name = f"{table}.{suffix}"
    assert (tmp_path / name).read_text() == (record.FOLDER / name).read_text()


def test_programs_of_codecs_hold_their_bars():
  rows = list(bars.held(ROWS["codecs"].values()))
  assert {row["target"] for row in rows} == {"v5e", "v6e", "v5p", "tpu7x"}
  assert not [row["case"] for row in rows if bars.above(row, bars.of(row))]


def test_a_bar_of_its_own_is_needed_and_not_higher_than_it_must_be():
  rows = list(bars.held(ROWS["codecs"].values()))
  assert bars.own() == bars.needed(rows), "python -m benchmarks.compilers --bars"
  assert all(bar.reason for bar in bars.own().values())


def test_no_program_talks_to_its_host():
  for rows in ROWS.values():
    for name, row in rows.items():
      assert "host send" not in str(row["collectives"]), name


def _padding(target):
  """The bytes to which XLA pads small sums between slices, of the loss above all."""
  return 10_000 if targets.TARGETS[target].slices > 1 else 0


def summed_between_slices(target, case):
  """Returns whether XLA adds messages over several slices, as it chooses itself."""
  summed = "dense", "qsgd 4 bits, psum", "randomk", "powersgd"
  return targets.TARGETS[target].slices > 1 and case.rsplit(", ", 2)[0] in summed


def test_the_wire_of_a_step_is_what_explain_says():
  wrong = {
    name
    for name, row in ROWS["steps"].items()
    if (explained := row["wire"]["explained"]) is not None
    and not summed_between_slices(*name)
    # A thousandth: the loss, which a step averages beside its gradients.
    and row["wire"].get("bytes")
    != pytest.approx(explained, rel=1e-3, abs=_padding(name[0]))
  }
  assert not wrong


def test_sums_between_slices_send_up_to_half_as_much_again():
  """XLA may add inside each slice, and then send whole sums between them."""
  found = [
    row["wire"]["bytes"] / row["wire"]["explained"]
    for name, row in ROWS["steps"].items()
    if summed_between_slices(*name)
  ]
  assert found and 0.999 < min(found) and max(found) < 1.6


def test_the_ratio_of_a_step_is_that_of_its_bytes_to_the_plain_steps():
  plain = {
    target: row["wire"]["bytes"]
    for (target, case), row in ROWS["steps"].items()
    if case == f"{steps.PLAIN}, unrolled, shard_map"
  }
  wrong = {
    name
    for name, row in ROWS["steps"].items()
    if row["wire"]["explained"] is not None
    and not (row["wire"]["ratio"] is None and targets.TARGETS[name[0]].slices > 1)
    and not summed_between_slices(*name)
    # A thousandth: the loss, which counts as sent.
    and row["wire"]["ratio"]
    != pytest.approx(row["wire"]["bytes"] / plain[row["target"]], rel=1e-3)
  }
  assert not wrong


def test_what_rose_is_said():
  row = next(iter(ROWS["codecs"].values()))
  assert not record.dearer(row, row)
  assert not record.dearer(row, None)
  (said,) = record.dearer(row | {"temporaries": 10**9}, row | {"temporaries": 10**8})
  assert said == "temporaries rose from 100,000,000 to 1,000,000,000"
  (said,) = record.dearer({"error": "no"}, row)
  assert said == "it does not compile: no"
  other = row | {"versions": {"jax": "0"}, "temporaries": 0}
  assert not record.dearer(row, other), "another compiler made it"


@pytest.mark.parametrize("target", ["v5e", "H100"])
def test_a_codec_compiles_as_the_table_says(target):
  """In a process of its own, since compilers read the environment at their start."""
  if missing := targets.TARGETS[target].missing():
    pytest.skip(f"there is not {missing} here")
  options = ["--tables", "codecs", "--targets", target, "--quick"]
  command = cli.module("benchmarks.compilers", *options, "--cases", "4 bits, encode")
  done = subprocess.run(
    command, cwd=cli.ROOT, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert f"{target}, QSGD 4 bits, encode, 4096 x 4096:" in done.stdout


def test_the_plain_step_is_the_unit():
  for (target, case), row in ROWS["steps"].items():
    if case == f"{steps.PLAIN}, unrolled, shard_map" and row["cycles"]:
      assert sum(row["cycles"].values()) == row["unit"]["cycles"], target
