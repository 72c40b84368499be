"""Notes in a trace, which name the purpose of the collectives between them.

A note is an equation that computes nothing. Only the traces that
:func:`gradcomp.explain` reads have notes, and these are never compiled. JAX treats a
note like every other equation: it stays in its branch or loop, and in the traces that
jit caches.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive

from gradcomp._src.mesh.axes import is_explained

NOTE = Primitive("gradcomp_note")
NOTE.multiple_results = True
NOTE.def_abstract_eval(lambda *operands, about: list(operands))


FITTING = "fitting"  # about collectives that fit codecs to the gradients


class Parts(NamedTuple):
  """The sizes of arrays in one message, one for each codec or leaf."""

  sizes: tuple[int, ...]


class Options(NamedTuple):
  """The options of a transformation, with their names."""

  named: tuple[tuple[str, Any], ...]


class Every(NamedTuple):
  """The period of the next collectives, which one of ``steps`` steps sends."""

  steps: int


def note(about: object, *arrays: jax.Array) -> Sequence[jax.Array]:
  """Adds a note to a trace of :func:`gradcomp.explain`; returns the arrays."""
  # The arrays pass through the note, so that the trace shows which ones it is about.
  return NOTE.bind(*arrays, about=about) if is_explained() else arrays


@contextlib.contextmanager
def noted(about: object) -> Iterator[None]:
  """Adds a note about the collectives in the body of a ``with``."""
  note(about)
  yield
  note(None)
