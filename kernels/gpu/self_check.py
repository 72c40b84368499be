"""Self-check: tries a kernel on a small input, once for each kind of GPU at hand.

Compilers differ from device to device. One of them may refuse a kernel, or make it give
other bits than the reference. This is found out while the first program that has the
kernel is traced, so that the program can take the reference instead.
"""

import concurrent.futures
import functools
import os
import textwrap
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from gradcomp._src.kernels.gpu.backends import has_devices

SWITCH = "GRADCOMP_CHECK_KERNELS"

_ELEMENTS = 1 << 17  # two blocks or more of every kernel with buckets of up to 2048

# The failure of each kernel, or "", by its options, the shapes, and the kind of GPU.
_known: dict[Hashable, str] = {}


class Example(NamedTuple):
  """The arguments of a small call of an operation.

  Example:
    >>> Example((np.uint32([5]), None)).options
    {}
  """

  operands: tuple[Any, ...]  # NumPy arrays, or None
  options: Mapping[str, Hashable] = {}  # static, in place of the caller's


def few_tiles(tile: int, *others: jax.Array | None) -> Example:
  """Returns an example for an encoder: some whole tiles, and a part of one.

  ``others`` are the arguments behind the array. A matrix has one line a row.

  Example:
    >>> x, scale, key = few_tiles(1 << 17, jnp.ones((9, 1)), None).operands
    >>> x.size, scale.shape, key
    (327680, (3, 1), None)
  """
  size = max(2, _ELEMENTS // tile) * tile + tile // 2
  rng = np.random.default_rng(1)

  def alike(other: jax.Array | None) -> np.ndarray | None:
    if other is None:
      return None
    shape, dtype = other.shape, other.dtype
    if dtype == np.uint32:
      return rng.integers(0, 1 << 32, shape, np.uint32)
    if dtype == np.int32:
      return np.full(shape, -3, np.int32)
    if len(shape) < 2:
      return np.full(shape, 0.75, dtype)
    # Scales: no element is larger.
    return rng.uniform(1, 3, (-(-size // tile), *shape[1:])).astype(dtype)

  return Example((elements(size), *map(alike, others)))


@functools.cache
def elements(size: int) -> np.ndarray:
  """Returns numbers of many magnitudes in [-1, 1), zeros and ties: ``float32[size]``.

  Example:
    >>> elements(1000)[-3:]
    array([-0.5, -0.5, -0.5], dtype=float32)
  """
  x = (2 * np.random.default_rng(0).random(size, np.float32) - 1) ** 3
  x[size // 2 : size // 2 + size // 16] = 0
  x[size - size // 16 :] = -0.5
  return x


def failure(
  kernel: Callable[..., Any],
  reference: Callable[..., Any],
  example: Callable[[], Example],
) -> str:
  """Returns the failure of a kernel against its reference, as a sentence, or "".

  Each kernel is compared once in a process, for each set of static options and kind of
  GPU. Nothing runs in a process without CUDA devices, nor before JAX has looked for
  devices, nor where the environment has ``GRADCOMP_CHECK_KERNELS=0``.

  Args:
    kernel: takes the example's operands, and is for CUDA.
    reference: takes the same. Its results on the CPU are right.
    example: returns the arguments of the small call.

  Raises:
    ValueError: the environment's ``GRADCOMP_CHECK_KERNELS`` is not 0 or 1.

  Example:
    >>> failure(jnp.abs, jnp.abs, lambda: Example((np.ones(3, np.float32),)))
    ''
  """
  gpus = _gpus()
  if not gpus or not _is_on():
    return ""
  operands, options = example()
  kernel, reference = (functools.partial(f, **options) for f in (kernel, reference))
  leaves, structure = jax.tree.flatten(operands)
  program = kernel.func, tuple(kernel.keywords.items()), structure
  shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
  for gpu in gpus:
    key = program, shapes, gpu.device_kind
    if key not in _known:
      # A thread of its own is in no trace, mesh or other context of the caller.
      with concurrent.futures.ThreadPoolExecutor(1) as thread:
        compared = thread.submit(compare, kernel, reference, operands, gpu)
        _known[key] = compared.result()
    if _known[key]:
      return f"On {gpu.device_kind}, {_name(kernel)} {_known[key]}."
  return ""


def _is_on() -> bool:
  value = os.environ.get(SWITCH, "1")
  if value not in ("0", "1"):
    raise ValueError(f"`{SWITCH}` must be 0 or 1 in the environment, got {value!r}.")
  return value == "1"


def _gpus() -> list[jax.Device]:
  """Returns one CUDA device of each kind, without making JAX look for devices."""
  if not has_devices():
    return []
  return list({gpu.device_kind: gpu for gpu in _devices("cuda")}.values())


def _devices(platform: str) -> list[jax.Device]:
  try:
    return jax.local_devices(backend=platform)
  except RuntimeError:  # there are none
    return []


def compare(
  kernel: Callable[..., Any],
  reference: Callable[..., Any],
  operands: tuple[Any, ...],
  gpu: jax.Device,
) -> str:
  """Returns the difference between the results of kernel and reference, or ""."""
  cpu = next(iter(_devices("cpu")), gpu)
  expected = _outputs(reference, operands, cpu)
  try:
    found = _outputs(kernel, operands, gpu)
  except Exception as error:  # whatever a compiler or a driver raises
    text = textwrap.shorten(f"{type(error).__name__}: {error}", 400)
    return f"fails with {text}"
  for a, b in zip(found, expected, strict=True):
    if (wrong := a != b).any():
      at = int(wrong.argmax())
      return (
        f"gives other bits than the reference: {wrong.sum():,} of {wrong.size:,} words "
        f"differ, the first at {at}: {a[at]:#x} instead of {b[at]:#x}"
      )
  return ""


def _outputs(
  function: Callable[..., Any], operands: tuple[Any, ...], device: jax.Device
) -> list[np.ndarray]:
  """Runs a function on a device, and returns the words of its results, flat."""
  outputs = jax.device_get(jax.jit(function)(*jax.device_put(operands, device)))
  return [leaf.reshape(-1).view(np.uint32) for leaf in jax.tree.leaves(outputs)]


def _name(kernel: functools.partial[Any]) -> str:
  """Returns the name of a kernel with its options, shortened."""
  options = ", ".join(f"{name}={value!r}" for name, value in kernel.keywords.items())
  function = f"{kernel.func.__module__}.{kernel.func.__name__}"
  return textwrap.shorten(f"the kernel {function}({options})", 300, placeholder=" ...)")
