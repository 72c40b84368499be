"""Runs the papers' studies on real data, and says which of their findings hold.

  python -m benchmarks.study run --emulate 8 --networks lenet gru
    --codecs f32 qsgd-4 onebit-64 --epochs 2 --seeds 5 --output DIR
  python -m benchmarks.study run --workers 1 2 4 --networks lenet
    --codecs f32 qsgd-4 --steps-only 50 --output DIR
  srun python -m benchmarks.study run --networks lenet --codecs f32 qsgd-4
    --link 10gbit --output DIR
  python -m benchmarks.study run --rate 1gbit loopback --hosts 2 4 --networks
    lenet --codecs f32 qsgd-4 --steps-only 20 --output DIR    (as root)
  python -m benchmarks.study run --launches papers --output DIR
    (all of docs/results/ but its times, in about a day of one core; see make data)
  python -m benchmarks.study run --launches digits --output DIR
  python -m benchmarks.study report DIR [DIR ...]

A run times the steps of each codec, split into computation, codec and communication
(study/devices.py), and trains from each seed. With --emulate, one device emulates the
workers: there are accuracies and bytes, and no times. It is started as the examples
are: as one process, or in each process of srun or mpirun, once for each number of
workers. With --rate it starts hosts itself, as network namespaces on links of that
rate.

Each run is a line of JSON in the folder. What is there already is not run again: a
study can be stopped, go on, and be cut into parts. Launches at the same time take
--part 0/2 and --part 1/2. All settings together identify a run. The report joins all
launches.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import cli, quiet
from benchmarks.study import options, records
from examples.lib import comparisons


def main(argv: list[str] | None = None) -> None:
  args = options.parse(argv, __doc__)
  if isinstance(args, options.Report):
    from benchmarks.study import report

    return report.write(args.folders, args.output or args.folders[0], args.price)
  for wrong in args.wrong():
    print(wrong, file=sys.stderr)
    sys.exit(2)
  if args.quick:
    return quick(args.output)
  if args.launches:
    for launch in options.launches(args.launches, output=args.output):
      execute(launch)
    return None
  if args.rate:
    from benchmarks.study import hosts

    return hosts.run(args, sys.argv[1:] if argv is None else argv)
  execute(args)


def execute(args: options.Run) -> None:
  from benchmarks.study import runner

  if not args.emulate:
    comparisons.join_processes(args)
  runner.run(args)


_ALL = "--networks mlp lenet --codecs f32 qsgd-4 --batch-size 16 --steps 2 --points 1"
_LAUNCHES = ("--seeds 2 --emulate 2", "--steps-only 2 --workers 1 2 --devices 2")
_RUNS = 2 * 2 * 2 + 2 * 2 * 2  # by networks, codecs, and seeds or workers
_TITLES = 10
_EMPTY = ("The line", "Accuracy by workers")  # for which it takes more runs


def quick(output: Path | None) -> None:
  """Runs a study of two codecs, two networks and two seeds, and checks its report."""
  if output is None:
    with tempfile.TemporaryDirectory() as folder:
      return quick(Path(folder))
  for launch in (*_LAUNCHES, _LAUNCHES[0]):  # the second time, all is there
    line = f"{_ALL} {launch}".split()
    command = cli.module("benchmarks.study", "run", *line)
    own = {"JAX_COMPILATION_CACHE_DIR": str(output / "programs"), quiet.VARIABLE: ""}
    subprocess.run(
      [*command, "--output", str(output)], env=os.environ | cli.path() | own, check=True
    )
  lines = [x for path in output.glob("*.jsonl") for x in path.read_text().splitlines()]
  if not len(lines) == len(records.read(output)) == _RUNS:
    raise RuntimeError(f"there are {len(lines)} runs, and not {_RUNS}")
  main(["report", str(output)])
  _check(output)


def _check(folder: Path) -> None:
  """Checks that a report has all parts, each with a picture or a table."""
  page = (folder / "report.html").read_text()
  titles = re.findall("<h2>", page)
  if len(titles) != _TITLES:
    raise RuntimeError(f"the page has {len(titles)} parts, and not {_TITLES}")
  pictures = len(list((folder / "figures").glob("*.png")))
  if (
    page.count("<img ") != pictures or page.count("data:image/png;base64,") != pictures
  ):
    raise RuntimeError(f"the page does not have the {pictures} pictures")
  for link in re.findall(r'(?:src|href)="(?!data:)([^"]*)"', page):
    raise RuntimeError(f"the page needs {link}")
  text = (folder / "report.md").read_text()
  for empty in re.findall(
    r"^## (.*)\n\n(?:.*\n\n)?Nothing was run", text, re.MULTILINE
  ):
    if not empty.startswith(_EMPTY):
      raise RuntimeError(f"the report has nothing about {empty}")
  for name in re.findall(r"\]\((figures/.*?)\)", text):
    if not (folder / name).exists():
      raise RuntimeError(f"{name} is missing")
