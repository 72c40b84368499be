"""Runs the papers' studies on real data, and says which of their findings hold.

  python -m benchmarks.study run papers --output DIR
    (all of docs/results/ but its `times`, in about a day of one core; see make data)
  python -m benchmarks.study run mine.toml --output DIR
  srun python -m benchmarks.study run mine.toml --output DIR
  python -m benchmarks.study report DIR [DIR ...]

The runs are those of a file of study/launches/, or of one of your own in the same form,
which queue.toml explains. A run of the way "timed" times the steps of a codec, split
into computation, codec and communication (study/devices.py). "emulated" trains with
workers that one device emulates: there are accuracies and bytes, and no times.
"trained" does on devices that exchange. A study is started as the examples are: as one
process, or in each process of srun or mpirun, which run what has as many hosts. One
process starts hosts itself, as root, for runs with a link: network namespaces.

Each run is a line of JSON in the folder. What is there already is not run again: a
study can be stopped, go on, and be cut into parts. Launches at the same time take
--part 0/2 and --part 1/2. All settings together identify a run. The report joins all
launches.
"""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.common import cli, quiet
from benchmarks.study import items, methods, records
from benchmarks.study.items import Item
from examples.lib import comparisons

_LIMIT = 6 * 3600.0  # seconds, after which hosts have failed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """Runs what is not there yet."""

  # A file of launches, or the name of one of study/launches/.
  launches: Annotated[str, tyro.conf.Positional] = "papers"
  output: Path | None = None  # folder of the records
  ways: tuple[str, ...] = ()  # run these ways alone
  part: str = "0/1"  # I/N for every N-th run, from the I-th
  # Run quick.toml, with the report: a test of seconds.
  quick: bool = False
  devices: int = 8  # CPU devices of a process
  coordinator: str | None = None  # HOST:PORT of process 0
  num_processes: int | None = None  # processes of the launch
  process_id: int | None = None  # this one
  link: str | None = None  # run what has this link, which is there
  interface: str = ""  # whose bytes are counted, such as eth0
  probe: float | None = None  # bytes/s of the link, if you know

  def items(self) -> list[Item]:
    """Returns the runs that the command line names; ValueError if one cannot run."""
    path = Path(self.launches)
    path = path if path.suffix else items.LAUNCHES / f"{path}.toml"
    if not path.exists():
      names = ", ".join(sorted(x.stem for x in items.LAUNCHES.glob("*.toml")))
      raise ValueError(
        f"`launches` must be a file or one of {names}, got {self.launches!r}."
      )
    found = re.fullmatch(r"(\d+)/(\d+)", self.part)
    if not found or int(found[1]) >= int(found[2]):
      raise ValueError(f"`--part` must be like 0/2 or 1/2, got {self.part!r}.")
    every = items.items(path)[int(found[1]) :: int(found[2])]
    for codec in {x.setting.codec for x in every}:
      methods.check(codec)
    return [x for x in every if not self.ways or x.setting.way in self.ways]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """Writes report.html and report.md."""

  folders: Annotated[tuple[Path, ...], tyro.conf.Positional]  # of the records
  output: Path | None = None  # folder of the report; default: the first of the records
  price: float = 0.9  # dollars an hour of a worker


def main(argv: list[str] | None = None) -> None:
  args: Run | Report = tyro.cli(
    Run | Report, args=argv, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)
  )
  if isinstance(args, Report):
    if not args.folders:
      sys.exit("`folders` must be those of the records, got none.")
    from benchmarks.study import report

    return report.write(args.folders, args.output or args.folders[0], args.price)
  if args.quick:
    return quick(args.output)
  try:
    found = args.items()
    if args.output is None:
      raise ValueError("`--output` must be the folder of the records.")
  except ValueError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
  try:
    return execute(args, found)
  except BaseException:
    if args.num_processes is None:
      raise
    traceback.print_exc()
    os._exit(1)  # leaving normally would wait for the others, and they for us


def execute(args: Run, found: list[Item]) -> None:
  """Runs what these processes run by themselves, and starts hosts for the rest."""
  import jax

  from benchmarks.study import runner

  comparisons.join_processes(args)
  here, own, rest = jax.process_count(), [], []
  for item in found:
    given = item.setting
    if args.link is not None or here > 1:
      if given.hosts == here and args.link in (None, given.link):
        own.append(item)
    else:
      (rest if given.link else own).append(item)
  args.output.mkdir(parents=True, exist_ok=True)
  runner.run(own, args.output, args.interface, args.probe)
  done = records.done(args.output) if rest else set()
  left = {(x.link, x.hosts) for x in (y.setting for y in rest) if x not in done}
  if left:
    on_hosts(args, sorted(left))


def on_hosts(args: Run, links: Sequence[tuple[str, int]]) -> None:
  """Runs launches on network namespaces, for each rate and number of hosts."""
  from benchmarks.links import hosts as links_hosts
  from benchmarks.links import launch

  shaped = any(rate != "loopback" for rate, _ in links)
  launch.begin(shaped, 'the link "loopback" does without')
  for rate, count in links:
    with links_hosts.network(count, rate) as hosts:
      received, _, reached = launch.probed(hosts, links_hosts.bits_per_second(rate))
      probe = min(received)
      print(f"{count} hosts, {rate}: raw TCP carries {8e-6 * probe:,.0f} Mbit/s")
      if not reached:
        print("this machine does not reach the rate: it is not measured")
        continue
      same = {
        "output": args.output,
        "part": args.part,
        "coordinator": f"{hosts[0].address}:{links_hosts.free_ports(1)[0]}",
        "num-processes": count,
        "devices": 1,
        "link": rate,
        "probe": probe,
      }
      commands = []
      for rank, host in enumerate(hosts):
        own = same | {"process-id": rank, "interface": host.interface}
        given = [x for name, value in own.items() for x in (f"--{name}", str(value))]
        given += ["--ways", *args.ways] if args.ways else []
        commands.append(cli.module("benchmarks.study", "run", args.launches, *given))
      env = cli.path() | launch.ENVIRONMENT
      links_hosts.run(hosts, commands, env, _LIMIT, shown=True)


_RUNS = 2 * 2 * 2 + 2 * 2 * 2  # by networks, codecs, and seeds or workers
_TITLES = 10
_EMPTY = ("The line", "Accuracy by workers")  # for which it takes more runs


def quick(output: Path | None) -> None:
  """Runs a study of two codecs, two networks and two seeds, and checks its report."""
  if output is None:
    with tempfile.TemporaryDirectory() as folder:
      return quick(Path(folder))
  line = cli.module("benchmarks.study", "run", "quick", "--devices", "2", "--output")
  own = {"JAX_COMPILATION_CACHE_DIR": str(output / "programs"), quiet.VARIABLE: ""}
  for _ in range(2):  # the second time, all is there
    subprocess.run([*line, output], env=os.environ | cli.path() | own, check=True)
  lines = [x for path in output.glob("*.jsonl") for x in path.read_text().splitlines()]
  if not len(lines) == len(records.read(output)) == _RUNS:
    raise RuntimeError(f"there are {len(lines)} runs, and not {_RUNS}")
  main(["report", str(output)])
  _check(output)


def _check(folder: Path) -> None:
  """Checks that a report has all parts, each with a picture or a table."""
  page = (folder / "report.html").read_text()
  if (titles := page.count("<h2>")) != _TITLES:
    raise RuntimeError(f"the page has {titles} parts, and not {_TITLES}")
  pictures = len(list((folder / "figures").glob("*.png")))
  if {page.count("<img "), page.count("data:image/png;base64,")} != {pictures}:
    raise RuntimeError(f"the page does not have the {pictures} pictures")
  for link in re.findall(r'(?:src|href)="(?!data:)([^"]*)"', page):
    raise RuntimeError(f"the page needs {link}")
  text = (folder / "report.md").read_text()
  for empty in re.findall(r"^## (.*)\n\n(?:.*\n\n)?Nothing was run", text, re.M):
    if not empty.startswith(_EMPTY):
      raise RuntimeError(f"the report has nothing about {empty}")
  for name in re.findall(r"\]\((figures/.*?)\)", text):
    if not (folder / name).exists():
      raise RuntimeError(f"{name} is missing")


if __name__ == "__main__":
  main()
