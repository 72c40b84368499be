"""Times calls that run in turn with a memory copy."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def interleaved(calls: Mapping[str, Callable], repeats: int) -> dict[str, float]:
  """Returns the median seconds of each call. In turn, a drift hits all alike."""
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for call in calls.values():
    jax.block_until_ready(call())
  for _ in range(repeats):
    for name, call in calls.items():
      start = time.perf_counter()
      jax.block_until_ready(call())
      seconds[name].append(time.perf_counter() - start)
  return {name: statistics.median(values) for name, values in seconds.items()}


def copies(size: int) -> dict[str, Callable[[], Any]]:
  """Returns two memory copies of ``size`` floats: into a used and into a new buffer.

  An XLA program writes its output to a new buffer, so the second copy is the best that
  it can do. With glibc's defaults the pages of a large buffer are new, too, and
  faulting them in costs more than the copy. ``MALLOC_MMAP_MAX_=0`` and
  ``MALLOC_TRIM_THRESHOLD_=17179869184`` keep the pages.
  """
  source = np.ones(size, np.float32)
  target, on_device = np.empty_like(source), jnp.asarray(source)
  new = jax.jit(jnp.copy).lower(on_device).compile()
  in_use = lambda: np.copyto(target, source)
  return {"copy": in_use, "copy to new": lambda: new(on_device)}


def machine() -> dict[str, Any]:
  """Describes the machine, on which the times depend."""
  return {
    "jax": jax.__version__,
    "platform": jax.default_backend(),
    "cores": os.cpu_count(),
    "load": os.getloadavg()[0],
    "malloc": {k: v for k, v in sorted(os.environ.items()) if k.startswith("MALLOC_")},
  }
