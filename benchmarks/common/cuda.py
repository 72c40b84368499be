"""Where the programs of CUDA 13 are, which need no GPU."""

import os
import pathlib
import shutil
from importlib import metadata


def program(name: str) -> pathlib.Path | None:
  """Returns the path of a program of CUDA 13, or None.

  Its wheel comes first, as ``nvidia-cuda-nvcc`` or ``nvidia-cuda-nvdisasm``; then PATH,
  and CUDA_HOME.
  """
  wheels = metadata.distributions(name=f"nvidia-cuda-{_WHEELS.get(name, name)}")
  places = [str(wheel.locate_file(f"nvidia/cu13/bin/{name}")) for wheel in wheels]
  places += [name, f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/{name}"]
  found = next(filter(None, map(shutil.which, places)), None)
  return pathlib.Path(found).resolve() if found else None


_WHEELS = {"ptxas": "nvcc"}
