"""Compiles codecs and train steps for TPUs and GPUs that are not here.

  make aot     or     python -m benchmarks.compilers

libtpu and JAX's CUDA plugin compile without a device, see targets.py. Nothing runs, so
the tables have properties of programs and the compilers' estimates, and no times but
those that compiling took.

Each row is written as soon as it is there, in place of the old one: `--targets` and
`--cases`, parts of names, choose rows to make anew. `--missing` makes only those that
the record lacks, and so goes on where a run was ended. `--dump` writes the programs.
With `--compare`, and with `--quick`, which makes few rows, they are compared with those
of the record, and written only where `--output` says. The tables leave cases out that
differ little between targets; `--all` has each for every target.

The exit status is 77 where no compiler is here, and 1 where a case did not compile, or
where it is compared and costs more than the record says by the same compiler.
"""

import argparse
import os
import sys
from typing import Any

from benchmarks.common import cli
from benchmarks.compilers import bars, pages, record, targets

TABLES = ("codecs", "steps", "overlap")


def main() -> None:
  options = _options()
  if options.bars:
    bars.write()
    pages.write(record.FOLDER, "codecs")
    return
  here = {x: targets.TARGETS[x].missing() for x in options.targets}
  for name, missing in here.items():
    if missing:
      print(f"left out: {name}, for want of {missing}", flush=True)
  if all(here.values()):
    cli.skip(f"no compiler is here: there is not {next(iter(here.values()))}")
  compare = options.quick or options.compare
  folder = options.output or (None if compare else record.FOLDER)
  if options.dump:
    os.makedirs(options.dump, exist_ok=True)
  targets.prepare()
  compiled = record.Worker()
  extent: Any = "quick" if options.quick else "all" if options.all else "tables"
  wrong = []
  for table in options.tables:
    path = folder and folder / f"{table}.jsonl"
    known = record.read(record.FOLDER / f"{table}.jsonl")
    chosen = [
      (target, case)
      for target in here
      for case in ([] if here[target] else record.cases(table, target, extent))
      if not options.cases or any(part in case for part in options.cases)
    ]
    for target, case in chosen:
      rows = record.read(path) if path else {}
      if options.missing and "error" not in rows.get((target, case), {"error": ""}):
        continue
      made = compiled(table, target, case, options.dump)
      row = {"target": target, "case": case} | made
      print(pages.line(table, row), flush=True)
      old = known.get((target, case)) if compare else None
      wrong += [f"{target}, {case}: {x}" for x in record.dearer(row, old)]
      if path:
        record.write(path, record.read(path) | {(target, case): row})
    if folder:
      pages.write(folder, table)
  if wrong:
    sys.exit("\n".join(["These are not as they should be:", *wrong]))


def _options() -> argparse.Namespace:
  parser = cli.parser(__doc__, "few cases", record.FOLDER)
  every = list(targets.TARGETS)
  parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
  parser.add_argument("--targets", nargs="+", choices=every, default=every)
  parser.add_argument("--cases", nargs="+", help="parts of names; by default all")
  parser.add_argument("--missing", action="store_true", help="only new rows")
  parser.add_argument("--all", action="store_true", help="each case for all targets")
  parser.add_argument("--compare", action="store_true", help="with the record")
  parser.add_argument("--bars", action="store_true", help="only write bars.toml")
  parser.add_argument("--dump", default="", help="folder for the programs' texts")
  return parser.parse_args()


if __name__ == "__main__":
  main()
