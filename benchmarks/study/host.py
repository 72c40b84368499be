"""Runs a study on one host that study/hosts.py has started."""

import os
import traceback

from benchmarks.study import command, options


def main() -> None:
  """Runs the command line without the rates, which are this host's already."""
  try:
    command.execute(options.parse(None))
  except BaseException:
    traceback.print_exc()
    os._exit(1)  # leaving normally would wait for the others, and they for us


if __name__ == "__main__":
  main()
