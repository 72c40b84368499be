"""Lowers programs for NVIDIA's GPUs on a machine that has none, and stands for one."""

import contextlib

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from gradcomp._src.kernels.gpu import self_check

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
  """The text of a program for H200s, on a mesh of these axes: kernels are encoded."""
  with cuda(**axes):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def stand_in(monkeypatch, platform, elements=1 << 11, **attributes):
  """Lets a CPU stand for a met GPU or TPU whose kernels are unknown, and fast."""
  for name, value in {
    "_gpus" if platform == "cuda" else "_tpus": lambda: jax.devices()[:1],
    **{"_known": {}, "_taken": {}, "_seconds": lambda *_: [1e-3, 2e-3]},
    **attributes,
  }.items():
    monkeypatch.setattr(self_check, name, value)
  monkeypatch.setitem(self_check._ELEMENTS, platform, elements)
