"""Command lines of examples and of the planner refuse what is out of range, by name."""

import re
import shlex
import types

import pytest

from examples import (
  fsdp_linen,
  hsdp,
  image_classification,
  language_model,
  model_parallel,
)
from gradcomp import __main__ as planner
from tests.support.assertions import says

NEVER = ("-1", "nan", "inf", "-inf", "x", "", "9223372036854775808", "1e30")
ZERO = {  # that are off at 0, or count from it
  *("--channels", "--dropout", "--momentum", "--process-id", "--seed", "--warmup"),
  "--weight-decay",
}
EXAMPLES = {"images": image_classification, "text": language_model, "hsdp": hsdp}
EXAMPLES |= {"layers": model_parallel, "fsdp": fsdp_linen}
PROGRAMS = {name: example.main for name, example in EXAMPLES.items()} | {
  "plan": lambda given: planner.main(PLAN.split() + given),
  "scan": lambda given: language_model.main([*SCAN.split(), *given]),
}
PLAN = "plan --params 1e6 --workers 2 --gbit 1"
SCAN = "--model transformer --scan"
OPTIONS = [
  (name, action.option_strings[-1])
  for name, example in EXAMPLES.items()
  for action in example.make_parser()._actions
  if isinstance(action.type, types.FunctionType) or action.type in (int, float)
]
LINES = """
images --density 2: argument --density: must be in (0, 1], got 2
images --bucket-size 48: --bucket-size: must be a multiple of 32, got 48
images --dropout 1: argument --dropout: must be in [0, 1), got 1
images --codec qsgd5: 'qsgd', 'none', 'f32', 'bf16'
images --compare f32 qsgd-9: 'qsgd-8', 'qsgd-16', 'qsgd-2-nonuniform'
text --ema 1: argument --ema: must be in (0, 1), got 1
fsdp --workers 3: --workers must divide the 32
# Options that do not go together.
images,text --local-steps 9 --steps 4: --local-steps must be at most
text --process-id 2 --num-processes 2: --process-id must be below
images,text --codec onebit-64 --feedback none: later steps must make up
images,text --codec redsync --optimizer adam: choose f32 for Adam
images,text --codec redsync --warmup 5 --steps 5: --warmup must leave some of the 5
images,text --codec none --inspect 1: leave out none
images --model resnet --dropout 0.1: --dropout does not go with resnet
text --model gru --dropout 0.1: --dropout does not go with gru
text --parallel zero --ema 0.9: --ema does not go with --parallel zero
text --parallel zero --compare: --compare does not go with --parallel zero
text --parallel zero --codec f32: --codec does not go with --parallel zero
text --parallel zero --clip 2: --clip does not go with --parallel zero
text --parallel zero --weight-decay 0.1: does not go with --parallel zero
text --parallel zero --schedule plateau: does not go with --parallel zero
text --local-steps 3 --codec redsync: --local-steps does not go with redsync
text --local-steps 3 --codec none: --local-steps does not go with none
text --local-steps 3 --codec f32 --schedule plateau: does not go with --local-steps
text --local-steps 3 --parallel zero: does not go with --parallel zero
scan --model lstm --codec f32: a model without blocks
scan --codec redsync: does not go with redsync
scan --codec topk-1: does not go with topk-1
scan --codec qsgd-4-nonuniform: does not go with qsgd-4-nonuniform
scan --codec none: does not go with none
scan --local-steps 4 --codec f32: --local-steps does not go
scan --parallel zero: --scan does not go with --parallel zero
# The planner.
plan --workers=4x2x2: --workers: must be a number of workers, as 8, or ... got 4x2x2
plan --workers=4x2: argument --inside-gbit: must be given with hosts x chips
plan --inside-gbit=3: argument --inside-gbit: must be given with hosts x chips
plan --workers=0: argument --workers: must be ... got 0
plan --workers=262145: `workers` must be less
plan --params=0: argument --params: must be ... got 0
plan --slower=0: argument --slower: must be a number from 1e-06 to 1e+06, got 0
plan --gbit=0: argument --gbit: must be a number from 1e-06 to 1e+06, got 0
plan --gbit=1e-300: argument --gbit: must be a number from 1e-06
plan --forward=1: argument --forward: must be given with --backward
plan --steps=1.5: argument --steps: must be a whole number of steps, got 1.5
plan --budget=low: argument --budget: must be none, tight, paper, aggressive, or
"""


def refused(capsys, call, given):
  with pytest.raises(SystemExit) as stop:
    call(given)
  assert stop.value.code == 2
  return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name, option", OPTIONS)
def test_numbers_are_bounded(name, option, capsys):
  parser = EXAMPLES[name].make_parser()
  for value in (*NEVER, *([] if option in ZERO else ["0"])):
    said = refused(capsys, parser.parse_args, [f"{option}={value}"])
    assert f"argument {option}: " in said
  (action,) = (x for x in parser._actions if option in x.option_strings)
  if action.default is not None:
    args = parser.parse_args([f"{option}={action.default}"])
    assert getattr(args, action.dest) == action.default


PLANNED = "params workers gbit inside-gbit latency forward backward steps slower budget"


@pytest.mark.parametrize("option", PLANNED.split())
def test_the_planner_bounds_its_options(option, capsys):
  values = ("-1", "nan", "inf", "x", "", "1e300", "4x2x2")
  for value in values[: 5 if option == "budget" else None]:
    said = refused(capsys, PROGRAMS["plan"], [f"--{option}={value}"])
    assert f"argument --{option}: must be " in said and value in said


@pytest.mark.parametrize("line", [x for x in LINES.split("\n") if x and x[0] != "#"])
def test_bad_lines(line, capsys):
  given, words = line.split(": ", 1)
  names, *given = shlex.split(given)
  for name in names.split(","):
    said = refused(capsys, PROGRAMS[name], given)
    assert re.search(says(*words.split(" ... ")), said), said


def test_parameters_have_suffixes_and_exponents():
  for text, number in {
    **dict.fromkeys(("25M", "25m", "25e6", "25_000_000"), 25_000_000),
    **{"0.5B": 500_000_000, "7b": 7_000_000_000, "7G": 7_000_000_000, "100k": 100_000},
    **{"1.5T": 1_500_000_000_000, "1e15": 10**15, "1": 1},
  }.items():
    assert planner._params(text) == number
