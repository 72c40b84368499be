"""Starts a study's hosts as network namespaces on links of known rates."""

import os
import traceback
from collections.abc import Sequence

from benchmarks.common import cli
from benchmarks.links import hosts as links_hosts
from benchmarks.links import launch
from benchmarks.study import command

_LIMIT = 6 * 3600.0  # seconds, after which hosts have failed


def run(args: command.Run, links: Sequence[tuple[str, int]]) -> None:
  """Runs a study's launches on hosts, for each rate and number of hosts."""
  shaped = any(rate != "loopback" for rate, _ in links)
  launch.begin(shaped, 'the link "loopback" does without')
  for rate, count in links:
    with launch.network(count, rate) as hosts:
      found = launch.probed(hosts, links_hosts.bits_per_second(rate))
      probe = min(found.bytes_a_second)
      print(f"{count} hosts, {rate}: raw TCP carries {8e-6 * probe:,.0f} Mbit/s")
      if not found.reached:
        print("this machine does not reach the rate: it is not measured")
        continue
      meeting = f"{hosts[0].address}:{links_hosts.free_ports(1)[0]}"
      commands = []
      for rank, host in enumerate(hosts):
        own = {
          "output": args.output,
          "part": args.part,
          "coordinator": meeting,
          "num-processes": count,
          "process-id": rank,
          "devices": 1,
          "link": rate,
          "probe": probe,
          "interface": host.interface,
        }
        given = [x for name, value in own.items() for x in (f"--{name}", str(value))]
        given += ["--ways", *args.ways] if args.ways else []
        line = "run", args.launches, *given
        commands.append(cli.module("benchmarks.study.hosts", *line))
      env = cli.path() | launch.ENVIRONMENT
      links_hosts.run(hosts, commands, env, _LIMIT, shown=True)


def main() -> None:
  """Runs a command line on one host, whose links have the rate already."""
  try:
    args = command.parse()
    command.execute(args, args.items())
  except BaseException:
    traceback.print_exc()
    os._exit(1)  # leaving normally would wait for the others, and they for us


if __name__ == "__main__":
  main()
