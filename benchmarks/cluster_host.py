"""Runs a study on one host that cluster_rates.py has started."""

import os
import traceback

import cluster_study


def main() -> None:
  """Runs the command line without the rates, which are this host's already."""
  try:
    args = cluster_study.make_parser().parse_args()
    cluster_study.execute(args)
  except BaseException:
    traceback.print_exc()
    os._exit(1)  # leaving normally would wait for the others, and they for us


if __name__ == "__main__":
  main()
