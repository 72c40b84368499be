"""The example trainers run as their users run them, as scripts, and go on as well."""

import csv
import itertools
import math
import os
import shutil
import socket
import subprocess
import sys

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.pages import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Data are prepared once; the home folder stays empty, whatever a process writes."""
  home = tmp_path_factory.mktemp("home")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HOME", str(home))
    # matplotlib keeps a list of fonts.
    patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
    yield tmp_path_factory.mktemp("datasets")
    assert not list(home.iterdir())


def start(*args, script="image_classification"):
  """A script on emulated devices: LLVM optimizes it, for it runs more than compiles."""
  command = [sys.executable, "-m", f"examples.{script}", *map(str, args)]
  place = dict(cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""})
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  return subprocess.Popen(command, **place, **pipes)


def finish(process):
  """What it has written to the standard output and error; it must have succeeded."""
  out, err = process.communicate(timeout=300)
  assert process.returncode == 0, err
  return out, err


def read(path):
  return [*csv.DictReader(path.read_text().splitlines())]


def test_a_comparison_writes_a_table_curves_and_lines(folder, tmp_path):
  codecs = ("f32", "qsgd-4")
  given = f"--devices 2 --model mlp --steps 4 --evaluate-every 2 --data-dir {folder}"
  line = f"--compare f32 qsgd-4 {given} --output {tmp_path}"
  out, err = finish(start(*line.split()))
  f32, qsgd = summary = read(tmp_path / "summary.csv")
  assert [(row["codec"], row["seed"]) for row in summary] == [(x, "0") for x in codecs]
  assert f32["bytes_a_step"] == f32["f32_bytes_a_step"] == qsgd["f32_bytes_a_step"]
  assert int(qsgd["bytes_a_step"]) < 0.14 * int(f32["bytes_a_step"])
  for row in summary:
    assert f"{int(row['bytes_a_step']):,}" in out and float(row["step_ms"]) > 0
  curves = read(tmp_path / "curves.csv")
  found = [(row["codec"], row["step"]) for row in curves]
  assert found == [*itertools.product(codecs, ("2", "4"))]
  for first, second in zip(curves[::2], curves[1::2], strict=True):
    assert math.isfinite(float(second["test_loss"]))
    assert 0 <= float(second["test_accuracy"]) <= 1
    assert 0 < float(second["train_loss"]) < float(first["train_loss"])
    assert int(second["bytes_sent"]) == 2 * int(first["bytes_sent"])
  assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
  lines = [line.partition(",")[0] for line in err.splitlines() if " seed " in line]
  assert lines == [f"{x} seed 0: {step} of 4" for x in codecs for step in range(1, 5)]


@pytest.mark.slow
def test_two_processes_train_like_one(folder, tmp_path):
  line = "--model mlp --steps 6 --evaluate-every 2 --batch-size 16 --ema 0.9"
  args = [*f"{line} --schedule plateau --data-dir {folder}".split(), "--output"]
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    address = f"localhost:{probe.getsockname()[1]}"
  two = ["--coordinator", address, "--num-processes", 2, "--devices", 2, "--process-id"]
  processes = [start(*args, tmp_path / f"{i}", *two, i) for i in range(2)]
  first, second = (finish(process)[0] for process in processes)
  assert "Workers: 4" in first and "Workers: 4" not in second
  assert not (tmp_path / "1").exists()  # the first process alone writes
  finish(start(*args, tmp_path / "one", "--devices", 4))
  curves = [read(tmp_path / name / "curves.csv") for name in ("0", "one")]
  for row, like in zip(*curves, strict=True):
    assert (row["step"], row["bytes_sent"]) == (like["step"], like["bytes_sent"])
    # The mean of the workers' losses is summed in another order.
    for name in ("train_loss", "test_loss"):
      assert float(row[name]) == pytest.approx(float(like[name]), 1e-5)


IMAGES = "image_classification --steps 3 --batch-size 16"
TEXT = "language_model --steps 2 --batch-size 4 --length 8"
NET = "model_parallel --hidden 256 --channels 4 --passes 2 --batch-size 64"
BITS = 410_240 / 8  # of the transformer, of which 640 elements travel in float32
# Options, the least and the most bytes of a step (in those of float32, or bits of each
# element), and what the loss is below: equal chances among so many.
ADAM = f"{IMAGES} --codec bf16 --optimizer adam --model"
TRAINED = [
  *((f"{ADAM} {x}", 0.49, 0.51, math.inf) for x in ("resnet", "vgg", "alexnet")),
  (f"{IMAGES} --compare onebit-64 terngrad qsgd-2-nonuniform aps-3-0", 0, 0.15, 10),
  (f"{NET} --codec linear --steps 2", 0.2, 0.5, math.inf),
  # Slots of 1 % of the parameters, positions alone in all layers but one.
  (f"{TEXT} --codec redsync-asq --warmup 1", 0.005, 0.02, 1000),
  # Two payloads with 32 bits of scale a bucket. A worker of two sends half of each.
  (f"{TEXT} --model transformer --parallel zero", 4.0625, 4.15, 100),
  (f"{TEXT} --model transformer --parallel fsdp", 6.25, 6.375, 100),
  (f"{TEXT} --parallel fsdp --weights 4 --feedback none", 0, 1, 1000),
]


@pytest.mark.slow
@pytest.mark.parametrize("options, low, high, chances", TRAINED)
def test_an_example_learns(options, low, high, chances, folder, tmp_path):
  """And sends few bytes."""
  script, *given = options.split()
  given += ["--devices", 2, "--output", tmp_path]
  given += [] if script == "language_model" else ["--data-dir", folder]
  finish(start(*given, script=script))
  for row in read(tmp_path / "summary.csv"):
    sent, plain = int(row["bytes_a_step"]), int(row["f32_bytes_a_step"])
    assert low < (sent / BITS if low > 1 else sent / plain) < high, row
    assert float(row["test_loss"]) < math.log(chances)


@pytest.mark.slow
def test_an_inspected_run_is_the_same_and_shows_each_leaf(folder, tmp_path):
  for name, more in (("plain", []), ("seen", ["--inspect", 10])):
    args = ["--devices", 2, "--data-dir", folder, "--steps", 20, *more]
    out, _ = finish(start(*args, "--output", tmp_path / name))
  assert "step 11 of qsgd-4:" in out and "gradient norm" in out
  assert (tmp_path / "seen" / "qsgd-4-errors.png").exists()
  plain, seen = (read(tmp_path / name / "curves.csv") for name in ("plain", "seen"))
  assert plain == seen


WORDS = "language_model --devices 2 --batch-size 4 --length 8 --output {out}"
BLOCKS = f"{WORDS} --model transformer"
PIXELS = "--devices 2 --evaluate-every 4 --output {out} --data-dir {data}"
SWITCH = "--model lstm --codec redsync-asq --warmup 4 --ema 0.9 --schedule plateau"
LOCAL = "--codec blocktop --local-steps 2 --optimizer adam --evaluate-every 1"
# The folder of the run or the most bytes, of those of float32; script and options; and
# options of another training, with what its refusal says: here before arrays are read.
WIDER = "--channels 8", "the shape of"
DENSER = "--density 0.1", "density=0.01", "density=0.1"
RUNS = [
  ("qsgd-4-0", f"image_classification --batch-size 16 {PIXELS}", ()),
  ("redsync-asq-0", f"{WORDS} {SWITCH} --evaluate-every 1", DENSER),
  ("blocktop-0", f"{BLOCKS} {LOCAL}", ()),  # in the midst of the second round
  ("qsgd-4-0", f"{BLOCKS} --scan --codec qsgd --bits 4 --feedback error", ()),
  ("zero-0", f"{BLOCKS} --parallel zero", ()),
  ("fsdp-0", f"{BLOCKS} --parallel fsdp", ()),
  # 8 bits there, perhaps again in the backward pass, and 4 back, with scales.
  (0.24, "fsdp_linen --workers 2", ()),
  (0.24, "fsdp_nnx --workers 2", ()),
  (0.15, "hsdp --hosts 2 --chips 2", ()),
  ("linear-0", f"{NET} --codec linear {PIXELS}", WIDER),
]


def arrays(path):
  with ocp.PyTreeCheckpointer() as checkpointer:
    like = checkpointer.metadata(path).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    return checkpointer.restore(path, restore_args=as_numpy)


@pytest.mark.slow
@pytest.mark.parametrize("run, options, other", RUNS)
def test_a_stopped_run_ends_as_others_do(run, options, other, folder, tmp_path):
  """Also its curve, of which a point is the mean of losses on both sides."""
  shown = not isinstance(run, str)  # the losses and the share of bytes, in its lines
  last = tmp_path / "saved" / ("." if shown else run) / "6"

  def train(number, *more):
    given = options.format(out=tmp_path / f"out-{number}", data=folder)
    script, *given = given.split()
    kept = ["--steps", 6, "--save-every", 3, "--checkpoint", tmp_path / "saved"]
    return start(*given, *kept, *more, script=script)

  out, err = finish(train(1))
  assert "goes on" not in err
  expected = arrays(last / "default")
  shutil.rmtree(last)
  _, err = finish(train(2))
  assert "goes on after step 3" in err
  assert expected
  chex.assert_trees_all_equal(arrays(last / "default"), expected)
  if shown:
    losses = [float(line.split()[-1]) for line in out.splitlines() if "loss" in line]
    assert len(losses) == 6 and losses[-1] < 0.8 * max(losses)
    assert run - 0.06 < float(out.splitlines()[-1].split()[1]) < run, out
  else:
    first, second = (read(tmp_path / f"out-{i}" / "curves.csv") for i in (1, 2))
    assert first[-1]["step"] == "6" and first == second
  if other:
    changed, *words = other
    process = train(3, *changed.split())
    _, err = process.communicate(timeout=300)
    assert process.returncode and all(x in err for x in words), err
