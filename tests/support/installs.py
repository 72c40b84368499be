"""Wheels of the tree, and programs there."""

import os
import subprocess
import sys


def run(*args, cwd, python=sys.executable, **env):
  """What a program of Python prints, which must end well."""
  result = subprocess.run(
    [python, *map(str, args)],
    cwd=cwd,
    env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


def wheel(source, folder):
  """A wheel, as ``pip install .`` builds it, without the index."""
  run("-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
  (path,) = folder.glob("*.whl")
  return path
