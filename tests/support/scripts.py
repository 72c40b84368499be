"""Runs the example trainers as their users run them, and reads what they wrote."""

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPT = EXAMPLES / "image_classification.py"


def example(name):
  """The module of an example."""
  return importlib.import_module(f"examples.{name}")


def start(*args, script=SCRIPT):
  """The script on emulated devices, whatever this machine has.

  It runs for longer than it compiles, so LLVM optimizes it.
  """
  module = ".".join(script.relative_to(ROOT).with_suffix("").parts)
  return subprocess.Popen(
    [sys.executable, "-m", module, *map(str, args)],
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
  assert not os.listdir(os.environ["HOME"])
  return out, err


def read(path):
  with path.open(newline="") as file:
    return list(csv.DictReader(file))
