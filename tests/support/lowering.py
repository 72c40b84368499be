"""Lowers programs for NVIDIA's GPUs on a machine that has none."""

import contextlib
from unittest import mock

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from gradcomp._src.kernels.gpu import table

KERNEL = "custom_call @mosaic_gpu"  # a call of a kernel

_H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")


def all_kernels():
  """Lets programs of a body have every kernel, whatever device they are for."""
  return mock.patch.object(table, "serves", lambda *_: True)


@contextlib.contextmanager
def cuda(**axes):
  """Lets a body lower programs for H200s, with a mesh of these axes and their sizes."""
  types = (AxisType.Auto,) * len(axes)
  sizes, names = tuple(axes.values()), tuple(axes)
  mesh = AbstractMesh(sizes, names, types, abstract_device=_H200)
  with use_abstract_mesh(mesh), all_kernels():
    yield


def lowered_for_cuda(function, *args, **axes):
  """The text of a program for H200s, on a mesh of these axes: kernels are encoded."""
  with cuda(**axes):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
