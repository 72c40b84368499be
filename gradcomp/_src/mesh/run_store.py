"""The processes of a run, and their key-value store, which JAX has no public name for.

``jax.experimental.multihost_utils`` is made of collectives, which need equal programs
on all processes already.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from gradcomp._src.mesh.study import is_study


def run_store() -> Any:
  """Returns the client of the run's store; None in a run of one process."""
  if not jax.distributed.is_initialized():
    return None
  try:
    from jax._src import distributed

    return distributed.global_state.client
  except (ImportError, AttributeError):
    warnings.warn(
      f"JAX {jax.__version__} has moved its key-value store, so that gradcomp does not "
      "compare the transformations of the processes.",
      RuntimeWarning,
      stacklevel=2,
    )
    return None


def is_alone() -> bool:
  """Returns True in a run of one process, and in a trace that nothing runs."""
  return run_store() is None or jax.process_count() == 1 or is_study()


def processes_of(mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
  """Returns the processes of a mesh; empty if they are unknown, or only one."""
  if isinstance(mesh, Mesh):
    found = sorted({device.process_index for device in mesh.devices.flat})
  else:
    found = list(range(jax.process_count() if mesh.size == jax.device_count() else 0))
  return tuple(found) if len(found) > 1 and jax.process_index() in found else ()


def publish(folder: str, text: str) -> None:
  """Writes a text of this process, also again after an error or a new start."""
  key = f"{folder}{jax.process_index()}"
  run_store().key_value_set(key, text, allow_overwrite=True)


def meet(
  folder: str, own: str, processes: Sequence[int], what: str, *, alike: bool = False
) -> dict[int, str]:
  """Writes a text; returns all texts, or the first ones once one is not the same."""
  publish(folder, own)
  limit = _patience()
  deadline, pause = time.monotonic() + limit, 0.001
  while True:
    pairs = run_store().key_value_dir_get(folder)
    found = {int(name.rpartition("/")[2]): value for name, value in pairs}
    missing = [process for process in processes if process not in found]
    if not missing or (alike and set(found.values()) != {own}):
      return found
    if time.monotonic() > deadline:
      raise ValueError(
        f"{what} by all processes, got nothing from {named(missing)} in {limit:g} s; "
        "look what is wrong there, start all with the same program, or set "
        "GRADCOMP_PATIENCE_SECONDS to more."
      )
    time.sleep(pause)
    pause = min(2 * pause, 1.0)


def _patience() -> float:
  """Returns the seconds to wait for a process; ValueError for an invalid setting."""
  # By default it is longer than compiling a step that others have in a cache.
  text = os.environ.get("GRADCOMP_PATIENCE_SECONDS", "600")
  with contextlib.suppress(ValueError):
    if (limit := float(text)) >= 0:
      return limit
  raise ValueError(
    f"`GRADCOMP_PATIENCE_SECONDS` must be seconds, 0 or more, got {text!r}; "
    "unset it to wait for ten minutes."
  )


def named(processes: Sequence[int]) -> str:
  """Lists processes in words, the first five by number."""
  shown = ", ".join(map(str, sorted(processes)[:5]))
  more = f" and {len(processes) - 5} more" if processes[5:] else ""
  return f"process{'es' if processes[1:] else ''} {shown}{more}"
