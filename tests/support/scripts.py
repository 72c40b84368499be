"""Runs the example trainers as their users run them, and reads what they wrote."""

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "image_classification.py"


def example(name):
  """The module of an example, also where a benchmark has its name."""
  spec = importlib.util.spec_from_file_location(
    f"{name}_example", EXAMPLES / f"{name}.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


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
