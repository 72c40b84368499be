"""Studies, which nothing runs, and the platform that a program is planned for.

A study is a trace with shapes that a reader takes facts from.
A study is a context of ``jax.make_user_context``, a part of the keys of JAX's caches:
studies of a kind share what an inner ``jax.jit`` has cached, and programs never see it.

Facts are equations of the trace, which compute nothing: they stay in their branch, loop
or map, and in what is cached. A list that Python fills while it traces would lack it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import jax
from jax.extend.core import Primitive
from jax.sharding import Mesh

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


Platform = Literal["cpu", "gpu", "tpu"]

# A part of the keys of JAX's caches, and of this thread.
_PLANNED: Any = jax.make_user_context(None)


def platform() -> str:
  """Returns the platform of the mesh's devices; else of the default backend."""
  # So a program for a TPU is planned for it, wherever it is compiled.
  device = jax.sharding.get_abstract_mesh().abstract_device
  here = jax.default_backend() if device is None else device.platform
  return _PLANNED.value or here


def device_kind(platform: str) -> str:
  """Returns the kind of the devices of a platform in use; else the platform's name."""
  device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
  return device.device_kind if device.platform == platform else platform


def planned_on(mesh: Mesh) -> AbstractContextManager[Any]:
  """Plans in the body of a ``with`` for the devices of a mesh, if it has any."""
  if mesh.empty:
    return contextlib.nullcontext()
  return _PLANNED(mesh.devices.flat[0].platform)


def planned_for(
  given: str | None, name: str = "platform"
) -> AbstractContextManager[Any]:
  """Plans in the body of a ``with`` for a platform, if given; ValueError for others."""
  if given is None:
    return contextlib.nullcontext()
  known = tuple(dict.fromkeys((*get_args(Platform), platform())))
  if given not in known:
    raise ValueError(
      f"`{name}` must be one of {known}, or None for the one here, got {given!r}."
    )
  return _PLANNED(given)
