"""Declares the command line of studies."""

import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import tyro

from benchmarks.study import methods, tasks
from examples.lib import FOLDER

_LAUNCHES = Path(__file__).with_name("launches.toml")
_POSITIVE = (
  *("seeds", "emulate", "workers", "devices", "num_processes", "probe", "hosts"),
  *("price", "pixels", "epochs", "steps", "steps_only", "timed_steps", "points"),
  *("batch_size", "learning_rate"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """Runs what is not there yet."""

  output: Path | None = None  # folder of the records
  # run all launches of this name in launches.toml; beside it, only --output counts.
  launches: Literal["papers", "digits", "adam", "local"] | None = None
  # two codecs, two networks and two seeds, with the report: a test of seconds, whose
  # results go only where --output says.
  quick: bool = False
  networks: tuple[str, ...] = ("lenet",)  # those that are trained or timed
  # those of methods.py; with :conv, :dense or :body for a part of a network.
  codecs: tuple[str, ...] = ("f32", "qsgd-4")
  exchanges: tuple[str, ...] = ("auto",)  # auto is the codec's own
  seeds: int = 1  # the number of seeds
  first_seed: int = 0  # the first of them
  part: str = "0/1"  # I/N for every N-th run, from the I-th
  emulate: tuple[int, ...] = ()  # workers that one device emulates; accuracy only
  workers: tuple[int, ...] = ()  # numbers of workers; default: all devices
  devices: int = 8  # CPU devices of a process
  coordinator: str | None = None  # HOST:PORT of process 0
  num_processes: int | None = None  # processes of the launch
  process_id: int | None = None  # this one
  link: str = ""  # the name of the link between processes
  interface: str = ""  # whose bytes are counted, such as eth0
  probe: float | None = None  # bytes/s of the link, if you know
  rate: tuple[str, ...] = ()  # start hosts on links of these rates, as 1gbit
  hosts: tuple[int, ...] = (2,)  # numbers of hosts, with --rate
  price: float = 0.9  # dollars an hour of a worker
  # of images: fashion-mnist or mnist of make data, or as in
  # examples/lib/images.py.
  dataset: str = "digits"
  data_dir: Path = FOLDER  # where they are
  pixels: int | None = None  # reduce images to this width and height
  # the corpus of networks of text.
  text: Literal["python", "brown", "brown-words"] = "python"
  epochs: float = 1.0  # of a training
  steps: int | None = None  # in place of epochs
  steps_only: int | None = None  # time so many steps, and train nothing
  timed_steps: int = 20  # those that are timed beside a training
  points: int = 10  # of a curve
  # whether --batch-size is of all workers, or of each.
  batch: Literal["fixed", "per-worker"] = "fixed"
  batch_size: int = 128  # samples of a step
  optimizer: Literal["sgd", "adam", "lars"] = "sgd"  # behind the exchange
  learning_rate: float | None = None  # at first; default: each network's own
  momentum: float | None = None  # of sgd and lars, 0: none; default: a network's
  nesterov: bool = False  # whether the momentum of sgd is Nesterov's
  schedule: Literal["cosine", "polynomial", "constant"] = "cosine"  # how the rate falls
  weight_decay: float = 0.0  # of matrices and kernels
  dropout: float | None = None  # of networks that have any; default: each its own

  @property
  def share(self) -> tuple[int, int]:
    """The first of the runs to take, and the distance to the next."""
    first, _, count = self.part.partition("/")
    return int(first), int(count)

  def wrong(self) -> Iterator[str]:
    yield from self._out_of_range()
    for network in self.networks:
      if network not in tasks.NETWORKS:
        names = ", ".join(tasks.NETWORKS)
        yield f"--networks must be some of {names}, got {network!r}"
    for codec in self.codecs:
      try:
        methods.check(codec)
      except ValueError as error:
        yield f"--codecs {error}"
    if self.output is None and not self.quick:
      yield "--output must be the folder of the records"
    if self.emulate and self.steps_only:
      yield "--steps-only does not go with --emulate, which has no times"
    if self.emulate and (self.rate or self.num_processes):
      yield "--emulate takes one process: leave out --rate and --num-processes"
    for workers in self.emulate or self.workers:
      if self.batch == "fixed" and workers > 0 and self.batch_size % workers:
        yield (
          f"--batch-size must be a multiple of the workers, {workers}; got "
          f"{self.batch_size}"
        )

  def _out_of_range(self) -> Iterator[str]:
    for name in _POSITIVE:
      value = getattr(self, name)
      for x in value if isinstance(value, tuple) else [value]:
        if x is not None and not x > 0:
          yield f"--{name.replace('_', '-')} must be above 0, got {x}"
    for name in ("momentum", "dropout"):
      x = getattr(self, name)
      if x is not None and not 0 <= x < 1:
        yield f"--{name} must be in [0, 1), got {x}"
    if self.weight_decay < 0 or self.first_seed < 0:
      yield "--weight-decay and --first-seed must be 0 or more"
    found = re.fullmatch(r"(\d+)/(\d+)", self.part)
    if not found or int(found[1]) >= int(found[2]):
      yield f"--part must be like 0/2 or 1/2, got {self.part!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """Writes report.html and report.md."""

  folders: Annotated[tuple[Path, ...], tyro.conf.Positional]  # of the records
  output: Path | None = None  # folder of the report; default: the first of the records
  price: float | None = None  # dollars an hour of a worker; default: as launched


_Command = (
  Annotated[Run, tyro.conf.subcommand("run")]
  | Annotated[Report, tyro.conf.subcommand("report")]
)


def parse(argv: list[str] | None, description: str = "") -> Run | Report:
  flags = (tyro.conf.FlagCreatePairsOff,)
  return tyro.cli(_Command, args=argv, description=description, config=flags)


def launches(name: str, **beside: object) -> list[Run]:
  entries = tomllib.loads(_LAUNCHES.read_text())[name]
  return [Run(**entry, **beside) for entry in entries]
