"""Runs the example trainers as their users run them, and reads what they wrote."""

import csv
import os
import subprocess
import sys

from tests.support.pages import ROOT


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
  assert not os.listdir(os.environ["HOME"])
  return out, err


def read(path):
  with path.open(newline="") as file:
    return list(csv.DictReader(file))
