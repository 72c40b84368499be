"""Notes in a trace that is read: what the collectives between them are sent for.

A note is an equation that computes nothing. Only traces of :func:`gradcomp.explain`
have some, and nobody compiles those. As a part of the trace it goes where JAX takes
that: into branches and loops, and into what jit remembers of a function.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import Primitive

from gradcomp.workers import is_explained

NOTE = Primitive("gradcomp_note")
NOTE.multiple_results = True
NOTE.def_abstract_eval(lambda *operands, about: list(operands))


class Parts(NamedTuple):
  """The sizes of what travels together: for each codec of a message, or each leaf."""

  sizes: tuple[int, ...]


def note(about: object, *arrays: jax.Array) -> Sequence[jax.Array]:
  """Says in a trace that is read what comes next, and of what; returns the arrays."""
  return NOTE.bind(*arrays, about=about) if is_explained() else arrays


@contextlib.contextmanager
def noted(about: object) -> Iterator[None]:
  """Says what the collectives inside are sent for."""
  note(about)
  yield
  note(None)
