"""Counts what the project consists of, and lowers budgets.toml to it.

``make budgets`` runs it before a commit. A budget never rises by that; what is new
enters with what it has. ``--raise WHY`` raises those that are exceeded, and writes the
sentence down. ``--programs N`` is what ``make test`` compiles, as its end says.
"""

import argparse
import inspect
import json
import re
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


def files(top, ending):
  """The files below a folder, but for what programs write, and links."""
  found = sorted((ROOT / top).rglob(f"*{ending}"))
  return [x for x in found if not {"_build", "generated"}.intersection(x.parts)]


def counts():
  """What is there: for each kind, the amount for each name."""
  lines, words = Counter(), Counter()
  for top in ("gradcomp", "kernels", "tests", "benchmarks", "examples"):
    for path in files(top, ".py"):
      lines[room(path)] += path.read_text().count("\n")
  for path in files("docs", ".md"):
    words[room(path)] += len(path.read_text().split())
  spaces = [gradcomp, *(getattr(gradcomp, name) for name in gradcomp.__all__)]
  names = sum(len(getattr(x, "__all__", ())) for x in spaces if inspect.ismodule(x))
  found = {"lines": lines, "words": words, "names": {"gradcomp": names}}
  return {kind: {k: v for k, v in of.items() if v} for kind, of in found.items()}


def highest(kind, count):
  """Where the budget of a count may stand."""
  return count + max(SLACK[kind], count * 3 // 100)


def problems(found, budgets):
  """What is above its budget, has none, or stands far below it."""
  wrong = []
  for kind in SLACK:
    for name in sorted({*found[kind], *budgets[kind]}):
      count, budget = found[kind].get(name, 0), budgets[kind].get(name, 0)
      if count > budget:
        wrong.append(f"{name} has {count} {kind}, and may have {budget}")
      elif budget > highest(kind, count):
        wrong.append(f"{name} has {count} {kind}: run make budgets, it may {budget}")
  return wrong


def lowered(found, budgets, why=""):
  """The budgets after a count: higher only for what is new, or with a reason."""
  after = {**budgets, "raised": dict(budgets["raised"])}
  for kind in SLACK:
    after[kind] = {}
    for name, count in sorted(found[kind].items()):
      budget = budgets[kind].get(name, count)
      if why and count > budget:
        after["raised"][name] = f"{budget} to {count} {kind}: {why}"
        budget = count
      after[kind][name] = min(count, budget)
  return after


def written(text, budgets):
  """Returns the file with other budgets; its words and its goals stay as they are."""
  head, _, _ = text.partition("[lines]\n")
  parts = []
  for kind in (*SLACK, "programs", "raised"):
    value = lambda x: f"{x:_}" if isinstance(x, int) else json.dumps(x)
    rows = [f'"{name}" = {value(x)}\n' for name, x in budgets[kind].items()]
    parts.append(f"[{kind}]\n{''.join(rows)}")
  return head + "\n".join(parts)


def sums(found):
  """What the goals are of."""
  total = lambda kind, top: sum(
    x for name, x in found[kind].items() if re.match(rf"({top})(/|$)", name)
  )
  result = {"lines of gradcomp and kernels": total("lines", "gradcomp|kernels")}
  for top in ("tests", "benchmarks", "examples"):
    result[f"lines of {top}"] = total("lines", top)
  result["words of docs"] = total("words", "docs")
  return {**result, "public names": total("names", "gradcomp")}


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--raise", dest="why", default="", metavar="WHY")
  parser.add_argument("--programs", type=int, metavar="N")
  options = parser.parse_args()
  text, found = FILE.read_text(), counts()
  budgets = lowered(found, tomllib.loads(text), options.why)
  if options.programs:
    before = budgets["programs"]["make test"]
    if options.why and options.programs > before:
      budgets["raised"]["make test"] = f"{before} to {options.programs}: {options.why}"
      before = options.programs
    budgets["programs"] = {"make test": min(before, options.programs)}
  FILE.write_text(written(text, budgets))
  for name, count in sums(found).items():
    print(f"{count:>8,} {name}, and {budgets['goals'][name]:,} is the goal")
  above = problems(found, budgets)
  for problem in above:
    print(f"{problem}; --raise WHY would raise it")
  sys.exit(bool(above))


if __name__ == "__main__":
  main()
