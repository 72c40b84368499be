"""Checks of hyperparameters that several constructors share."""

import operator
from typing import Any

import jax


def static_integer(name: str, rule: str, value: Any) -> int:
  """A Python integer out of one of Python's or NumPy's; ValueError for all else.

  Args:
    name: of the hyperparameter.
    rule: what it must be, for the message.
    value: what was given.
  """
  if isinstance(value, jax.Array):
    raise ValueError(
      f"`{name}` must be {rule}, and known when a program is traced because it makes "
      f"shapes, got an array; with optax.inject_hyperparams, name it in static_args."
    )
  try:
    if isinstance(value, bool):
      raise TypeError
    return operator.index(value)
  except TypeError:
    raise ValueError(f"`{name}` must be {rule}, got {value!r}.") from None
