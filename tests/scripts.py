"""Runs the example trainers as their users run them, and reads what they wrote."""

import csv
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT = EXAMPLES / "image_classification.py"


def start(*args, script=SCRIPT):
  """The script on emulated devices, whatever this machine has.

  It runs for longer than it compiles, so LLVM optimizes it.
  """
  return subprocess.Popen(
    [sys.executable, str(script), *map(str, args)],
    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process):
  """What it has written to the standard output and error; it must have succeeded."""
  out, err = process.communicate(timeout=300)
  assert process.returncode == 0, err
  assert not os.listdir(os.environ["HOME"])
  return out, err


def read(path):
  with path.open(newline="") as file:
    return list(csv.DictReader(file))
