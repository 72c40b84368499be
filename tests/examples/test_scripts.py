"""The example trainers run as their users run them, as scripts, and go on as well."""

import csv
import io
import math
import os
import shutil
import socket
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from examples import image_classification
from examples.lib import progress
from tests.support.pages import ROOT

SHORT = ["--model", "mlp", "--steps", 4, "--evaluate-every", 2]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
  """An empty home folder, in which neither a test nor a process may leave anything."""
  folder = tmp_path_factory.mktemp("home")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HOME", str(folder))
    # matplotlib keeps a list of fonts.
    patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """In which the data are prepared once."""
  return tmp_path_factory.mktemp("datasets")


def start(*args, script="image_classification"):
  """The script of examples/ on emulated devices, whatever this machine has.

  It runs for longer than it compiles, so LLVM optimizes it.
  """
  return subprocess.Popen(
    [sys.executable, "-m", f"examples.{script}", *map(str, args)],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process):
  """What it has written to the standard output and error; it must have succeeded."""
  out, err = process.communicate(timeout=300)
  assert process.returncode == 0, err
  return out, err


def read(path):
  with path.open(newline="") as file:
    return list(csv.DictReader(file))


def test_a_comparison_writes_a_table_curves_and_lines(folder, tmp_path):
  """Two codecs on two workers; without a terminal progress is lines."""
  args = ["--compare", "f32", "qsgd-4", "--devices", 2, *SHORT]
  out, err = finish(start(*args, "--data-dir", folder, "--output", tmp_path))
  f32, qsgd = summary = read(tmp_path / "summary.csv")
  assert [(row["codec"], row["seed"]) for row in summary] == [
    ("f32", "0"),
    ("qsgd-4", "0"),
  ]
  assert f32["bytes_a_step"] == f32["f32_bytes_a_step"] == qsgd["f32_bytes_a_step"]
  assert int(qsgd["bytes_a_step"]) < 0.14 * int(f32["bytes_a_step"])
  for row in summary:
    assert f"{int(row['bytes_a_step']):,}" in out and float(row["step_ms"]) > 0
  curves = read(tmp_path / "curves.csv")
  assert [(row["codec"], row["step"]) for row in curves] == [
    (codec, step) for codec in ("f32", "qsgd-4") for step in ("2", "4")
  ]
  for first, second in zip(curves[::2], curves[1::2], strict=True):
    assert math.isfinite(float(second["test_loss"]))
    assert 0 <= float(second["test_accuracy"]) <= 1
    assert 0 < float(second["train_loss"]) < float(first["train_loss"])
    assert int(second["bytes_sent"]) == 2 * int(first["bytes_sent"])
  assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
  lines = [line.partition(",")[0] for line in err.splitlines() if " seed " in line]
  assert lines == [
    f"{codec} seed 0: {step} of 4"
    for codec in ("f32", "qsgd-4")
    for step in range(1, 5)
  ]
  assert "\r" not in err


def test_progress_is_a_line_a_tenth_or_a_bar(capsys, monkeypatch):
  for steps in (1, 7, 25):
    with progress.Progress("run", steps) as shown:
      for _ in range(steps):
        shown.step(loss="0.5")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == min(steps, 10)
    assert lines[-1] == f"run: {steps} of {steps}, loss 0.5"
  with progress.Progress("run", steps, shown=False) as shown:
    shown.step()
  assert not capsys.readouterr().err

  class Terminal(io.StringIO):
    def isatty(self):
      return True

  monkeypatch.setattr(sys, "stderr", Terminal())
  with progress.Progress("run", 2) as shown:
    shown.step(loss="0.5")
    shown.step()
  said = sys.stderr.getvalue()
  assert "run: 100%" in said and "loss=0.5" in said and "of 2" not in said


def test_wrong_names_are_answered_with_the_choices(capsys):
  for args in (["--codec", "qsgd5"], ["--compare", "f32", "qsgd-9"], ["--steps", "0"]):
    with pytest.raises(SystemExit):
      image_classification.make_parser().parse_args(args)
  errors = capsys.readouterr().err
  assert "'qsgd', 'none', 'f32', 'bf16'" in errors
  assert "'qsgd-8', 'qsgd-16', 'qsgd-2-nonuniform'" in errors
  assert "must be at least 1, got 0" in errors


@pytest.mark.slow
def test_two_processes_train_like_one(folder, tmp_path):
  """The same batches and draws of dropout on the same four workers."""
  args = ["--model", "mlp", "--steps", 6, "--evaluate-every", 2, "--batch-size", 16]
  args += ["--ema", 0.9, "--schedule", "plateau", "--data-dir", folder]
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    address = f"localhost:{probe.getsockname()[1]}"
  two = ["--coordinator", address, "--num-processes", 2, "--devices", 2]
  processes = [
    start(*args, *two, "--process-id", i, "--output", tmp_path / f"{i}")
    for i in range(2)
  ]
  outputs = [finish(process)[0] for process in processes]
  assert "Workers: 4" in outputs[0] and "Workers: 4" not in outputs[1]
  assert not (tmp_path / "1").exists()  # the first process alone writes
  finish(start(*args, "--devices", 4, "--output", tmp_path / "one"))
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
TRAINED = {
  "resnet": (
    "--model resnet --codec bf16 --optimizer adam --feedback error",
    0.49,
    0.51,
    math.inf,
  ),
  "codecs": ("--compare onebit-64 terngrad qsgd-2-nonuniform aps-3-0", 0, 0.15, 10),
  "model_parallel": (f"{NET} --codec linear --steps 2", 0.2, 0.5, math.inf),
  # Slots of 1 % of the parameters, positions alone in all layers but one.
  "redsync": (f"{TEXT} --codec redsync-asq --warmup 1", 0.005, 0.02, 1000),
  # Two payloads with 32 bits of scale a bucket. A worker of two sends half of each.
  "zero": (f"{TEXT} --model transformer --parallel zero", 4.0625, 4.15, 100),
  "fsdp": (f"{TEXT} --model transformer --parallel fsdp", 6.25, 6.375, 100),
  "recurrent": (f"{TEXT} --parallel fsdp --weights 4 --feedback none", 0, 1, 1000),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_an_example_learns_and_sends_few_bytes(name, folder, tmp_path):
  options, low, high, chances = TRAINED[name]
  if options.startswith("--"):
    options = f"{IMAGES} {options}"
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
  """In the first step and the eleventh; bytes are those of other steps."""
  args = ["--devices", 2, "--data-dir", folder, "--steps", 20]
  finish(start(*args, "--output", tmp_path / "plain"))
  out, _ = finish(start(*args, "--inspect", 10, "--output", tmp_path / "seen"))
  assert "step 11 of qsgd-4:" in out and "gradient norm" in out
  for kind in ("errors", "telemetry"):
    figure = tmp_path / "seen" / f"qsgd-4-{kind}.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
  plain, seen = (read(tmp_path / name / "curves.csv") for name in ("plain", "seen"))
  assert plain == seen


@pytest.mark.slow
@pytest.mark.parametrize(
  "script, options, sent",
  [
    # 8 bits there, perhaps again in the backward pass, and 4 back, with scales.
    ("fsdp_linen", ["--workers", 2], 0.24),
    ("fsdp_nnx", ["--workers", 2], 0.24),
    ("hsdp", ["--hosts", 2, "--chips", 2], 0.15),
  ],
)
def test_transformers_with_cut_parameters_train(script, options, sent):
  out, _ = finish(start(*options, "--steps", 6, script=script))
  losses = [float(line.split()[-1]) for line in out.splitlines() if "loss" in line]
  assert len(losses) == 6 and losses[-1] < 0.8 * max(losses)
  ratio = float(out.splitlines()[-1].split()[1])
  assert sent - 0.06 < ratio < sent, out


WORDS = "language_model --devices 2 --batch-size 4 --length 8 --output {out}"
BLOCKS = f"{WORDS} --model transformer"
PIXELS = "--devices 2 --evaluate-every 3 --output {out} --data-dir {data}"
# The folder of the run, the script, and its options.
RUNS = {
  "images": ("qsgd-4-0", f"image_classification --batch-size 16 {PIXELS}"),
  "switch": (
    "redsync-asq-0",
    f"{WORDS} --model lstm --codec redsync-asq --warmup 3 --ema 0.9 --schedule plateau "
    "--evaluate-every 1",
  ),
  "local": (  # in the midst of the second round
    "blocktop-0",
    f"{BLOCKS} --codec blocktop --local-steps 3 --optimizer adam --evaluate-every 1",
  ),
  "scan": ("qsgd-4-0", f"{BLOCKS} --scan --codec qsgd --bits 4 --feedback error"),
  "zero": ("zero-0", f"{BLOCKS} --parallel zero"),
  "fsdp": ("fsdp-0", f"{BLOCKS} --parallel fsdp"),
  "linen": (".", "fsdp_linen --workers 2"),
  "nnx": (".", "fsdp_nnx --workers 2"),
  "hsdp": (".", "hsdp --hosts 2 --chips 2"),
  "activations": ("linear-0", f"{NET} --codec linear {PIXELS}"),
}


def arrays(path):
  """What was saved after four steps, by the names of the arrays."""
  with ocp.PyTreeCheckpointer() as checkpointer:
    like = checkpointer.metadata(path).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    tree = checkpointer.restore(path, restore_args=as_numpy)
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(name, folder, tmp_path):
  """Also its curve, of which a point is the mean of losses on both sides."""
  run, options = RUNS[name]
  last = tmp_path / "saved" / run / "4"

  def train(number):
    given = options.format(out=tmp_path / f"out-{number}", data=folder)
    script, *given = given.split()
    kept = ["--steps", 4, "--save-every", 2, "--checkpoint", tmp_path / "saved"]
    _, err = finish(start(*given, *kept, script=script))
    return err, arrays(last / "state")

  err, expected = train(1)
  assert "goes on" not in err
  shutil.rmtree(last)
  err, got = train(2)
  assert "goes on after step 2" in err
  assert got.keys() == expected.keys() and got
  for path, array in expected.items():
    np.testing.assert_array_equal(got[path], array, err_msg=path)
  if "{out}" in options:
    first, second = (read(tmp_path / f"out-{i}" / "curves.csv") for i in (1, 2))
    assert first[-1]["step"] == "4" and first == second


@pytest.mark.slow
@pytest.mark.parametrize(
  "options, changed, words",
  [
    (WORDS, "--density 0.1", ["density=0.01", "density=0.1"]),
    (
      "model_parallel --hidden 64 --batch-size 16 --devices 2 --output {out} "
      "--data-dir {data}",
      "--channels 4",
      ["the list of leaves was one without"],
    ),
  ],
)
def test_another_run_is_refused(options, changed, words, folder, tmp_path):
  """By the codec's name, and before arrays of another net are read."""
  script, *given = options.format(out=tmp_path / "out", data=folder).split()
  given += ["--save-every", 2, "--checkpoint", tmp_path / "saved", "--steps"]
  finish(start(*given, 2, script=script))
  process = start(*given, 4, *changed.split(), script=script)
  _, err = process.communicate(timeout=300)
  assert process.returncode and all(x in err for x in words), err
