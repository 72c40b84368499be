"""The scripts for GPUs find wrong bits and write down times, here without a GPU."""

import dataclasses
import json
import subprocess
import time
from unittest import mock

from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import check, speed


def test_kernels_are_timed_and_written_down(tmp_path):
  output, checked = tmp_path / "speed.json", tmp_path / "checked.json"
  name, other = "eight_bit linear, nearest", "qsgd 4 bit"
  checked.write_text(json.dumps({"right": [name]}))
  options = ["--interpret", "--sizes", "8192", "--output", str(output)]
  speed.main([*options, "--checked", str(checked), "--cases", other, name])
  found = json.loads(output.read_text())
  assert found["missing"] == [f"{other}: it was not found right"]
  rows = {(x["case"], x["implementation"]): x["floor_bytes"] for x in found["rows"]}
  encoded = 4 * (8192 + 4 * 513)  # the gradient, and 4 rows with their scale
  assert rows == {
    (case, implementation): floor
    for case, floor in ((name, encoded + 4), (f"{name} whole", encoded + 4 * 8192))
    for implementation in ("pallas_interpret", "xla")
  }
  table = output.with_suffix(".md").read_text()
  assert sum(line.startswith(f"| {name}") for line in table.splitlines()) == 4
  assert f"Not measured: {other}: it was not found right" in table
  speed.main([*options, "--seconds", "0", "--cases", other])
  found = json.loads(output.read_text())
  assert not found["rows"]
  assert all("no time was left" in line for line in found["missing"])


def test_a_wrong_bit_is_found(monkeypatch):
  monkeypatch.setattr(gpu_cases, "_SIZES", ((1, 0), (2, 77)))
  name = "float_cast (3, 0) toward_zero"
  case = gpu_cases.CASES[name]

  def encode(codec, x):
    rows = case.encode(dataclasses.replace(codec, implementation="xla"), x)[0]
    if codec.implementation == "pallas" and x.size > case.codec.tile_size:
      # The code of one element, of a last, partial tile.
      rows = rows.at[-1, 3].add(1)
    return (rows,)

  monkeypatch.setitem(check.CASES, name, case._replace(encode=encode))
  wrong = check.check(name)
  assert [line.partition(":")[0] for line in wrong] == [
    "pallas, 2,125 elements",
    "pallas, 2,125 elements with special values",
    "pallas in shard_map, 2,125 elements",
  ]
  assert "1 of 384 differ, the first at 259" in wrong[0]


def test_a_kernel_that_ends_its_process_fails_alone(monkeypatch):
  # What processes print before they end, each given the cases that are left.
  said = ['["good", []]\n["loud", ["an error"]]', '["fine", []]', "", '["last", []]']
  ended = [subprocess.CompletedProcess([], 1, x.encode()) for x in said]
  run = mock.Mock(side_effect=ended)
  monkeypatch.setattr(check.subprocess, "run", run)
  names = ["good", "loud", "fine", "silent", "last"]
  found = check.run_apart(names, time.monotonic() + 60, "--interpret")
  assert {name for name in names if found[name]} == {"loud", "silent"}
  assert run.call_args.args[0][-3:] == ["--interpret", "--cases", "last"]
  assert check.run_apart(names, time.monotonic()) == {}
