"""Lowers programs for NVIDIA's GPUs on a machine that has none."""

import contextlib

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

KERNEL = "custom_call @mosaic_gpu"  # a call of a kernel

_H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")


@contextlib.contextmanager
def cuda(**axes):
  """Lets a body lower programs for H200s, with a mesh of these axes and their sizes."""
  types = (AxisType.Auto,) * len(axes)
  sizes, names = tuple(axes.values()), tuple(axes)
  mesh = AbstractMesh(sizes, names, types, abstract_device=_H200)
  with use_abstract_mesh(mesh):
    yield


def lowered_for_cuda(function, *args, **axes):
  """The text of a program for H200s: kernels are in it, encoded.

  Args:
    function: what is lowered.
    *args: arrays, or what says their shapes.
    **axes: sizes of the mesh for jax.shard_map's without one.
  """
  with cuda(**axes):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
