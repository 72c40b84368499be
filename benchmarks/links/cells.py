"""Reads which cells of links to measure: rates, hosts and gradients."""

import argparse
import itertools
import pathlib
import sys
from typing import NamedTuple

import numpy as np

from benchmarks.common import cli, shapes
from benchmarks.links import methods

_RATES = ("100mbit", "1gbit", "5gbit", "10gbit", "loopback")


class Cell(NamedTuple):
  """Names what is measured together.

  Attributes:
    rate: of each direction of each link, in tc's words, or ``"loopback"``.
    hosts: their number.
    leaves: the number of equal leaves, or ``"resnet50"``.
    brief: whether most codecs are left out.
    hangs: whether PyTorch is to show a hang, in which nothing happens for a minute.
  """

  rate: str
  hosts: int
  leaves: int | str
  brief: bool
  hangs: bool


def cells(options: argparse.Namespace) -> list[Cell]:
  """Returns the cells to measure; by default there is one with ResNet-50."""
  default = not (options.rates or options.leaves or options.codecs)
  rates = options.rates or (_RATES if default else ["1gbit"])
  return [
    Cell(
      rate,
      hosts,
      leaves,
      brief=(rate, leaves) != ("1gbit", 1),
      hangs=options.buckets or (default and (hosts, leaves) == (2, "resnet50")),
    )
    for leaves in options.leaves or ([1, "resnet50"] if default else [1])
    for hosts, rate in itertools.product(options.hosts, rates)
    if not default or leaves == 1 or (rate, hosts) == ("1gbit", 2)
  ]


def shapes_of(leaves: int | str, mib: float) -> list[tuple[int, ...]]:
  """Returns the shapes of a gradient's leaves: equal matrices, or ResNet-50's.

  Example:
    >>> shapes_of(2, mib=1)
    [(256, 512), (256, 512)]
  """
  if leaves == "resnet50":
    return shapes.resnet50_shapes()
  size = int(mib * 2**20) // 4 // int(leaves)
  rows = 2 ** (int(np.log2(size)) // 2)  # of a matrix, which low rank needs
  return [(rows, size // rows)] * int(leaves)


def parse(description: str | None) -> argparse.Namespace:
  """Reads the command line."""
  parser = cli.parser(description, quick="2 hosts, 1 MiB, 4 codecs, 1 repeat")
  add = parser.add_argument
  add("--hosts", type=int, nargs="+", default=[2, 4])
  add("--rates", nargs="+", help="of each direction, in tc's words, or loopback")
  add("--leaves", type=_leaves, nargs="+", help="equal leaves, or resnet50")
  add("--mib", type=int, default=64, help="size of the equal leaves together, in f32")
  add("--repeats", type=int, help="by default 5, and 2 below 500 Mbit/s")
  add("--codecs", nargs="+", choices=methods.STEPS, help="all exchanges of these")
  add("--no-probe", dest="probe", action="store_false", help="skip the raw TCP probe")
  add("--loopback", action="store_true", help="the same as --rates loopback")
  add(
    "--limit", type=float, default=900, help="seconds after which workers have failed"
  )
  add("--torch", default=sys.executable, help="a Python with PyTorch; empty for none")
  add("--only-ddp", action="store_true", help="measure PyTorch alone")
  add(
    "--buckets", action="store_true", help="show that PowerSGD's hook hangs in buckets"
  )
  add("--hang-seconds", type=float, default=60, help="until a step of PyTorch has hung")
  add("--draw", action="store_true", help="only write the table of the results")
  add("--fresh", action="store_true", help="drop the results that are there")
  where = "folder of link_speed.json and .md; by default results/links, and "
  add("--output", type=pathlib.Path, help=where + "none with --quick")
  options = parser.parse_args()
  if options.quick:
    options.hosts, options.mib, options.repeats = [2], 1, 1
    options.rates, options.leaves = ["1gbit"], [1]
    options.codecs = ["qsgd-4", "terngrad", "aps-8", "redsync-1%"]
    cli.compile_fast()
  if options.loopback:
    options.rates = ["loopback"]
  return options


def _leaves(text: str) -> int | str:
  return text if text == "resnet50" else int(text)
