"""Checks of hyperparameters that several constructors share."""

import math
import operator
import sys
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcomp._src.public import StaticError

_SITE = "https://gradcomp.readthedocs.io/en/stable/"
_MOST = sys.float_info.max
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
  name: str, rule: str, value: Any, *, least: float = 0.0, most: float = _MOST
) -> float:
  """Returns a positive Python float in a range; ValueError otherwise."""
  _check_static(name, rule, value)
  if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
  try:
    number = float(value)
  except OverflowError:  # one of Python's integers
    number = math.inf
  if not 0 < number <= most or number < least:
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
  return number


def share_below_1(name: str, value: Any) -> float:
  """Returns a Python float of at least 0 and below 1; ValueError otherwise."""
  rule = "a number of at least 0 and below 1"
  _check_static(name, rule, value)
  number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
  if not number or not 0 <= value < 1:
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
  return float(value)


def share_above_0(name: str, value: Any) -> float:
  """Returns a Python float above 0 and at most 1; ValueError otherwise."""
  return static_number(name, "a number above 0 and at most 1", value, most=1)


def static_factor(name: str, rule: str, value: Any) -> float:
  """Returns a number from 2**-126 to 2**126; ValueError otherwise."""
  # Normal in float32, and so is its inverse.
  return static_number(name, rule, value, least=2.0**-126, most=2.0**126)


def _check_static(name: str, rule: str, value: Any) -> None:
  if isinstance(value, jax.Array):
    raise StaticError(name, rule)


def one_of(name: str, choices: Any, value: Any) -> None:
  """Raises ValueError unless the value is in a ``Literal``."""
  if value not in get_args(choices):
    raise ValueError(f"`{name}` must be one of {get_args(choices)}, got {value!r}.")


def optional_one_of(name: str, choices: Any, value: Any) -> None:
  """Raises ValueError unless the value is None or in a ``Literal``."""
  if value not in (names := get_args(choices)) and value is not None:
    raise ValueError(f"`{name}` must be None or one of {names}, got {value!r}.")


def float_dtype(name: str, value: Any) -> np.dtype:
  """Returns a dtype of floats on the wire; ValueError otherwise."""
  rule = "float32, bfloat16 or float16"
  _check_static(name, rule, value)  # optax takes jnp.float32 for a schedule
  if value not in [jnp.dtype(x) for x in (jnp.float32, jnp.bfloat16, jnp.float16)]:
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.")
  return jnp.dtype(value)


def flag(name: str, value: Any) -> None:
  """Raises ValueError unless the value is a bool."""
  if not isinstance(value, bool):
    raise ValueError(f"`{name}` must be a bool, got {value!r}.")


def bucket(name: str, value: Any) -> int:
  """Returns the elements of a bucket, a multiple of 32; ValueError otherwise."""
  return _multiple_of_32(name, "a positive multiple of 32", value)


def optional_bucket(name: str, value: Any) -> int | None:
  """Returns a bucket's elements, or None for a scale a tensor; ValueError otherwise."""
  rule = "a positive multiple of 32, or None for one scale a tensor"
  return None if value is None else _multiple_of_32(name, rule, value)


def _multiple_of_32(name: str, rule: str, value: Any) -> int:
  size = static_integer(name, rule, value, least=1)
  if size % 32:  # planes stay whole vectors
    raise ValueError(f"`{name}` must be {rule}, got {size}.")
  return size


def optional_size(name: str, unit: str, value: Any) -> int | None:
  """Returns a count of 0 or more, or None; ValueError otherwise."""
  rule = f"a number of {unit}, 0 or more, or None"
  return None if value is None else static_integer(name, rule, value, least=0)


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
