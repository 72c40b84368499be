"""Runs each trainer that is installed, and prints a table.

python -m examples.trainers --output benchmarks/results/training/trainers.md
"""

import argparse
import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from examples.lib.parsing import positive

# The package of each, by the name of its file.
PACKAGES = dict(linen="flax", nnx="flax", equinox="equinox", tunix="google-tunix")
PACKAGES |= dict(kauldron="kauldron", scanned="jax", keras="keras")
NEWEST = {"maxtext": "maxtext", "levanter": "marin-levanter"}  # need Python 3.12
COLUMNS = ("trainer", "version", "what changes", "lines changed", "bytes a step")
COLUMNS += ("plain", "loss", "plain loss")


def changed_lines(source: str) -> int:
  """Counts the lines of ``if compressed:`` and of classes named ``Compressed...``."""

  def body(node: ast.AST) -> list[ast.stmt]:
    if isinstance(node, ast.ClassDef) and node.name.startswith("Compressed"):
      return [node]
    return node.body if isinstance(node, ast.If) else []

  parts = [
    ast.get_source_segment(source, statement)
    for node in ast.walk(ast.parse(source))
    for statement in body(node)
    if not ast.unparse(statement).startswith("trainers.main")
  ]
  return sum(bool(line.strip()) for part in parts for line in part.splitlines())


def about(name: str) -> tuple[str, str, str]:
  """Returns a trainer's title, what changes, and in how many lines."""
  source = Path(__file__).with_name(f"{name}.py").read_text()
  tidy = lambda x: " ".join(x.split()).removesuffix(".").replace("``", "`")
  title, what = map(tidy, ast.get_docstring(ast.parse(source)).split("\n\n"))
  return title, what, str(changed_lines(source))


def row(name: str, steps: int) -> list[str]:
  """Returns the cells of a trainer, which a process of its own measures."""
  command = [sys.executable, "-m", f"examples.trainers.{name}", "--steps", str(steps)]
  printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
  found = re.findall(r"loss (\S+) after \d+ steps, (\S+) bytes", printed)
  (plain_loss, plain), (loss, sent) = found
  package = (PACKAGES | NEWEST)[name]
  version = f"{package} {importlib.metadata.version(package)}"
  title, what, changed = about(name)
  return [title, version, what, changed, sent, plain, loss, plain_loss]


def main() -> None:
  """Prints the table, and the names of those that are not installed."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=positive, default=40, help="default: 40")
  parser.add_argument("--newest", action="store_true", help="those of Python 3.12")
  parser.add_argument("--output", type=Path, help="a Markdown file for the table")
  args = parser.parse_args()
  rows = [list(COLUMNS), ["---"] * len(COLUMNS)]
  for name in NEWEST if args.newest else PACKAGES:
    # The package's name in Python is the file's, but for those of flax and of JAX.
    if name not in ("linen", "nnx", "scanned") and not importlib.util.find_spec(name):
      print(f"skipped: {name} is not installed")
      continue
    rows.append(row(name, args.steps))
  table = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
  print(table, end="")
  if args.output:
    command = f"python -m examples.trainers{' --newest' * args.newest}"
    head = f"# Trainers\n\n{args.steps} steps, by `{command}`.\n\n"
    args.output.write_text(head + table)


if __name__ == "__main__":
  main()
