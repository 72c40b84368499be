"""The platform that a program is planned for, with or without its devices."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import jax
from jax.sharding import Mesh

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
