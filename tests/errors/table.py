"""Reads tables of bad calls, and asks of each call what every error must say.

A row is a call and its error, whose further lines are indented:

    f(bits=v) for f in QSGD, qsgd for v in 0, 9, "4" -> `bits` must be ... 1 to 8 or
      16 ... {v}

The call is evaluated once for each combination, and so are others of the same error
behind " ; ". It knows all public names, and those of the test's module. Errors are
ValueErrors, unless TypeError stands in front. Three dots are any text, {v} is how
Python writes the value of a name, and {v!s} its text.
"""

import ast
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.support import factories
from tests.support.assertions import says

NAMES = factories.names() | {
  **{"jax": jax, "jnp": jnp, "np": np, "optax": optax, "P": P, "gradcomp": gradcomp},
  **{"KEY": jax.random.key(0), "nan": np.nan, "inf": np.inf, "functools": functools},
}


def rows(text):
  lines = re.sub(r"\n +", " ", text).splitlines()
  return [line for line in lines if line and not line.startswith("#")]


def calls(text, names):
  """What a row calls, and the values of its names, for each combination."""
  for part in text.split(" ; "):
    call, *loops = re.split(r" for (\w) in ", part)
    known = NAMES | names
    values = [eval(f"({x},)", known) for x in loops[1::2]]
    code = compile(ast.parse(call, mode="eval"), call, "eval")
    for each in itertools.product(*values):
      given = dict(zip(loops[::2], each, strict=True))
      yield functools.partial(eval, code, known | given), given


def refuses(text, error, names):
  """The laws of all bad calls."""
  kind = TypeError if error.startswith("TypeError: ") else ValueError
  for call, given in calls(text, names):
    words = error.removeprefix("TypeError: ")
    for name, value in given.items():
      words = words.replace(f"{{{name}}}", repr(value))
      words = words.replace(f"{{{name}!s}}", str(value))
    with pytest.raises((ValueError, TypeError)) as caught:
      pytest.fail(f"{text} with {given} returned {call()!r}")
    message = str(caught.value)
    assert isinstance(caught.value, kind), (given, message)
    assert re.search(says(*words.split(" ... ")), message), (words, message)
    assert re.search(r"`[a-z][^`]*`|gradcomp\.\w+", message), message
    # A sentence, or the heading of a page that says more.
    assert re.search(r"\.$|\nSee https://\S+#[-\w]+$", message), message


def each_row(text):
  """Parametrizes a test over the rows of a table."""
  found = [row.split(" -> ") for row in rows(text)]
  ids = [call[:90] for call, _ in found]
  return pytest.mark.parametrize("call, error", found, ids=ids)


def refused(text, names):
  """A test of the calls in a table, for a module that has these names."""

  @each_row(text)
  def refused(call, error):
    refuses(call, error, names)

  return refused
