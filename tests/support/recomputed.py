"""Says where a golden case has other bits than those that its hash was made of.

A hash keeps none of them. An earlier commit computes them again, and the hash proves
that they are the right ones.
"""

import itertools
import os
import pickle
import subprocess
import sys
import tempfile

import numpy as np

from tests.plugins import selected
from tests.support import golden
from tests.support.pages import ROOT

# HEAD for a change that is not committed yet, and commits before one that is.
_COMMITS = ("HEAD", "HEAD~1", "HEAD~4", "HEAD~16", "HEAD~64")

# How many cases a process explains: each commit takes some seconds.
_MOST = 3
_explained = itertools.count()

# Prints the digest, and the bytes of all arrays in the order in which it takes them.
_PROGRAM = """
import pickle, sys
from tests.support import golden
(case,) = (case for case in golden.cases() if case.name == sys.argv[1])
plain, taken = golden._bytes, []
golden._bytes = lambda leaf: taken.append(plain(leaf)) or taken[-1]
pickle.dump((golden.digest(case), taken), sys.stdout.buffer)
"""


def git(*command):
  """The bytes that git prints in the tree; none without a history."""
  try:
    started = ["git", "-C", str(ROOT), *command]
    return subprocess.run(started, capture_output=True).stdout
  except FileNotFoundError:
    return b""


def difference(case, right):
  """Names the first array with other bits than the hash, the index, and both words."""
  if next(_explained) >= _MOST:
    return f"{case.name} has other bits, too"
  for commit in _COMMITS:
    if sources := git("archive", commit, "gradcomp", "kernels", "tests"):
      digest, expected = _recomputed(case, sources)
      if digest == right:
        steps = golden.steps(case)
        return f"{case.name}, against {commit}: {compared(steps, expected)}"
  return (
    f"{case.name} has other bits, and so has every commit of {', '.join(_COMMITS)} "
    "that is in this clone: another one, another JAX or another machine made the hash"
  )


def _recomputed(case, sources):
  """What the program prints in the tree of an archive; None if it fails there."""
  with tempfile.TemporaryDirectory() as tree:
    subprocess.run(["tar", "-x", "-C", tree], input=sources, check=True)
    environment = os.environ | {
      "JAX_NUM_CPU_DEVICES": "8",
      "PYTHONPATH": tree,
      "XLA_FLAGS": " ".join(selected.IN_LEAST_TIME),
    }
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, case.name]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True)
  return pickle.loads(done.stdout) if done.returncode == 0 else (None, [])


def compared(steps, expected):
  """Compares the arrays of all steps with the bytes that a digest has taken of them."""
  steps = list(steps)
  count = len(expected) // len(steps)
  for number, (outputs, state) in enumerate(steps):
    rights = expected[number * count :][:count]
    known = rights[len(outputs) :]  # arrays of a state count as a set
    arrays = [("output", *item, []) for item in outputs.items()]
    arrays += [("state", *item, known) for item in state.items()]
    if len(arrays) != count:
      return f"step {number} has {len(arrays)} arrays instead of {count}"
    for (kind, path, array, others), right in zip(arrays, rights, strict=True):
      if golden._bytes(array) not in (right, *others):
        return f"step {number}, {kind} {path}{_first(np.asarray(array), right)}"
  return "the same bits"


def _first(array, expected):
  """The first word of an array that differs from that in the bytes of another one."""
  bytes_ = golden._bytes(array)
  header = len(array.dtype.str)
  if len(bytes_) != len(expected) or bytes_[:header] != expected[:header]:
    return f" is {array.dtype}{list(array.shape)} now, and had another size or dtype"
  word = f"u{array.itemsize}"
  now, then = (np.frombuffer(x[header:], word) for x in (bytes_, expected))
  wrong = now != then
  at = int(wrong.argmax())
  index = ", ".join(map(str, np.unravel_index(at, array.shape)))
  digits = 2 * array.itemsize
  return (
    f"[{index}]: 0x{now[at]:0{digits}x} instead of 0x{then[at]:0{digits}x}; "
    f"{wrong.sum():,} of {wrong.size:,} differ"
  )
