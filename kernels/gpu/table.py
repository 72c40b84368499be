"""Kernels that serve: a table, which ``make gpu-check`` writes, and a check of bits."""

import concurrent.futures
import functools
import json
import math
import os
import textwrap
import warnings
from collections.abc import Callable, Hashable
from importlib import resources
from typing import Any, NamedTuple

import jax
import numpy as np

from gradcomp._src import checks
from gradcomp._src.mesh import agreement

HOPPER = 9.0  # the compute capability that kernels need
BLACKWELL = 10.0  # the one that products of scaled blocks need

SEE = checks.see("runs-the-reference-instead")

# Whatever the filters of warnings say, each text once in a process.
_warn_once = functools.cache(warnings.warn)

_Function = Callable[..., Any]

# What is wrong with a kernel, or "", by its options and shapes and by the process.
_found: dict[Hashable, str] = {}


class Verdict(NamedTuple):
  """The line of a kernel in the table of a kind of device.

  Attributes:
    least: the least number of elements that takes the kernel; infinite for none.
    record: the version of JAX and the day of the comparison of bits and times.
  """

  least: float = math.inf
  record: str = ""


def kernel_verdicts() -> dict[str, Verdict]:
  """Returns the line of each kernel in the table of this run's devices, by its name.

  A kernel serves arrays of ``least`` elements or more. From there on a record has the
  bits of XLA's code, and times that are no longer. Devices of several kinds share the
  largest ``least``. Without a table there are no lines.

  Example:
    >>> for name, verdict in kernel_verdicts().items():  # none on a CPU
    ...   print(name, verdict.least, verdict.record)
  """
  tables = [_read().get(kind, {}) for x in ("cuda", "tpu") for kind in _kinds(x)]
  names = sorted({name for table in tables for name in table})
  return {name: max(x.get(name, Verdict()) for x in tables) for name in names}


def serves(platform: str, kernel: str, size: int) -> bool:
  """Returns True if programs take a kernel for arrays of a size; may warn once."""
  # Each process of a run knows the devices of all, so that all give one answer.
  if platform == "cuda" and older_than(HOPPER):
    return False
  kinds = _kinds(platform) or {f"a device of {platform} that is not here"}
  if unknown := sorted(kinds - _read().keys()):
    _warn_once(
      f"No table says which kernels are right and fast on {', '.join(unknown)}: XLA "
      'runs the reference instead. `implementation="pallas"` takes a kernel, and '
      "GRADCOMP_CHECK_KERNELS=1 compares its bits first; on a GPU, `make gpu-check` in "
      f"a checkout writes a table.{SEE}",
      RuntimeWarning,
    )
    return False
  return all(size >= _read()[x].get(kernel, Verdict()).least for x in kinds)


@functools.cache
def _read() -> dict[str, dict[str, Verdict]]:
  """Returns the table: lines of kernels by their names, by kinds of device."""
  text = resources.files(__package__).joinpath("table.json").read_text()
  return {
    kind: {name: Verdict(least, of["record"]) for name, least in of["least"].items()}
    for kind, of in json.loads(text).items()
  }


def _kinds(platform: str) -> set[str]:
  """Returns the kinds of device in a run, and of a mesh that a program is made for."""
  kinds = {device.device_kind for device in devices(platform)}
  there = jax.sharding.get_abstract_mesh().abstract_device
  if there and there.platform == {"cuda": "gpu"}.get(platform, platform):
    kinds.add(there.device_kind)
  return kinds


def older_than(least: float) -> str:
  """Returns the compute capability of a GPU that has less; "" for none."""
  each = (float(getattr(x, "compute_capability", least)) for x in devices("cuda"))
  return next((str(found) for found in each if found < least), "")


def devices(platform: str, process: int | None = None) -> list[jax.Device]:
  """Returns the devices of a process, or of all; none if the platform is not here."""
  try:
    return [x for x in jax.devices(platform) if process in (None, x.process_index)]
  except RuntimeError:
    return []


def require_right(
  kernel: functools.partial[Any],
  reference: _Function,
  operands: Any,
  platform: str,
  serves: Callable[[], bool] = lambda: True,
) -> None:
  """Raises RuntimeError if a kernel is wrong on a device of a process of the mesh."""
  # If the environment asks for the check, there are devices, and the kernel serves.
  value = os.environ.get("GRADCOMP_CHECK_KERNELS", "0")
  if value not in ("0", "1"):
    raise ValueError(
      f"`GRADCOMP_CHECK_KERNELS` must be 0 or 1 in the environment, got {value!r}."
    )
  if value == "0" or not devices(platform) or not serves():
    return
  shapes = [f"{np.dtype(x.dtype)}{list(x.shape)}" for x in jax.tree.leaves(operands)]
  options = ", ".join(f"{name}={value!r}" for name, value in kernel.keywords.items())
  function = f"{kernel.func.__module__}.{kernel.func.__name__}"
  what, own = f"the kernel {function}({options}) of {shapes}", jax.process_index()
  if (what, own) not in _found:
    given = jax.tree_util.tree_map_with_path(_alike, operands)
    # A thread of its own is in no trace, mesh or other context of the caller.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
      kinds = {x.device_kind: x for x in devices(platform, own)}.values()
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
    raise RuntimeError(f'{wrong} Use `implementation="xla"`.{SEE}')


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
    # Of many magnitudes in [-1, 1), with zeros and ties.
    found = (2 * np.random.default_rng(0).random(x.size, np.float32) - 1) ** 3
    found[x.size // 2 :][: x.size // 16] = 0
    found[x.size - x.size // 16 :] = -0.5
    return found.reshape(x.shape).astype(x.dtype)
  # Scales, which no element is larger than, or a limit, which some are.
  scales = rng.uniform(1, 3, x.shape) if x.ndim > 1 else np.full(x.shape, 0.75)
  return scales.astype(x.dtype)


def compare(
  kernel: _Function, reference: _Function, operands: Any, device: jax.Device
) -> str:
  """Returns the difference between the results of kernel and reference, or ""."""
  cpu = next(iter(devices("cpu", device.process_index)), device)
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
