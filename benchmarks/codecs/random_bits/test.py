"""Tests the random bits of the rounding with TestU01 and with dieharder.

  python -m benchmarks.codecs.random_bits.test [--batteries Crush]
    [--streams words 'lane 7'] [--rounds 13] [--key 7] [--seconds 3600] [--quick]
    [--output FOLDER]

codecs/random_bits/streams.py says what the bits are, and why no stream has more lanes.
A stream has them in the order in which an encoder of buckets of 512 draws them:

  words     both words of each block, along the columns and then the rows of one leaf
  lane k    one lane alone, in the same order; two draws make a word
  pair i j  two lanes of each block make a word
  steps     both words of each block of a leaf's first row, in one step after another

random_bits.c draws them. Before any test, its words must equal those of the model in
NumPy, bit for bit.

A p-value outside [1e-4, 1 - 1e-4] is printed. A stream fails a test whose p-value is
beyond 1e-10, and nothing is tested after that. It also fails a test whose p-value is
outside [1e-4, 1 - 1e-4] with the next key, too. A sound stream does so in one of
100,000 runs of Crush. The batteries are SmallCrush (15 p-values, five seconds), Crush
(144, twenty minutes), BigCrush (160, longer than Crush) and dieharder (114). --seconds
ends each of them early, and the verdict then has the words "so far". Those of TestU01
mix their kinds of tests, so that a part of a battery has some of every kind.

--rounds compares other numbers of rounds. Results on 13 and fewer are in
results/codecs/random_bits.md: SmallCrush fails a pair at 8 rounds and every stream at
7, and passes all of them from 9 on. 13 are the fewest of which the cipher's authors
know no statistical flaw, and so they stay.

Needs a C compiler and TestU01 (Debian: libtestu01-0-dev in non-free), and dieharder for
the battery of that name. With --output, random_bits.json and random_bits.md there are
written, or get the new rows if they are there already.
"""

import contextlib
import itertools
import json
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.codecs.random_bits.streams import STREAMS, Stream, model
from benchmarks.common import cli
from benchmarks.common.tables import table

SOURCE = pathlib.Path(__file__).with_name("random_bits.c")
P_VALUES = {"SmallCrush": 15, "Crush": 144, "BigCrush": 160, "dieharder": 114}
OUTSIDE, FAILURE = 1e-4, 1e-10
_WITHOUT_END = 1e6  # seconds
_MISSING = (
  "there is no TestU01 here: install libtestu01-0-dev from the section non-free of "
  "Debian, or build https://github.com/umontreal-simul/TestU01-2009 and name its "
  "folders in CPATH and LIBRARY_PATH"
)
_HEAD = """\
# Batteries of tests on the random bits of the rounding

`python -m benchmarks.codecs.random_bits.test` says what the streams and verdicts are.

"""


class Found(NamedTuple):
  """One p-value of a battery."""

  test: str
  p: float

  @property
  def tail(self) -> float:
    """The distance to the nearer of 0 and 1."""
    return min(self.p, 1 - self.p)


def build(rounds: int, folder: pathlib.Path) -> pathlib.Path:
  """Compiles the program, or skips the benchmark where it cannot be compiled."""
  if shutil.which("cc") is None:
    cli.skip("there is no C compiler here: install gcc")
  program = folder / f"random_bits_{rounds}"
  command = ["cc", "-O3", "-march=native", f"-DROUNDS={rounds}"]
  command += ["-I/usr/include/testu01", str(SOURCE), "-ltestu01", "-o", str(program)]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode and re.search("bbattery.h|-ltestu01", done.stderr):
    cli.skip(_MISSING)
  if done.returncode:
    raise RuntimeError(done.stderr)
  return program


def check(program: pathlib.Path, rounds: int) -> None:
  """Compares the program's words with the model's."""
  for name, stream in STREAMS.items():
    expected = model(stream, rounds, 7, rows=3)
    command = [str(program), *stream, "7", "write", str(expected.size)]
    words = np.frombuffer(subprocess.run(command, stdout=-1, check=True).stdout, "u4")
    if not np.array_equal(words, expected):
      raise AssertionError(
        f"{name}, {rounds} rounds: the program departs from the model"
      )


def crush(command: list[str], tests: list[str], seconds: float) -> Iterator[Found]:
  """Yields p-values as a battery of TestU01 finds them, of some tests or of all."""
  numbers = sorted({title.split()[0] for title in tests}, key=int)
  for line in _lines([*command, *numbers], None, seconds):
    if line.startswith("p-value "):
      _, number, p, test = line.split(maxsplit=3)
      yield Found(f"{number} {test.strip()}", float(p))


def dieharder(command: list[str], tests: list[str], seconds: float) -> Iterator[Found]:
  """Yields p-values of dieharder, which reads the words from a pipe; as crush."""
  chosen = [["-d", *title.replace(" ", " -n ").split()] for title in tests] or [["-a"]]
  columns = [
    word for name in ("test_name", "ntuple", "pvalues") for word in ("-D", name)
  ]
  for choice in chosen:
    with subprocess.Popen([*command[:-1], "write"], stdout=subprocess.PIPE) as source:
      line = ["dieharder", *choice, "-g", "200", "-c", ",", *columns]
      try:
        for printed in _lines(line, source.stdout, seconds):
          with contextlib.suppress(ValueError):  # of lines that are no result
            name, ntuple, p = printed.split(",")
            yield Found(f"{name.strip()} {int(ntuple)}", float(p))
      finally:
        source.kill()


def _lines(command: list[str], stdin: Any, seconds: float) -> Iterator[str]:
  """Yields the lines that a process prints until it ends or its time is over."""
  with subprocess.Popen(
    command, stdin=stdin, stdout=subprocess.PIPE, text=True
  ) as process:
    clock = threading.Timer(seconds, process.kill)
    clock.start()
    try:
      yield from process.stdout or ()
      if process.wait() not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{command[0]} ended with {process.returncode}")
    finally:
      clock.cancel()
      process.kill()


def run(
  name: str, program: pathlib.Path, stream: Stream, key: int, seconds: float
) -> dict[str, Any]:
  """Runs a battery, and those of its tests again that found a p-value outside."""
  find = dieharder if name == "dieharder" else crush
  command = lambda key: [str(program), *stream, str(key), name]
  before = _cpu_seconds()
  found, failure = [], False
  for one in find(command(key), [], seconds):
    found.append(one)
    if one.tail < OUTSIDE:
      print(f"  {one.test}: p = {one.p:.3g}", flush=True)
    if failure := one.tail < FAILURE:
      break
  again = []
  # A failure needs no second look, and is the last one.
  if (outside := [one.test for one in found if one.tail < OUTSIDE]) and not failure:
    repeated = find(command(key + 1), outside, _WITHOUT_END)
    again = [one for one in repeated if one.test in outside]
  return summary(name, found, again, _cpu_seconds() - before)


def _cpu_seconds() -> float:
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


def summary(
  name: str, found: list[Found], again: list[Found], seconds: float
) -> dict[str, Any]:
  """Returns what the table shows of a battery."""
  failed = any(one.tail < FAILURE for one in found)
  failed |= any(one.tail < OUTSIDE for one in again)
  whole = len(found) >= P_VALUES[name]
  return {
    "p-values": len(found),
    "outside": [one for one in found if one.tail < OUTSIDE],
    "again": again,
    "CPU seconds": round(seconds),
    "verdict": "fails" if failed else "passes" if whole else "passes so far",
  }


def markdown(rows: dict[str, dict[str, Any]]) -> str:
  """Returns a Markdown table of all rows."""
  header = ["stream", "rounds", "battery", "p-values", "outside [1e-4, 1 - 1e-4]"]
  header += ["with the next key", "CPU minutes", "verdict"]
  lines = []
  text = lambda found: "; ".join(f"{test}: {p:.2g}" for test, p in found) or "none"
  titles = [(*title.split(", "), one) for title, one in rows.items()]
  order = lambda cells: (cells[0], -int(cells[1]), cells[2])
  for name, rounds, stream, one in sorted(titles, key=order):
    count = f"{one['p-values']} of {P_VALUES[name]}"
    cells = [stream, rounds, name, count, text(one["outside"]), text(one["again"])]
    cells += [f"{one['CPU seconds'] / 60:.1f}", one["verdict"]]
    lines.append(cells)
  return f"{table(header, lines)}\n"


def main() -> None:
  parser = cli.parser(
    __doc__, quick="SmallCrush on one stream", output="folder of the two files"
  )
  parser.add_argument(
    "--batteries", nargs="+", choices=P_VALUES, default=["SmallCrush"]
  )
  parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
  parser.add_argument("--rounds", type=int, nargs="+", default=[13])
  parser.add_argument("--key", type=int, default=7)
  parser.add_argument(
    "--seconds", type=float, default=_WITHOUT_END, help="of each battery"
  )
  options = parser.parse_args()
  if options.quick:
    options.batteries, options.streams = ["SmallCrush"], ["words"]
  if "dieharder" in options.batteries and not shutil.which("dieharder"):
    cli.skip("there is no dieharder here: install the package of that name")
  path = options.output and options.output / "random_bits.json"
  rows = json.loads(path.read_text()) if path and path.exists() else {}
  with tempfile.TemporaryDirectory() as folder:
    programs = {n: build(n, pathlib.Path(folder)) for n in options.rounds}
    for rounds, program in programs.items():
      check(program, rounds)
    for name, rounds, stream in itertools.product(
      options.batteries, options.rounds, options.streams
    ):
      title = f"{name}, {rounds}, {stream}"
      one = run(name, programs[rounds], STREAMS[stream], options.key, options.seconds)
      rows[title] = one
      print(f"{title}: {one['verdict']}, {one['p-values']} p-values", flush=True)
      if path:
        cli.write_json(path, rows)
        path.with_suffix(".md").write_text(_HEAD + markdown(rows))
  print(markdown(rows))


if __name__ == "__main__":
  main()
