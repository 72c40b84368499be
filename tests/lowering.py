"""Lowering for GPUs where there is none."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

TRITON = "__gpu$xla.gpu.triton"  # what a kernel is called by

_H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")


def lowered_for_cuda(function, *args):
  """The text of a program for an H200: kernels are in it, encoded."""
  with use_abstract_mesh(AbstractMesh((), (), abstract_device=_H200)):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
