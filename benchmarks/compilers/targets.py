"""Targets: machines that are not here, whose compilers are.

libtpu and JAX's CUDA plugin compile for a topology without a device. A target names one
and makes its mesh. `prepare` sets the environment, before JAX is imported.
"""

import os
import pathlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Literal, NamedTuple

from benchmarks.common import cuda

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


class Chip(NamedTuple):
  """A GPU, as XLA asks it to describe itself.

  Attributes:
    cores: streaming multiprocessors.
    bandwidth: bytes a second of the memory.
    memory: bytes.
    cache: bytes of the second level.
    clock: GHz.
    capability: the compute capability.
  """

  cores: int
  bandwidth: float
  memory: float
  cache: int
  clock: float
  capability: tuple[int, int]


CHIPS = {
  "NVIDIA H100 80GB HBM3": Chip(132, 3.35e12, 80e9, 50 << 20, 1.98, (9, 0)),
  "NVIDIA H200": Chip(132, 4.8e12, 150e9, 50 << 20, 1.98, (9, 0)),
  "NVIDIA B200": Chip(148, 8e12, 180e9, 126 << 20, 1.965, (10, 0)),
}

# Text of XLA's GpuTargetConfigProto. What is not of a `Chip` is equal on all of them.
_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
  core_count: {chip.cores} fpus_per_core: 128 clock_rate_ghz: {chip.clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {chip.cache}
  device_memory_size: {memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {chip.capability[0]} minor: {chip.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 13 }}
device_description_str: "{kind}"
"""


class Target(NamedTuple):
  """Devices that are not here.

  Attributes:
    topology: as the platform's compiler names it.
    platform: ``"tpu"`` or ``"cuda"``.
    slices: of TPUs, with a data center's network between them.
    kind: of a GPU, see ``CHIPS``.
  """

  topology: str
  platform: str = "tpu"
  slices: int = 1
  kind: str = ""

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
      name, options = "", {"topology": name, "target_config": target_config(self.kind)}
    topology = topologies.get_topology_desc(name, self.platform, **options)
    return sorted(topology.devices, key=lambda d: getattr(d, "slice_index", 0) or 0)

  def mesh(self, axes: Mapping[str, int] | None = None, explicit: bool = False) -> Any:
    """Returns a mesh of all devices, by default with the one axis ``"data"``."""
    import jax
    import numpy as np

    found = np.array(self.devices())
    axes = axes or {"data": found.size}
    kinds = jax.sharding.AxisType
    kind = kinds.Explicit if explicit else kinds.Auto
    shape = tuple(axes.values())
    return jax.sharding.Mesh(found.reshape(shape), tuple(axes), (kind,) * len(axes))


def _gpus(kind: str) -> Target:
  return Target("1x8x1", "cuda", kind=kind)  # one host


TARGETS = {
  "v5e": Target("v5e:2x4"),
  "v6e": Target("v6e:2x4"),
  "v5p": Target("v5:2x2x2"),
  "tpu7x": Target("tpu7x:2x2x1"),
  "2 slices of v5e": Target("v5e:2x2", slices=2),
  "H100": _gpus("NVIDIA H100 80GB HBM3"),
  "H200": _gpus("NVIDIA H200"),
  "B200": _gpus("NVIDIA B200"),
}


def target_config(kind: str) -> str:
  """Returns the text by which XLA knows a GPU."""
  chip = CHIPS[kind]
  whole = {"bandwidth": int(chip.bandwidth), "memory": int(chip.memory)}
  return _CONFIG.format(chip=chip, kind=kind, **whole)


def cuda_folder() -> pathlib.Path | None:
  """Returns the folder whose ``bin`` has ptxas of CUDA 13, or None."""
  found = cuda.program("ptxas")
  return found.parent.parent if found else None


def prepare() -> None:
  """Sets what the compilers read from the environment. Call it before JAX's import."""
  os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"} | _TPU
  if folder := cuda_folder():
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_gpu_cuda_data_dir={folder}"]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))


def versions(target: Target) -> dict[str, str]:
  """Returns the versions of JAX and of the compiler for a target."""
  compiler = "libtpu" if target.platform == "tpu" else "jax-cuda13-plugin"
  return {name: metadata.version(name) for name in ("jax", compiler)}
