"""Programs lowered for a GPU where there is none."""

import contextlib
from typing import Any

import jax


def lowered_for_cuda(function: Any, *args: Any) -> str:
  """The StableHLO of a function on an H200; what Triton or Mosaic refuses raises."""
  with _h200():
    traced = jax.jit(function).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _h200() -> contextlib.AbstractContextManager[Any]:
  """From 0.11 on JAX must know the device; 0.10.2 takes one like this for granted."""
  if jax.version.__version_info__ < (0, 11):
    return contextlib.nullcontext()
  device = jax.sharding.AbstractDevice(
    device_kind="NVIDIA H200", num_cores=None, platform="gpu"
  )
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  return jax.sharding.use_abstract_mesh(mesh)
