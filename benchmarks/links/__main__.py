"""Times what crosses links of known rates, between hosts on one machine.

  sudo python -m benchmarks.links speed          whole exchanges (also make links)
  sudo python -m benchmarks.links layers         layers in a loop, exchanged inside it
  sudo python -m benchmarks.links activations    layers that are cut over hosts
  sudo python -m benchmarks.links local          trainings with local steps

Each is a module of this folder, which says with --help what it times and its options.
--quick takes seconds, and --loopback needs no root: hosts are then plain processes, on
a link that nothing limits.

Hosts are network namespaces on rate-limited links (hosts.py), which need Linux, root,
ip and tc. Each runs one process with one device (process.py), and gloo to the others. A
time is the slowest host's, and of several calls, taken in turn, the median. The probe
sends raw TCP from each host to the next, all at once, and shows what the links carry; a
rate of which it reaches less than 0.7 is not measured.

Three things bias the times. The hosts share this machine's cores: with 4 hosts on 2
cores, each codec runs on half a core, and speed-ups come out lower than for hosts with
a core each. The links have no delay unless told, which favors exchanges of many small
messages. They are all alike, and hierarchical is for links that differ. The MALLOC_
settings are the same for all, and keep the pages that XLA would otherwise fault in
anew each step.
"""

import argparse
import importlib
import os
import sys
from typing import Any

from benchmarks.common import cli
from benchmarks.links import hosts as links_hosts
from benchmarks.links import launch, results

CASES = ("speed", "layers", "activations", "local")


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  parser = cli.parser(__doc__)
  parser.add_argument("case", choices=CASES)
  name = parser.parse_args(sys.argv[1:2]).case
  case = importlib.import_module(f"benchmarks.links.{name}")
  args = cli.options(
    case.__doc__,
    case.QUICK,
    f"folder of {case.FILE}.json and .md",
    argv=sys.argv[2:],
    loopback=cli.Option(False, help="links that nothing limits"),
    limit=cli.Option(900.0, help="seconds until workers have failed"),
    **case.OPTIONS,
  )
  if args.loopback:
    args.rates = ["loopback"]
  launch.begin(args.rates != ["loopback"], "--loopback does without", args.quick)
  measure(case, args)


def measure(case: Any, args: argparse.Namespace) -> None:
  """Measures all cells of a case, and writes the record after each."""
  file = case.FILE.format(**vars(args))
  found = results.read(args.output and args.output / f"{file}.json")
  for cell in case.cells(args):
    speed = links_hosts.bits_per_second(cell["rate"])
    cell["load_and_cores"] = [os.getloadavg()[0], float(os.cpu_count() or 1)]
    count, delay = cell["hosts"], getattr(args, "round_trip", 0.0) / 1e3
    with links_hosts.network(count, cell["rate"], delay) as hosts:
      probed = launch.probed(hosts, speed, 2.0 if delay else 0.5)
      cell["probe"], cell["round_trip"], reached = probed
      if reached:
        case.measure(hosts, cell, args)
    found = getattr(case, "joined", results.replaced)(found, cell)
    cli.write(args.output, file, found, case.markdown(found))
    print(f"{count} hosts, {cell['rate']}: probed {min(cell['probe']):,.0f} B/s")
  print(case.markdown(found))


if __name__ == "__main__":
  main()
