"""Self-check: tries a kernel on each kind of device here before a program takes it.

Compilers differ from device to device. Where one refuses a kernel, or makes it give
other bits, or where XLA's code is faster, the program that is being traced takes the
reference instead. All processes of a run take the same one.
"""

import concurrent.futures
import functools
import os
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from gradcomp._src.kernels.gpu import verdicts
from gradcomp._src.kernels.gpu.verdicts import Verdict
from gradcomp._src.mesh.run_store import is_alone, processes_of
from gradcomp._src.mesh.types import mesh_of

SWITCH = "GRADCOMP_CHECK_KERNELS"

HOPPER = 9.0  # the compute capability that kernels need
BLACKWELL = 10.0  # the one that products of scaled blocks need

# Two blocks or more of every kernel with buckets of up to 2048. TPUs have large blocks.
_ELEMENTS = {"cuda": 1 << 17, "tpu": (1 << 19) + (1 << 17)}
_TIMED_ELEMENTS = 1 << 24
_TIMES, _RUNS = 5, 20  # the median of some times, each of some runs

# Errors with these words are of a device that is full or gone, and no verdict on a
# kernel; but a kernel may want more memory of its own than there is.
_RESOURCES = re.compile(
  "RESOURCE_EXHAUSTED|out of memory|OUT_OF_MEMORY|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED"
)
_OF_KERNEL = re.compile("hared memory|[vs]mem")

_Function = Callable[..., Any]

# The verdict on each kernel, by its options, the shapes, and the kind of GPU.
_known: dict[Hashable, Verdict] = {}
# What programs took, by the names of kernels.
_taken: dict[str, Verdict] = {}


class Example(NamedTuple):
  """The arguments of a small call of an operation."""

  operands: tuple[Any, ...]  # NumPy arrays, or None
  options: Mapping[str, Hashable] = {}  # static, in place of the caller's


def few_tiles(least: int, tile: int, *others: Array | None) -> Example:
  """Returns some whole tiles, and a part of one, for an encoder."""
  size = max(2, least // tile) * tile + tile // 2
  rng = np.random.default_rng(1)

  def alike(other: Array | None) -> np.ndarray | None:
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


def few_rows(least: int, *others: Array) -> Example:
  """Returns arrays of some elements like others, with fewer rows, for a decoder."""
  rng = np.random.default_rng(2)

  def alike(other: Array) -> np.ndarray:
    rows = 1 << max(5, (least // max(1, *other.shape[1:], 1)).bit_length() - 1)
    # A row more leaves a part of a block. Flat arrays have whole groups.
    shape = (rows + 1, other.shape[-1]) if other.ndim > 1 else (rows,) * other.ndim
    if other.dtype != np.uint32:
      return np.asarray(rng.uniform(0.25, 1, shape), other.dtype)
    words = rng.integers(0, 1 << 32, shape, np.uint32)
    # Some of them are floats, which are normal ones.
    exponent = words & np.uint32(0x7F800000)
    odd = (exponent == 0) | (exponent == 0x7F800000)
    return np.where(odd, words ^ np.uint32(0x00800000), words)

  return Example(tuple(map(alike, others)))


@functools.lru_cache(2)
def elements(size: int) -> np.ndarray:
  """Returns numbers of many magnitudes in [-1, 1), zeros, ties: ``float32[size]``."""
  x = (2 * np.random.default_rng(0).random(size, np.float32) - 1) ** 3
  x[size // 2 : size // 2 + size // 16] = 0
  x[size - size // 16 :] = -0.5
  return x


def verdict(
  kernel: functools.partial[Any],
  reference: _Function,
  example: Callable[[int], Example],
  platform: str = "cuda",
) -> Verdict:
  """Returns the verdict of all processes on a kernel, against its reference."""
  # Each kernel is tried once in a process, for each set of static options and kind of
  # device. Nothing runs in a process without devices of the platform, nor before JAX
  # has looked for devices, nor where the environment has `GRADCOMP_CHECK_KERNELS=0`.
  gpus = _gpus() if platform == "cuda" else _tpus()
  if not gpus:
    return Verdict()
  operands, options = example(_ELEMENTS[platform])
  leaves, structure = jax.tree.flatten(operands)
  program = functools.partial(kernel, **options)
  shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)

  def of_gpu(gpu: jax.Device) -> Verdict:
    if _capability(gpu) < HOPPER or not _is_on():
      return Verdict(able=_capability(gpu) >= HOPPER)
    key = program.func, *program.keywords.items(), structure, shapes, gpu.device_kind
    if key not in _known:
      # A thread of its own is in no trace, mesh or other context of the caller.
      with concurrent.futures.ThreadPoolExecutor(1) as thread:
        tried = thread.submit(_tried, (kernel, reference), example, gpu, platform)
        _known[key] = tried.result()
    return _known[key]

  own = lambda: verdicts.of_all([of_gpu(gpu) for gpu in gpus])
  processes = () if is_alone() else processes_of(mesh_of(()))
  # Processes are unknown outside of every mesh, where one may trace alone.
  function, keywords = program.func, sorted(program.keywords.items())
  name = f"{function.__module__}.{function.__name__}, {keywords!r}, of {shapes!r}"
  _taken[name] = verdicts.agreed(name, own, processes) if processes else own()
  return _taken[name]


def kernel_verdicts() -> dict[str, Verdict]:
  """Returns the verdict on each kernel that programs asked for, by its name.

  A kernel is tried before the first program takes it, where there are GPUs or TPUs.
  It is taken if its bits are those of XLA's code, and it is not slower. All processes
  of a run have one verdict. It has nothing of ``implementation="xla"``.

  Example:
    >>> for name, verdict in kernel_verdicts().items():  # none on a CPU
    ...   print(name, "kernel" if verdict.for_kernel else "XLA", *verdict)
  """
  return dict(_taken)


def too_old() -> str:
  """Returns the compute capability of a GPU that cannot run kernels; "" for none."""
  return older_than(HOPPER)


def older_than(least: float) -> str:
  """Returns the compute capability of a GPU that has less; "" for none."""
  each = map(_capability, _gpus())
  return next((str(found) for found in each if found < least), "")


def _capability(gpu: jax.Device) -> float:
  return float(getattr(gpu, "compute_capability", HOPPER))


def _is_on() -> bool:
  value = os.environ.get(SWITCH, "1")
  if value not in ("0", "1"):
    raise ValueError(f"`{SWITCH}` must be 0 or 1 in the environment, got {value!r}.")
  return value == "1"


def _gpus() -> list[jax.Device]:
  """Returns one CUDA device of each kind, without making JAX look for devices."""
  return _kinds("cuda")


def _tpus() -> list[jax.Device]:
  """Returns one TPU of each kind, without making JAX look for devices."""
  return _kinds("tpu")


def _kinds(platform: str) -> list[jax.Device]:
  # In a run of several processes all look, since all must agree.
  if not has_devices() and is_alone():
    return []
  return list({each.device_kind: each for each in _devices(platform)}.values())


def _devices(platform: str) -> list[jax.Device]:
  try:
    return jax.local_devices(backend=platform)
  except RuntimeError:  # there are none
    return []


def _tried(
  functions: tuple[_Function, _Function],
  example: Callable[[int], Example],
  gpu: jax.Device,
  platform: str,
) -> Verdict:
  """Compares a kernel with its reference on a GPU, and times both if it is right."""
  operands, options = example(_ELEMENTS[platform])
  kernel, reference = (functools.partial(f, **options) for f in functions)
  failure = compare(kernel, reference, operands, gpu)
  if not failure:
    try:
      own, xla = _seconds(functions, example(_TIMED_ELEMENTS), gpu)
      return Verdict(kernel=own, reference=xla)
    except Exception as error:
      failure = _failure(error)
  return Verdict(f"On {gpu.device_kind}, {_name(kernel)} {failure}.")


def compare(
  kernel: _Function, reference: _Function, operands: tuple[Any, ...], gpu: jax.Device
) -> str:
  """Returns the difference between the results of kernel and reference, or ""."""
  cpu = next(iter(_devices("cpu")), gpu)
  expected = _outputs(reference, operands, cpu)
  try:
    found = _outputs(kernel, operands, gpu)
  except Exception as error:  # whatever a compiler or a driver raises
    return _failure(error)
  for a, b in zip(found, expected, strict=True):
    if (wrong := a != b).any():
      at = int(wrong.argmax())
      return (
        f"gives other bits than the reference: {wrong.sum():,} of {wrong.size:,} words "
        f"differ, the first at {at}: {a[at]:#x} instead of {b[at]:#x}"
      )
  return ""


def _failure(error: Exception) -> str:
  """Returns an error as a failure; RuntimeError for a device that is full or gone."""
  text = f"{type(error).__name__}: {error}"
  full = isinstance(error, MemoryError) or bool(_RESOURCES.search(text))
  if full and not _OF_KERNEL.search(text):
    raise RuntimeError(
      "A kernel could not be tried, which is no verdict on it: "
      f"{textwrap.shorten(text, 400)}. Leave more of the device's memory free, or run "
      'XLA\'s code by `implementation="xla"`.'
    ) from error
  return f"fails with {textwrap.shorten(text, 400)}"


def _seconds(
  functions: tuple[_Function, ...], example: Example, gpu: jax.Device
) -> list[float]:
  """Returns the seconds of one run of each function on a GPU, interleaved."""
  operands = jax.device_put(example.operands, gpu)
  times: list[list[float]] = [[] for _ in functions]
  programs = [_repeated(functools.partial(f, **example.options)) for f in functions]
  for _ in range(1 + _TIMES):  # the first warms up
    for program, own in zip(programs, times, strict=True):
      start = time.perf_counter()
      jax.block_until_ready(program(operands))
      own.append((time.perf_counter() - start) / _RUNS)
  return [statistics.median(own[1:]) for own in times]


def _repeated(function: _Function) -> _Function:
  """Returns a program that calls a function on the same operands some times."""
  # An H100 encodes them sooner than a host starts a program. The barrier holds the
  # call in the loop.

  def program(operands: tuple[Any, ...]) -> list[Array]:
    shapes = jax.eval_shape(function, *operands)
    none = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), shapes)

    def again(_: Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
      given, _ = jax.lax.optimization_barrier(state)
      return given, function(*given)

    _, outputs = jax.lax.fori_loop(0, _RUNS, again, (operands, none))
    return [x.reshape(-1)[:1] for x in jax.tree.leaves(outputs)]

  return jax.jit(program)


def _outputs(
  function: _Function, operands: tuple[Any, ...], device: jax.Device
) -> list[np.ndarray]:
  """Runs a function on a device, and returns the words of its results, flat."""
  outputs = jax.device_get(jax.jit(function)(*jax.device_put(operands, device)))
  return [leaf.reshape(-1).view(np.uint32) for leaf in jax.tree.leaves(outputs)]


def _name(kernel: functools.partial[Any]) -> str:
  """Returns the name of a kernel with its options, shortened."""
  options = ", ".join(f"{name}={value!r}" for name, value in kernel.keywords.items())
  function = f"{kernel.func.__module__}.{kernel.func.__name__}"
  return textwrap.shorten(f"the kernel {function}({options})", 300, placeholder=" ...)")


def has_devices() -> bool:
  """Returns True if JAX has looked for devices; also if it has moved the answer."""
  try:
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()
  except (ImportError, AttributeError):
    return True  # kernels are checked, though perhaps too early
