"""Options of the examples refuse what is out of their range, as argparse does.

Each has its own name in the error, and the process ends with 2 before anything runs.
"""

import functools
import types

import pytest

from examples import hsdp, image_classification, language_model, model_parallel
from examples.lib.sharded import fsdp_training
from gradcomp import __main__ as plan

# Beside a benchmark of the same name, which is found first.

NEVER = ("-1", "nan", "inf", "-inf", "x", "", "9223372036854775808", "1e30")
ZERO = {  # that are off at 0, or count from it
  "--channels",
  "--dropout",
  "--momentum",
  "--process-id",
  "--seed",
  "--warmup",
  "--weight-decay",
}
PARSERS = {
  "images": image_classification.make_parser,
  "text": language_model.make_parser,
  "layers": model_parallel.make_parser,
  "fsdp": lambda: fsdp_training.make_parser("title"),
  "hsdp": hsdp.make_parser,
}
MAINS = {
  "images": image_classification.main,
  "text": language_model.main,
  "layers": model_parallel.main,
  "fsdp": functools.partial(fsdp_training.arguments, "title"),
  "hsdp": hsdp.main,
}
OPTIONS = [
  (name, action.option_strings[-1])
  for name, make in PARSERS.items()
  for action in make()._actions
  if isinstance(action.type, types.FunctionType) or action.type in (int, float)
]


def refused(capsys, call, *given):
  """The complaint about a command line."""
  with pytest.raises(SystemExit) as stop:
    call(list(map(str, given)))
  assert stop.value.code == 2
  return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name, option", OPTIONS)
def test_numbers_are_bounded(name, option, capsys):
  parser = PARSERS[name]()
  for value in (*NEVER, *([] if option in ZERO else ["0"])):
    said = refused(capsys, parser.parse_args, f"{option}={value}")
    assert f"argument {option}: " in said


@pytest.mark.parametrize("name, option", OPTIONS)
def test_defaults_are_within_the_bounds(name, option):
  parser = PARSERS[name]()
  (action,) = (x for x in parser._actions if option in x.option_strings)
  if action.default is not None:
    args = parser.parse_args([f"{option}={action.default}"])
    assert getattr(args, action.dest) == action.default


@pytest.mark.parametrize(
  "name, given, said",
  [
    ("images", ["--density", 2], "argument --density: must be in (0, 1], got 2"),
    (
      "images",
      ["--local-steps", 9, "--steps", 4],
      "--local-steps must be at most",
    ),
    ("text", ["--local-steps", 9, "--steps", 4], "--local-steps must be at most"),
    (
      "text",
      ["--process-id", 2, "--num-processes", 2],
      "--process-id must be below",
    ),
    (
      "images",
      ["--bucket-size", 48],
      "--bucket-size: must be a multiple of 32, got 48",
    ),
    ("fsdp", ["--workers", 3], "--workers must divide the 32"),
    ("fsdp", ["--workers", 0], "argument --workers: must be at least 1, got 0"),
    ("hsdp", ["--hosts", 0], "argument --hosts: must be at least 1, got 0"),
    ("hsdp", ["--inspect", 0], "argument --inspect: must be at least 1, got 0"),
    ("hsdp", ["--save-every", 0], "argument --save-every: must be at least 1, got 0"),
    ("hsdp", ["--steps", -1], "argument --steps: must be at least 1, got -1"),
  ],
)
def test_what_cannot_be_is_said_at_the_door(name, given, said, capsys):
  assert said in refused(capsys, MAINS[name], *given)


PLAN = "plan --params 1e6 --workers 2 --gbit 1".split()
PLANNED = "params workers gbit inside-gbit latency forward backward steps".split()


@pytest.mark.parametrize("option", [*PLANNED, "slower", "budget"])
def test_the_planner_bounds_its_options(option, capsys):
  values = ("-1", "nan", "inf", "x", "", "1e300", "4x2x2")
  for value in values[: 5 if option == "budget" else None]:
    said = refused(capsys, plan.main, *PLAN, f"--{option}={value}")
    assert f"argument --{option}: must be " in said and value in said


@pytest.mark.parametrize(
  "given, said",
  [
    (["--workers=4x2x2"], "argument --workers: must be a number of workers, as 8, or"),
    (["--workers=4x2"], "argument --inside-gbit: must be given with hosts x chips"),
    (["--inside-gbit=3"], "argument --inside-gbit: must be given with hosts x chips"),
    (["--workers=0"], "argument --workers: must be"),
    (["--workers=262145"], "`workers` must be less"),
    (["--params=1e30"], "from 1 to 1e15, such as 25M or 25e6, got 1e30"),
    (["--slower=0"], "argument --slower: must be a number from 1e-06 to 1e+06, got 0"),
    (["--gbit=0"], "argument --gbit: must be a number from 1e-06 to 1e+06, got 0"),
    (["--gbit=1e-300"], "argument --gbit: must be a number from 1e-06"),
    (["--forward=1"], "argument --forward: must be given with --backward"),
    (["--steps=1.5"], "argument --steps: must be a whole number of steps, got 1.5"),
    (["--budget=low"], "argument --budget: must be none, tight, paper, aggressive, or"),
  ],
)
def test_what_cannot_be_planned_is_said_at_the_door(given, said, capsys):
  assert said in refused(capsys, plan.main, *PLAN, *given)


@pytest.mark.parametrize(
  "text, number",
  [
    ("25M", 25_000_000),
    ("25m", 25_000_000),
    ("25e6", 25_000_000),
    ("25_000_000", 25_000_000),
    ("0.5B", 500_000_000),
    ("7b", 7_000_000_000),
    ("7G", 7_000_000_000),
    ("1.5T", 1_500_000_000_000),
    ("100k", 100_000),
    ("1e15", 10**15),
    ("1", 1),
  ],
)
def test_parameters_have_suffixes_and_exponents(text, number):
  assert plan._params(text) == number
