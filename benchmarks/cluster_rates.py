"""Starts a study's hosts as network namespaces on links of known rates."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import link_start
import links
import quiet
import running

_SCRIPT = str(Path(__file__).with_name("cluster_host.py"))
_LIMIT = 6 * 3600.0  # seconds, after which hosts have failed


def run(args: argparse.Namespace, line: Sequence[str]) -> None:
  """Runs the same command on each host, for each rate and number of hosts.

  Args:
    args: the options.
    line: the command line that they were parsed from.
  """
  if args.rate != ["loopback"] and (missing := links.missing()):
    running.skip(f"limited links need {missing}; --rate loopback does without")
  link_start.leave_by_signals()
  quiet.keep()  # for the hosts, too
  for rate in args.rate:
    speed = None if rate == "loopback" else links.bits_per_second(rate)
    for count in args.hosts:
      with link_start.network(count, rate) as hosts:
        probe = min(link_start.probed(hosts, speed))
        print(f"{count} hosts, {rate}: raw TCP carries {8e-6 * probe:,.0f} Mbit/s")
        if speed and 8 * probe < link_start.REACHED * speed:
          print("this machine does not reach the rate: it is not measured")
          continue
        meeting = f"{hosts[0].address}:{links.free_ports(1)[0]}"
        commands = []
        for rank, host in enumerate(hosts):
          own = {
            "coordinator": meeting,
            "num-processes": count,
            "process-id": rank,
            "devices": 1,
            "link": rate,
            "probe": probe,
            "interface": host.interface,
          }
          options = [
            x for name, value in own.items() for x in (f"--{name}", str(value))
          ]
          commands.append([sys.executable, "-W", "ignore", _SCRIPT, *line, *options])
        links.run(hosts, commands, link_start.ENVIRONMENT, _LIMIT, shown=True)
