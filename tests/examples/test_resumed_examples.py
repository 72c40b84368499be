"""The example trainers go on from a checkpoint as if they had never stopped."""

import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.scripts import finish, read, start

pytestmark = pytest.mark.slow

TEXT = "--devices 2 --batch-size 4 --length 8 --output {out}"
# The folder of the run, the script, and its options.
RUNS = {
  "images": (
    "qsgd-4-0",
    "image_classification",
    "--devices 2 --batch-size 16 --evaluate-every 3 --output {out} --data-dir {data}",
  ),
  "switch": (
    "redsync-asq-0",
    "language_model",
    f"{TEXT} --model lstm --codec redsync-asq --warmup 3 --ema 0.9 --schedule plateau "
    "--evaluate-every 1",
  ),
  "local": (  # in the midst of the second round
    "blocktop-0",
    "language_model",
    f"{TEXT} --model transformer --codec blocktop --local-steps 3 --optimizer adam "
    "--evaluate-every 1",
  ),
  "scan": (
    "qsgd-4-0",
    "language_model",
    f"{TEXT} --model transformer --scan --codec qsgd --bits 4 --feedback error",
  ),
  "zero": ("zero-0", "language_model", f"{TEXT} --model transformer --parallel zero"),
  "fsdp": ("fsdp-0", "language_model", f"{TEXT} --model transformer --parallel fsdp"),
  "linen": (".", "fsdp_linen", "--workers 2"),
  "nnx": (".", "fsdp_nnx", "--workers 2"),
  "hsdp": (".", "hsdp", "--hosts 2 --chips 2"),
  "activations": (
    "linear-0",
    "model_parallel",
    "--codec linear --devices 2 --hidden 256 --channels 4 --passes 2 --batch-size 64 "
    "--evaluate-every 3 --output {out} --data-dir {data}",
  ),
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
  """Folders of its own for what the scripts leave behind."""
  for name in ("HOME", "MPLCONFIGDIR"):
    (tmp_path / name).mkdir()
    monkeypatch.setenv(name, str(tmp_path / name))


def arrays(folder):
  """What was saved after four steps, by the names of the arrays."""
  with ocp.PyTreeCheckpointer() as checkpointer:
    path = folder / "4" / "state"
    like = checkpointer.metadata(path).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    tree = checkpointer.restore(path, restore_args=as_numpy)
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(name, tmp_path):
  """Also its curve, of which a point is the mean of losses on both sides."""
  run, script, options = RUNS[name]
  saved = tmp_path / "saved"

  def train(number):
    out = tmp_path / f"out-{number}"
    given = options.format(out=out, data=tmp_path / "data").split()
    kept = ["--steps", 4, "--save-every", 2, "--checkpoint", saved]
    out, err = finish(start(*given, *kept, script=script))
    return out, err, arrays(saved / run)

  _, err, expected = train(1)
  assert "goes on" not in err
  shutil.rmtree(saved / run / "4")
  _, err, got = train(2)
  assert "goes on after step 2" in err
  assert got.keys() == expected.keys() and got
  for path, array in expected.items():
    np.testing.assert_array_equal(got[path], array, err_msg=path)
  if "{out}" in options:
    first, second = (read(tmp_path / f"out-{i}" / "curves.csv") for i in (1, 2))
    assert first[-1]["step"] == "4"
    assert first == second


def test_another_codec_is_refused_by_its_name(tmp_path):
  script = "language_model"
  kept = ["--save-every", 2, "--checkpoint", tmp_path / "saved"]
  kept += TEXT.format(out=tmp_path / "out").split()
  finish(start(*kept, "--steps", 2, script=script))
  process = start(*kept, "--steps", 4, "--density", 0.1, script=script)
  _, err = process.communicate(timeout=300)
  assert process.returncode
  assert "density=0.01" in err and "density=0.1" in err and "Make the transf" in err


def test_another_net_is_refused_before_its_arrays_are_read(tmp_path):
  script = "model_parallel"
  kept = ["--checkpoint", tmp_path, "--output", tmp_path, "--data-dir", tmp_path]
  kept += "--devices 2 --hidden 64 --batch-size 16".split()
  finish(start(*kept, "--steps", 1, script=script))
  process = start(*kept, "--steps", 2, "--channels", 4, script=script)
  _, err = process.communicate(timeout=300)
  assert process.returncode and "the list of leaves was one without" in err
