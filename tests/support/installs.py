"""Copies of the tree, wheels of it, and programs there."""

import os
import shutil
import subprocess
import sys

from tests.support.pages import ROOT


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


def tree(folder):
  """A copy of the tree as it is, without its history and what git leaves out."""
  left_out = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__")
  shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
  return folder


def wheel(source, folder):
  """A wheel, as ``pip install .`` builds it, without the index."""
  run("-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
  (path,) = folder.glob("*.whl")
  return path
