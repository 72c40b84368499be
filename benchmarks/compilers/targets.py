"""Targets: machines that are not here, whose compilers are.

libtpu and JAX's CUDA plugin compile for a topology without a device. A target names one
and makes its mesh. `prepare` sets the environment, before JAX is imported.
"""

import os
import pathlib
import shutil
import tomllib
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Literal, NamedTuple

# Few cases, those of the tables, or each for every target.
Extent = Literal["quick", "tables", "all"]

# libtpu asks no metadata server for its machine, takes no lock, and reads what it needs
# from these; https://docs.jax.dev/en/latest/aot.html has the rest.
_TPU = {
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_STDERR_LOG_LEVEL": "3",
  "TPU_MIN_LOG_LEVEL": "3",
}


# Of GPUs by their kinds, and text of XLA's GpuTargetConfigProto. What is not of a kind
# is equal on all of them.
_TEMPLATES = pathlib.Path(__file__).with_name("templates")
GPUS = tomllib.loads((_TEMPLATES / "gpus.toml").read_text())
_CONFIG = (_TEMPLATES / "gpu.textproto").read_text()


class Target(NamedTuple):
  """Devices that are not here."""

  topology: str  # as the platform's compiler names it
  platform: str = "tpu"  # ``"tpu"`` or ``"cuda"``
  slices: int = 1  # of TPUs, with a data center's network between them
  kind: str = ""  # of a GPU, one of ``GPUS``

  def missing(self) -> str | None:
    """Names the package that compiles for the target and is not here, or None."""
    wheels = {"tpu": ["libtpu"], "cuda": ["jax-cuda13-plugin", "jax-cuda13-pjrt"]}
    for wheel in wheels[self.platform]:
      if not list(metadata.distributions(name=wheel)):
        return f"the wheel {wheel}"
    if self.platform == "cuda" and cuda_folder() is None:
      return "ptxas of CUDA 13, in the wheel nvidia-cuda-nvcc, on PATH or in CUDA_HOME"
    return None

  def devices(self) -> list[Any]:
    """Returns the devices, those of a slice side by side."""
    from jax.experimental import topologies

    name: str = self.topology
    options: dict[str, Any] = {"num_slices": self.slices} if self.slices > 1 else {}
    if self.platform == "cuda":  # its name is an option
      config = _CONFIG.format(kind=self.kind, **GPUS[self.kind])
      name, options = "", {"topology": name, "target_config": config}
    topology = topologies.get_topology_desc(name, self.platform, **options)
    return sorted(topology.devices, key=lambda d: getattr(d, "slice_index", 0) or 0)

  def mesh(self, axes: Mapping[str, int] | None = None, explicit: bool = False) -> Any:
    """Returns a mesh of all devices, by default with the one axis ``"data"``."""
    import jax
    import numpy as np

    found, kinds = np.array(self.devices()), jax.sharding.AxisType
    axes = axes or {"data": found.size}
    kind = (kinds.Explicit if explicit else kinds.Auto,) * len(axes)
    return jax.sharding.Mesh(found.reshape(*axes.values()), tuple(axes), kind)


TARGETS = {
  "v5e": Target("v5e:2x4"),
  "v6e": Target("v6e:2x4"),
  "v5p": Target("v5:2x2x2"),
  "tpu7x": Target("tpu7x:2x2x1"),
  "2 slices of v5e": Target("v5e:2x2", slices=2),
  "H100": Target("1x8x1", "cuda", kind="NVIDIA H100 80GB HBM3"),  # one host
  "H200": Target("1x8x1", "cuda", kind="NVIDIA H200"),
  "B200": Target("1x8x1", "cuda", kind="NVIDIA B200"),
}


def cuda_folder() -> pathlib.Path | None:
  """Returns the folder whose ``bin`` has ptxas of CUDA 13, or None."""
  found = cuda_program("ptxas")
  return found.parent.parent if found else None


def cuda_program(name: str) -> pathlib.Path | None:
  """Returns a program of CUDA 13, of a wheel, else on PATH or in CUDA_HOME, or None."""
  wheels = metadata.distributions(name=f"nvidia-cuda-{name.replace('ptxas', 'nvcc')}")
  places = [str(wheel.locate_file(f"nvidia/cu13/bin/{name}")) for wheel in wheels]
  places += [name, f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/{name}"]
  found = next(filter(None, map(shutil.which, places)), None)
  return pathlib.Path(found).resolve() if found else None


def prepare() -> None:
  """Sets what the compilers read from the environment. Call it before JAX's import."""
  os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"} | _TPU
  if folder := cuda_folder():
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_gpu_cuda_data_dir={folder}"]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))


def versions(target: Target) -> dict[str, str]:
  compiler = "libtpu" if target.platform == "tpu" else "jax-cuda13-plugin"
  return {name: metadata.version(name) for name in ("jax", compiler)}
