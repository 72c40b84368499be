"""Puts notes into a trace, which say what the collectives between them are sent for.

A note is an equation that computes nothing. Only the traces that
:func:`gradcomp.explain` reads have notes, and nobody compiles those. JAX treats a note
like every other equation: it stays in its branch or loop, and in the traces that jit
caches.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive

from gradcomp._src.mesh.sentinels import is_explained

NOTE = Primitive("gradcomp_note")
NOTE.multiple_results = True
NOTE.def_abstract_eval(lambda *operands, about: list(operands))


FITTING = "fitting"  # about collectives that fit codecs to the gradients


class Parts(NamedTuple):
  """Holds the sizes of arrays that travel together, one for each codec or leaf."""

  sizes: tuple[int, ...]


class Options(NamedTuple):
  """Holds options that a transformation was made with, and their names."""

  named: tuple[tuple[str, Any], ...]


class Every(NamedTuple):
  """Says that what follows, until the next such note, is sent in one of some steps."""

  steps: int


def note(about: object, *arrays: jax.Array) -> Sequence[jax.Array]:
  """Adds a note to a trace that :func:`gradcomp.explain` reads.

  The note says ``about``. The arrays pass through it, so that the trace shows which
  ones it is about. They are returned, and other traces return them as they are.
  """
  return NOTE.bind(*arrays, about=about) if is_explained() else arrays


@contextlib.contextmanager
def noted(about: object) -> Iterator[None]:
  """Adds a note that says what the collectives in the body of a ``with`` send."""
  note(about)
  yield
  note(None)
