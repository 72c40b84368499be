"""Checks of hyperparameters, and fields of dataclasses that know theirs."""

import dataclasses
import functools
import math
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcomp._src.public import StaticError

_SITE = "https://gradcomp.readthedocs.io/en/stable/"
_LEAST, _MOST = math.ulp(0.0), sys.float_info.max
_Kind = TypeVar("_Kind")


def see(heading: str) -> str:
  """Returns the last line of an error that a heading of its own explains on a page."""
  return f"\nSee {_SITE}operate/troubleshooting.html#{heading}"


def static_integer(
  name: str, rule: str, value: Any, *, least: int | None = None, most: int | None = None
) -> int:
  """Returns an integer as Python's; ValueError for others, and those out of bounds."""
  _check_static(name, rule, value)
  try:
    if isinstance(value, bool):
      raise TypeError
    number = operator.index(value)
  except TypeError:
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.") from None
  if (least is not None and number < least) or (most is not None and number > most):
    raise ValueError(f"`{name}` must be {rule}, got {number}.")
  return number


def step_count(name: str, value: Any, *, least: int = 1) -> int:
  """Returns a number of steps that fits an ``int32`` counter; ValueError otherwise."""
  rule = f"a number of steps, {least} or more and below 2**31"
  return static_integer(name, rule, value, least=least, most=2**31 - 1)


def positions(name: str, value: Any) -> int | tuple[int, ...]:
  """Returns the position of an argument, or several; ValueError otherwise."""
  rule = "the position of an argument, or a tuple of positions"
  one = lambda x: static_integer(name, rule, x)
  return tuple(map(one, value)) if isinstance(value, tuple | list) else one(value)


def static_number(
  name: str, rule: str, value: Any, *, least: float = _LEAST, most: float = _MOST
) -> float:
  """Returns a Python float in a range, by default above 0; ValueError otherwise."""
  _check_static(name, rule, value)
  if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
  try:
    number = float(value)
  except OverflowError:  # one of Python's integers
    number = math.inf
  if not least <= number <= most:
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
  return number


def static_factor(name: str, rule: str, value: Any) -> float:
  """Returns a number from 2**-126 to 2**126; ValueError otherwise."""
  # Normal in float32, and so is its inverse.
  return static_number(name, rule, value, least=2.0**-126, most=2.0**126)


def _check_static(name: str, rule: str, value: Any) -> None:
  if isinstance(value, jax.Array):
    raise StaticError(name, rule)


def one_of(name: str, choices: Any, value: Any) -> None:
  """Raises ValueError unless the value is in a ``Literal``."""
  choice(choices).check(name, value)


def float_dtype(name: str, value: Any) -> np.dtype:
  """Returns a dtype of floats on the wire; ValueError otherwise."""
  rule = "float32, bfloat16 or float16"
  _check_static(name, rule, value)  # optax takes jnp.float32 for a schedule
  if value not in [jnp.dtype(x) for x in (jnp.float32, jnp.bfloat16, jnp.float16)]:
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
  return jnp.dtype(value)


def flag(name: str, value: Any) -> bool:
  """Returns a bool; ValueError for other values."""
  if not isinstance(value, bool):
    raise ValueError(f"`{name}` must be a bool, got {value!r}.")
  return value


def instance_of(name: str, kind: type[_Kind], value: Any) -> _Kind:
  """Returns an instance of a class; TypeError for all else."""
  if not isinstance(value, kind):
    raise TypeError(f"`{name}` must be a {kind.__name__}, got {value!r}.")
  return value


def one_tree(around: str, params: Any) -> None:
  """Raises ValueError for ``optax.LookaheadParams``; ``around`` is for the message."""
  is_pair = lambda x: isinstance(x, optax.LookaheadParams)
  if any(map(is_pair, jax.tree.leaves(params, is_leaf=is_pair))):
    raise ValueError(
      "`params` must be a tree like the gradients, got optax.LookaheadParams; put "
      f"optax.lookahead around {around}: optax.lookahead({around}(...), ...)."
    )


class Rule(NamedTuple):
  """The rule of a field."""

  check: Callable[[str, Any], Any]  # (name, value) -> the value as it is kept
  words: str = ""  # in errors and on pages
  outside: tuple[Any, ...] = ()  # values that just break it


class Checked:
  """A base of frozen dataclasses, which checks their declared fields."""

  def __post_init__(self) -> None:
    kind: Any = type(self)
    for name, rule in rules(kind).items():
      object.__setattr__(self, name, rule.check(name, getattr(self, name)))


def field(default: Any, rule: Rule) -> Any:
  """Declares a field of a dataclass; ``...`` stands for no default."""
  given = {} if default is ... else {"default": default}
  return dataclasses.field(**given, metadata={"rule": rule})


@functools.cache  # codecs are bound and replaced in each trace
def rules(kind: Any) -> dict[str, Rule]:
  """Returns the rules of a dataclass, by the names of its fields."""
  found = dataclasses.fields(kind)
  return {x.name: x.metadata["rule"] for x in found if "rule" in x.metadata}


def optional(rule: Rule) -> Rule:
  """Returns the rule of a field that may be None, too."""
  check = lambda name, value: None if value is None else rule.check(name, value)
  return rule._replace(check=check)


def integer(
  words: str,
  least: int | None = None,
  most: int | None = None,
  such: Callable[[int], Any] = lambda number: True,
) -> Rule:
  """Returns the rule of Python integers in a range, ``such`` that more holds."""

  def check(name: str, value: Any) -> int:
    found = static_integer(name, words, value, least=least, most=most)
    if not such(found):
      raise ValueError(f"`{name}` must be {words}, got {found}.")
    return found

  ends = (least, -1), (most, 1)
  return Rule(check, words, tuple(end + by for end, by in ends if end is not None))


def power_of_two(least: int, most: int) -> Rule:
  """Returns the rule of powers of two in a range."""
  words = f"a power of two from {least} to {most}"
  return integer(words, least, most, lambda found: not found & (found - 1))


def number(words: str, least: float = _LEAST, most: float = _MOST) -> Rule:
  """Returns the rule of Python floats in a range, by default above 0."""
  check = lambda name, x: static_number(name, words, x, least=least, most=most)
  around = math.nextafter(least, -math.inf), math.nextafter(most, math.inf)
  return Rule(check, words, around)


def choice(choices: Any, *, none: bool = False) -> Rule:
  """Returns the rule of the values in a ``Literal``, and of None if asked for."""

  def check(name: str, value: Any) -> Any:
    if value not in (names := get_args(choices)) and not (none and value is None):
      or_none = "None or " if none else ""
      raise ValueError(f"`{name}` must be {or_none}one of {names}, got {value!r}.")
    return value

  return Rule(check, outside=("", "none of these", 0.5))


FLAG = Rule(flag, outside=(0, 1, None, "True"))
FLOAT_DTYPE = Rule(float_dtype, outside=(np.float64, np.int32, None))
STEPS = Rule(step_count, outside=(0, 2**31))
ABOVE_0 = number("a number above 0 and at most 1", most=1)
BELOW_1 = number("a number of at least 0 and below 1", 0, math.nextafter(1, 0))
_bucket = lambda words: integer(words, 1, None, lambda found: not found % 32)
BUCKET = _bucket("a positive multiple of 32")  # planes stay whole vectors
TENSOR_BUCKET = optional(
  _bucket("a positive multiple of 32, or None for one scale a tensor")
)
