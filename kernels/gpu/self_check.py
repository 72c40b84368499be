"""Self-check: compares a kernel with its reference on the devices of this process."""

import concurrent.futures
import functools
import os
import textwrap
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from gradcomp._src.kernels.gpu import table
from gradcomp._src.mesh import agreement

_Function = Callable[..., Any]

# What is wrong with a kernel, or "", by its options and shapes and by the process.
_found: dict[Hashable, str] = {}


def is_on(platform: str) -> bool:
  """Returns True if the environment asks for the check, and there are devices."""
  value = os.environ.get("GRADCOMP_CHECK_KERNELS", "0")
  if value not in ("0", "1"):
    raise ValueError(
      f"`GRADCOMP_CHECK_KERNELS` must be 0 or 1 in the environment, got {value!r}."
    )
  return value == "1" and bool(table.devices(platform))


def require(
  kernel: functools.partial[Any], reference: _Function, operands: Any, platform: str
) -> None:
  """Raises RuntimeError if a kernel is wrong on a device of a process of the mesh."""
  shapes = [f"{np.dtype(x.dtype)}{list(x.shape)}" for x in jax.tree.leaves(operands)]
  options = ", ".join(f"{name}={value!r}" for name, value in kernel.keywords.items())
  function = f"{kernel.func.__module__}.{kernel.func.__name__}"
  what, own = f"the kernel {function}({options}) of {shapes}", jax.process_index()
  if (what, own) not in _found:
    given = jax.tree_util.tree_map_with_path(_alike, operands)
    # A thread of its own is in no trace, mesh or other context of the caller.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
      kinds = {x.device_kind: x for x in table.devices(platform, own)}.values()
      by = functools.partial(reference, **kernel.keywords)
      tried = [thread.submit(compare, kernel, by, given, x) for x in kinds]
    short = textwrap.shorten(what, 300, placeholder=" ...")
    texts = [
      f"On {device.device_kind} of process {own}, {short} {wrong}."
      for device, each in zip(kinds, tried, strict=True)
      if (wrong := each.result())
    ]
    _found[what, own] = " ".join(texts)
  wrong = _found[what, own]
  # Processes of a mesh agree, so that wrong bits on one are an error on all.
  agreement.require_agreement("GRADCOMP_CHECK_KERNELS", {what: wrong}, ())
  if wrong:
    raise RuntimeError(f'{wrong} Use `implementation="xla"`.{table.SEE}')


def _alike(path: Any, x: Any) -> np.ndarray:
  """Returns numbers for an operand, of its shape: the first holds the elements."""
  rng, place = np.random.default_rng(1), jax.tree_util.keystr(path)
  if x.dtype == np.uint32:
    # Some words are floats, which are normal ones; a number alone is a threshold.
    words = rng.integers(0, 1 << 32, x.shape, np.uint32)
    exponent = words & np.uint32(0x7F800000)
    odd = (exponent == 0) | (exponent == 0x7F800000)
    words = np.where(odd, words ^ np.uint32(0x00800000), words)
    return words if x.ndim else np.full((), 0.5, np.float32).view(np.uint32)
  if x.dtype == np.int32:  # an exponent, or the number of a row
    return np.full(x.shape, 0 if "number" in place else -3, np.int32)
  if place.startswith("[0]"):
    return elements(x.size).reshape(x.shape).astype(x.dtype)
  # Scales, which no element is larger than, or a limit, which some are.
  scales = rng.uniform(1, 3, x.shape) if x.ndim > 1 else np.full(x.shape, 0.75)
  return scales.astype(x.dtype)


@functools.lru_cache(2)
def elements(size: int) -> np.ndarray:
  """Returns numbers of many magnitudes in [-1, 1), zeros, ties: ``float32[size]``."""
  x = (2 * np.random.default_rng(0).random(size, np.float32) - 1) ** 3
  x[size // 2 : size // 2 + size // 16] = 0
  x[size - size // 16 :] = -0.5
  return x


def compare(
  kernel: _Function, reference: _Function, operands: Any, device: jax.Device
) -> str:
  """Returns the difference between the results of kernel and reference, or ""."""
  cpu = next(iter(table.devices("cpu", device.process_index)), device)
  expected = _outputs(reference, operands, cpu)
  try:
    found = _outputs(kernel, operands, device)
  except Exception as error:  # whatever a compiler or a driver raises
    return f"fails with {textwrap.shorten(f'{type(error).__name__}: {error}', 400)}"
  for a, b in zip(found, expected, strict=True):
    if (wrong := a != b).any():
      at = int(wrong.argmax())
      return (
        f"gives other bits than the reference: {wrong.sum():,} of {wrong.size:,} words "
        f"differ, the first at {at}: {a[at]:#x} instead of {b[at]:#x}"
      )
  return ""


def _outputs(call: _Function, operands: Any, device: jax.Device) -> list[np.ndarray]:
  """Runs a function on a device, and returns the words of its results, flat."""
  outputs = jax.device_get(jax.jit(call)(*jax.device_put(operands, device)))
  return [leaf.reshape(-1).view(np.uint32) for leaf in jax.tree.leaves(outputs)]
