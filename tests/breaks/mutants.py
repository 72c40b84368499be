"""Changes files that the last landing touched, and asks whether the tests see it.

``make mutants`` changes one operator, number or condition after the other in a copy, by
Cosmic Ray, and runs the tests with the file's name, or those of its room. It stops
after some minutes, prints what no test saw, and ends with 1 if that is more than half.
"""

import argparse
import difflib
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.breaks import run

_LONGEST = 120  # seconds of one mutant


def touched(since: str) -> list[str]:
  """The files of the library that changed, below the repository's root."""
  kept = ("--name-only", "--diff-filter=d", since, "--", "gradcomp", "kernels")
  names = [x for x in run.git("diff", *kept).split() if x.endswith(".py")]
  return [name for name in names if not name.endswith("__init__.py") and tests_of(name)]


def last_landing() -> str:
  """The commit in which the landing before this one raised ``.ci/turn``."""
  return run.git("log", "-2", "--format=%H", ".ci/turn").split()[-1]


def tests_of(name: str) -> str:
  """The test file of a module, or the folder or the file of its room; "" for none."""
  path = Path(name)
  parts = [part for part in path.parts if part not in ("gradcomp", "_src")]
  room, file = Path("tests", *parts[:-1][:1]), f"test_{path.name}"
  # All tests of the room test each operation of the kernels.
  own = () if path.parts[0] == "kernels" else (room / file,)
  for found in (*own, room, Path("tests", "project", f"test_{room.name}.py")):
    if (run.ROOT / found).exists() and found != Path("tests"):
      return str(found)
  return ""


def mutants(text: str) -> list[str]:
  """Every text with one mutation, by the operators that need no names."""
  # Here, for tests collect this file where Cosmic Ray is not installed.
  from cosmic_ray import mutating, plugins

  found: list[str] = []
  for name in plugins.operator_names():
    if "Variable" not in name:
      operator = plugins.get_operator(name)()
      each = (mutating.mutate_code(text, operator, n) for n in itertools.count())
      found += itertools.takewhile(bool, each)
  return found


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  add = parser.add_argument
  add("--minutes", type=float, default=8)
  add("--since", help="a commit; by default the one before the last landing")
  options = parser.parse_args()
  end = time.monotonic() + 60 * options.minutes
  names = touched(options.since or last_landing())
  rng, seen, unseen, healthy = random.Random(0), 0, [], {}
  with tempfile.TemporaryDirectory(prefix="gradcomp-mutants-") as folder:
    copy = run.Copy(Path(folder).resolve(), longest=_LONGEST)
    texts: dict[str, list[str]] = {}
    while names and time.monotonic() < end:
      name = rng.choice(names)
      catcher = tests_of(name)
      passes = lambda of=catcher: copy.test([of], "", False)[0] == "passed"
      if catcher not in healthy:
        healthy[catcher] = passes()
      if not healthy[catcher]:
        print(f"left out: {catcher} does not pass, or not in {_LONGEST} seconds")
        names = [x for x in names if tests_of(x) != catcher]
        continue
      path = copy.root / name
      whole = path.read_text()
      if name not in texts:
        texts[name] = mutants(whole)
        rng.shuffle(texts[name])
      if not texts[name]:
        names.remove(name)
        continue
      changed = texts[name].pop()
      with copy.changed(path, changed):
        passed = passes()
      seen += not passed
      if passed:
        lines = difflib.unified_diff(whole.splitlines(), changed.splitlines(), n=0)
        unseen.append(f"{name}, by {catcher}:\n" + "\n".join(list(lines)[2:]))
  print(*unseen, sep="\n")
  total = seen + len(unseen)
  print(f"Tests saw {seen} of {total} mutants of {len(texts)} files.")
  return int(len(unseen) > total / 2)


if __name__ == "__main__":
  sys.exit(main())
