"""Counts what the project consists of, and lowers budgets.toml to it: ``make budgets``.

What is new enters with what it has. ``--raise WHY`` raises what is exceeded, and writes
the sentence down. ``--programs N`` is what ``make test`` compiles, as it says.
"""

import argparse
import inspect
import json
import sys
import tomllib
from collections import Counter

import gradcomp
from tests.support.pages import ROOT

FILE = ROOT / "tests" / "project" / "budgets.toml"
# A budget may stand 3 % above what is there, or by that much where it is small.
SLACK = {"lines": 20, "words": 60, "names": 0}
# Whose folders have a budget each; the others have one.
CUT = {"gradcomp", "gradcomp/_src", "docs/results"}
CUT |= {"tests", "benchmarks", "examples", "docs"}


def room(path):
  """The folder whose budget a file is in: what lies below it belongs to it."""
  name, *below = path.relative_to(ROOT).parent.parts
  for folder in below:
    if name not in CUT:
      break
    name = f"{name}/{folder}"
  return name


def summed(pattern, amount, *tops):
  """The amounts of files, by their rooms, but for what programs write, and links."""
  found = Counter()
  for path in (path for top in tops for path in (ROOT / top).rglob(pattern)):
    if not {"_build", "generated"}.intersection(path.parts):
      found[room(path)] += amount(path.read_text())
  return +found


def counts():
  """What is there: for each kind, the amount for each name."""
  tops = ("gradcomp", "kernels", "tests", "benchmarks", "examples")
  spaces = [gradcomp, *(getattr(gradcomp, name) for name in gradcomp.__all__)]
  names = sum(len(getattr(x, "__all__", ())) for x in spaces if inspect.ismodule(x))
  return {
    "lines": summed("*.py", lambda text: text.count("\n"), *tops),
    "words": summed("*.md", lambda text: len(text.split()), "docs"),
    "names": {"gradcomp": names},
  }


def problems(found, budgets):
  """What is above its budget, has none, or stands far below it."""
  wrong = []
  for kind in SLACK:
    for name in sorted({*found[kind], *budgets[kind]}):
      count, budget = found[kind].get(name, 0), budgets[kind].get(name, 0)
      if count > budget:
        wrong.append(f"{name} has {count} {kind}, and may have {budget}")
      elif budget > count + max(SLACK[kind], count * 3 // 100):
        wrong.append(f"{name} has {count} {kind}: run make budgets, it may {budget}")
  return wrong


def lowered(found, budgets, why=""):
  """The budgets after a count: higher only for what is new, or with a reason."""
  after = {**budgets, "raised": dict(budgets["raised"])}
  for kind in (*SLACK, "programs"):
    after[kind] = {}
    for name, count in sorted(found.get(kind, budgets[kind]).items()):
      budget = budgets[kind].get(name, count)
      if why and count > budget:
        after["raised"][name] = f"{budget} to {count} {kind}: {why}"
        budget = count
      after[kind][name] = min(count, budget)
  return after


def written(text, budgets):
  """Returns the file with other budgets; its words and its goals stay as they are."""
  value = lambda x: f"{x:_}" if isinstance(x, int) else json.dumps(x)
  parts = [text.partition("[lines]\n")[0]]
  for kind in (*SLACK, "programs", "raised"):
    rows = [f'"{name}" = {value(x)}\n' for name, x in budgets[kind].items()]
    parts.append(f"[{kind}]\n{''.join(rows)}\n")
  return "".join(parts)[:-1]


def sums(found):
  kinds = {kind: Counter() for kind in SLACK}
  for kind in SLACK:
    for name, amount in found[kind].items():
      kinds[kind][name.split("/")[0]] += amount
  lines, words, names = kinds.values()
  library = lines.pop("gradcomp") + lines.pop("kernels")
  result = {"lines of gradcomp and kernels": library}
  result |= {f"lines of {top}": amount for top, amount in lines.items()}
  return {**result, "words of docs": words["docs"], "public names": names["gradcomp"]}


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--raise", dest="why", default="", metavar="WHY")
  parser.add_argument("--programs", type=int, metavar="N")
  options = parser.parse_args()
  text, found = FILE.read_text(), counts()
  if options.programs:
    found["programs"] = {"make test": options.programs}
  budgets = lowered(found, tomllib.loads(text), options.why)
  FILE.write_text(written(text, budgets))
  for name, count in sums(found).items():
    print(f"{count:>8,} {name}, and {budgets['goals'][name]:,} is the goal")
  above = problems(found, budgets)
  for problem in above:
    print(f"{problem}; --raise WHY would raise it")
  sys.exit(bool(above))


if __name__ == "__main__":
  main()
