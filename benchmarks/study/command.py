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

import sys

from benchmarks.study import options
from benchmarks.study.options import Report, Run
from examples.lib import command_line


def main(argv: list[str] | None = None) -> None:
  args = options.parse(argv, __doc__)
  if isinstance(args, Report):
    from benchmarks.study import report

    return report.write(args.folders, args.output or args.folders[0], args.price)
  for wrong in args.wrong():
    print(wrong, file=sys.stderr)
    sys.exit(2)
  if args.quick:
    from benchmarks.study import smoke

    return smoke.run(args.output)
  if args.launches:
    for launch in options.launches(args.launches, output=args.output):
      execute(launch)
    return None
  if args.rate:
    from benchmarks.study import hosts

    return hosts.run(args, sys.argv[1:] if argv is None else argv)
  execute(args)


def execute(args: Run) -> None:
  """Joins the other processes, and runs what is not there yet."""
  from benchmarks.study import runner

  if not args.emulate:
    command_line.join_processes(args)
  runner.run(args)
