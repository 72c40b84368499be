"""Flags, named choices and fields with a rule refuse all else, found by types."""

import functools
import inspect
import re
import types
import typing
from dataclasses import is_dataclass

import optax
import pytest

from gradcomp import codecs
from gradcomp._src import checks
from tests.support import factories
from tests.support.assertions import says
from tests.support.cases.recipe import NEEDED

SGD = optax.sgd(0.1)
CODEC = codecs.QSGD()
OVER = {"codec": CODEC, "axis_name": "data"}
BASE = NEEDED | {
  "Policy": {"rules": [("w", CODEC)]},
  "adam": {"learning_rate": 0.1},
  "clip_by_local_norm": {"max_norm": 1.0},
  "compress": {"codec": CODEC},
  "FloatFormat": {"exponent_bits": 5, "mantissa_bits": 2},
  "compress_in_scan": OVER,
  "dion": {"learning_rate": 0.1, "rank": 1},
  "local_steps": {"inner": SGD, "outer": SGD, "every": 2, **OVER},
  "zero": {"inner": SGD, "axis_name": "data", "grads": CODEC, "params": CODEC},
}
# What the library makes, or a test is told; RedSync's momentum decides its feedback.
LEFT_OUT = {
  *("Candidate", "CheckOptions", "Collective", "Explanation", "LeafPlan", "Overlap"),
  *("SumFacts", "redsync-feedback"),
}
CLASSES = {k: x for k, x in factories.names().items() if inspect.isclass(x)}
MAKERS = factories.found() | {k: x for k, x in CLASSES.items() if is_dataclass(x)}


def arguments():
  for name, make in MAKERS.items():
    hints = typing.get_type_hints(make)
    for argument in inspect.signature(make).parameters:
      hint, place = hints.get(argument), f"{name}-{argument}"
      union = typing.get_origin(hint) in (typing.Union, types.UnionType)
      kinds = typing.get_args(hint) if union else (hint,)
      literals = [x for x in kinds if typing.get_origin(x) is typing.Literal]
      chosen = literals and {*kinds} <= {*literals, types.NoneType}
      if (hint is bool or chosen) and not LEFT_OUT & {name, place}:
        call = functools.partial(make, **BASE.get(name, {}))
        names = [str(y) for x in literals for y in typing.get_args(x)]
        yield pytest.param(call, argument, names, types.NoneType in kinds, id=place)


@pytest.mark.parametrize("call, argument, names, optional", [*arguments()])
def test_what_is_no_choice_is_refused(call, argument, names, optional):
  for value in ("", 1, 0, "yes", None, True, ["a"]):
    if (value is True and not names) or (value is None and optional):
      continue
    with pytest.raises(ValueError, match=says(f"`{argument}` must", "got")) as caught:
      call(**{argument: value})
    for word in (*(names or ["a bool"]), f"got {value!r}"):
      assert word in str(caught.value)


def declared():
  for name, make in MAKERS.items():
    if inspect.isclass(make) and issubclass(make, checks.Checked):
      call = functools.partial(make, **BASE.get(name, {}))
      for field, rule in checks.rules(make).items():
        yield pytest.param(call, field, rule, id=f"{name}-{field}")


@pytest.mark.parametrize("call, field, rule", [*declared()])
def test_a_field_keeps_its_rule_and_its_page_tells_it(call, field, rule):
  for value in rule.outside:
    with pytest.raises(ValueError, match=says(f"`{field}` must be", rule.words, "got")):
      call(**{field: value})
  owner = next(x for x in call.func.__mro__ if field in vars(x)["__annotations__"])
  page = f"{inspect.getdoc(owner)}\n"
  entry = re.search(rf"^  {field}: .*\n(?:    .*\n)*", page, re.M)
  bounds = re.findall(r"\d[\d*.-]*", rule.words)
  assert entry and all(x in entry[0] for x in bounds), (field, rule.words)
