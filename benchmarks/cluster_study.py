"""Runs the papers' studies on real data, and says which of their findings hold.

  python benchmarks/cluster_study.py run --emulate 8 --networks lenet gru
    --codecs f32 qsgd-4 onebit-64 --epochs 2 --seeds 5 --output DIR
  python benchmarks/cluster_study.py run --workers 1 2 4 --networks lenet
    --codecs f32 qsgd-4 --steps-only 50 --output DIR
  srun python benchmarks/cluster_study.py run --networks lenet --codecs f32 qsgd-4
    --link 10gbit --output DIR
  python benchmarks/cluster_study.py run --rate 1gbit loopback --hosts 2 4 --networks
    lenet --codecs f32 qsgd-4 --steps-only 20 --output DIR    (as root)
  python benchmarks/cluster_study.py run --papers --idx datasets/fashion-mnist
    --output DIR    (all of docs/results/accuracy.md, in about a day of one core)
  python benchmarks/cluster_study.py report DIR [DIR ...]

A run times the steps of each codec, split into computation, codec and communication
(cluster_devices.py), and trains from each seed. With --emulate, one device emulates the
workers: there are accuracies and bytes, and no times. It is started as the examples
are: as one process, or in each process of srun or mpirun, once for each number of
workers. With --rate it starts hosts itself, as network namespaces on links of that
rate.

Each run is a line of JSON in the folder. What is there already is not run again: a
study can be stopped, go on, and be cut into parts. Launches at the same time take
--part 0/2 and --part 1/2. All settings together identify a run. The report joins all
launches.
"""

import argparse
import re
import sys
from pathlib import Path

import cluster_codecs
import cluster_networks
import running
from cluster_launches import LAUNCHES

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import command_line  # noqa: E402
import data  # noqa: E402
import parsing  # noqa: E402


def main(argv: list[str] | None = None) -> None:
  parser = make_parser()
  args = parser.parse_args(argv)
  if args.command == "report":
    import cluster_report

    output = args.output or args.folders[0]
    return cluster_report.write(args.folders, output, args.price)
  if args.quick:
    import cluster_quick

    return cluster_quick.run(args.output)
  if args.output is None:
    parser.error("run needs --output, the folder of the records")
  if args.emulate and args.steps_only:
    parser.error("--steps-only does not go with --emulate, which has no times")
  if args.emulate and (args.rate or args.num_processes):
    parser.error("--emulate takes one process: leave out --rate and --num-processes")
  for workers in args.emulate or args.workers or []:
    if args.batch == "fixed" and args.batch_size % workers:
      parser.error(
        f"--batch-size must be a multiple of the workers, {workers}; got "
        f"{args.batch_size}"
      )
  if args.papers:
    if args.idx is None:
      parser.error("--papers needs --idx, the folder of Fashion-MNIST: see make data")
    given = ["--idx", str(args.idx), "--output", str(args.output)]
    for launch in LAUNCHES:
      execute(parser.parse_args(["run", *launch.split(), *given]))
    return None
  if args.rate:
    import cluster_rates

    return cluster_rates.run(args, sys.argv[1:] if argv is None else argv)
  execute(args)


def execute(args: argparse.Namespace) -> None:
  """Joins the other processes, and runs what is not there yet."""
  import cluster_runs

  if not args.emulate:
    command_line.join_processes(args)
  cluster_runs.run(args)


def make_parser() -> argparse.ArgumentParser:
  """Makes the parser of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  commands = parser.add_subparsers(dest="command", required=True)
  report = commands.add_parser("report", help="write report.html and report.md")
  report.add_argument("folders", type=Path, nargs="+", help="of the records")
  report.add_argument("--output", type=Path, help="default: the first folder")
  price = "dollars an hour of a worker"
  report.add_argument("--price", type=parsing.positive_float, help=price)
  command = commands.add_parser("run", help="run what is not there yet")
  running.add_quick(command, "two codecs, two networks and two seeds, with the report")
  command.add_argument("--output", type=Path, help="folder of the records")
  command.add_argument(
    "--papers",
    action="store_true",
    help="run all launches of cluster_launches.py; only --idx and --output count",
  )

  add = command.add_argument_group("what is compared").add_argument
  names = cluster_networks.NETWORKS
  add("--networks", nargs="+", choices=names, default=["lenet"], metavar="NAME")
  add(
    "--codecs",
    nargs="+",
    type=cluster_codecs.check,
    default=["f32", "qsgd-4"],
    metavar="NAME",
    help=f"{', '.join(cluster_codecs.METHODS)}; with :conv, :dense or :body for a part "
    "of the network",
  )
  add("--exchanges", nargs="+", default=["auto"], help="auto: the codec's own")
  add("--seeds", type=parsing.positive, default=1)
  add("--first-seed", type=parsing.seed, default=0)
  add("--part", type=part, default=(0, 1), metavar="I/N", help="every N-th run, from I")

  add = command.add_argument_group("workers").add_argument
  add(
    "--emulate",
    nargs="+",
    type=parsing.positive,
    metavar="N",
    help="accuracy only",
  )
  add(
    "--workers",
    nargs="+",
    type=parsing.positive,
    metavar="N",
    help="of one process; default: all its devices",
  )
  add("--devices", type=parsing.positive, default=8, help="CPU devices of a process")
  add("--coordinator", metavar="HOST:PORT", help="address of process 0")
  add("--num-processes", type=parsing.positive)
  add("--process-id", type=parsing.natural)
  add("--link", default="", help="the name of the link between processes")
  add("--interface", default="", help="whose bytes are counted, such as eth0")
  add(
    "--probe",
    type=parsing.positive_rate,
    help="bytes/s of the link, if you know",
  )
  add("--rate", nargs="+", metavar="RATE", help="start hosts on links, as 1gbit")
  add("--hosts", nargs="+", type=parsing.positive, default=[2], help="with --rate")
  add("--price", type=parsing.positive_float, default=0.9, help=price)

  add = command.add_argument_group("data").add_argument
  add("--dataset", default="digits", help="as in examples/data.py; default: digits")
  add("--data-dir", type=Path, default=data.FOLDER, help=data.HELP)
  add("--idx", type=Path, metavar="FOLDER", help="images in IDX files; see make data")
  add(
    "--pixels",
    type=parsing.positive,
    help="reduce images to this width and height",
  )
  corpora = ("python", "brown", "brown-words")
  add("--text", choices=corpora, default="python")

  add = command.add_argument_group("training").add_argument
  add("--epochs", type=parsing.positive_float, default=1.0, help="default: 1")
  add("--steps", type=parsing.positive, help="in place of epochs")
  add("--steps-only", type=parsing.positive, metavar="K", help="time K steps alone")
  add("--timed-steps", type=parsing.positive, default=20, help="beside a training")
  add("--points", type=parsing.positive, default=10, help="of a curve; default: 10")
  add("--batch", choices=("fixed", "per-worker"), default="fixed")
  add("--batch-size", type=parsing.positive, default=128, help="of all, or of each")
  add("--optimizer", choices=("sgd", "adam"), default="sgd")
  add("--learning-rate", type=parsing.positive_float, help="default: each its own")
  add("--momentum", type=parsing.share, help="0 for none; default: each network's own")
  schedules = ("cosine", "polynomial", "constant")
  add("--schedule", choices=schedules, default="cosine", help="default: cosine")
  add("--weight-decay", type=parsing.at_least_0, default=0.0, help="default: 0")
  add("--dropout", type=parsing.share, help="of networks with any; each its own")
  return parser


def part(text: str) -> tuple[int, int]:
  """Parses which part of the runs to take.

  Raises:
    argparse.ArgumentTypeError: it is no part.

  Example:
    >>> part("1/2")
    (1, 2)
  """
  found = re.fullmatch(r"(\d+)/(\d+)", text)
  if not found or int(found[1]) >= int(found[2]):
    raise argparse.ArgumentTypeError(f"must be like 0/2 or 1/2, got {text!r}")
  return int(found[1]), int(found[2])


if __name__ == "__main__":
  main()
