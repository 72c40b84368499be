"""Studies: traces with shapes that a reader takes facts from, and nothing runs.

A study is a context of ``jax.make_user_context``, a part of the keys of JAX's caches:
studies of a kind share what an inner ``jax.jit`` has cached, and programs never see it.

Facts are equations of the trace, which compute nothing: they stay in their branch, loop
or map, and in what is cached. A list that Python fills while it traces would lack it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from gradcomp._src.mesh.axes import AxisName, UnboundAxisError, axis_names


@dataclasses.dataclass(frozen=True)
class Study:
  """A kind of study."""

  # Of transformations that take their axes from the types of gradients; None if axes
  # are as in a program.
  axes: AxisName | None = None
  bound: frozenset[str] = frozenset()  # the axes that it binds, if it has axes
  # Whether transformations return their inputs, so that the trace shows which gradients
  # reach a result.
  follows: bool = False


# ``with STUDY(kind):`` begins a study in this thread.
STUDY: Any = jax.make_user_context(None)


def is_study() -> bool:
  """Returns True in a study of any kind."""
  return STUDY.value is not None


def is_followed() -> bool:
  """Returns True in a study in which transformations return their inputs."""
  return is_study() and STUDY.value.follows


def studied_axes(axis_name: AxisName | None) -> AxisName | None:
  """Returns the axes of a transformation, in a study those that the study gives."""
  if not is_study() or STUDY.value.axes is None:
    return axis_name
  axes = axis_name or STUDY.value.axes
  # A map around the study may have an axis of the same name, and of another size.
  if not STUDY.value.bound.issuperset(axis_names(axes)):
    raise UnboundAxisError(f"{axes} must be bound.", axes)
  return axes


NOTE = Primitive("gradcomp_note")
NOTE.multiple_results = True
NOTE.def_abstract_eval(lambda *operands, about: list(operands))

# Notes are about a message, its plan, an option of the next plan by its name, the count
# of a state, or these:
FITTING = "fitting"  # collectives that fit codecs to the gradients
FIRST = "first state"  # the count of a state that init makes
PARTS = "parts"  # and the sizes of arrays in one message, one for each codec or leaf
PLANNED = "planned"  # and the message plan of the next state that init makes


def note(about: object, *arrays: jax.Array) -> Sequence[jax.Array]:
  """Adds a note to the trace of a study, and returns the arrays that it is about."""
  # The arrays pass through the note, so that the trace shows which ones it is about.
  return NOTE.bind(*arrays, about=about) if is_study() else arrays


@contextlib.contextmanager
def noted(about: object) -> Iterator[None]:
  """Adds a note about the collectives in the body of a ``with``."""
  note(about)
  yield
  note(None)
