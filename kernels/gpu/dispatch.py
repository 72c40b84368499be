"""Dispatch: chooses the implementation of each operation; no other file does.

An operation is a folder of this package. Its ``reference`` is jnp code, the fast path
on CPU and TPU. ``pallas`` and, in some folders, ``mosaic`` are kernels for GPUs. All
give the same bits, unless the file ``mosaic`` says otherwise.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax

from gradcomp._src.checks import see
from gradcomp._src.kernels.gpu import by_platform, self_check

Implementation = Literal["xla", "pallas", "pallas_interpret", "mosaic"]

# The kernel, or a sentence that says why there is none for these arguments.
Kernel = Callable[..., Any] | str

NO_MOSAIC = "there is no such kernel for this operation"
_HOPPER = 9.0
_SEE = see("runs-the-reference-instead")

# Whatever the filters of warnings say, each text once in a process.
_warn_once = functools.cache(warnings.warn)


def run(
  implementation: Implementation | None,
  *operands: Any,
  xla: Callable[..., Any],
  pallas: Kernel,
  mosaic: Kernel = NO_MOSAIC,
  example: Callable[[], self_check.Example],
) -> Any:
  """Calls one implementation with the operands, and returns its result.

  Args:
    implementation: ``"xla"`` for the reference; ``"pallas"`` for the kernel in Triton
      style; ``"pallas_interpret"`` for the same kernel on any backend, slowly, for
      tests; ``"mosaic"`` for the kernel for Hopper and newer; or None. None takes
      ``"pallas"`` on CUDA devices, where there is such a kernel, and ``"xla"``
      elsewhere. It decides where the program is lowered for a platform.
      In a process with CUDA devices, :func:`self_check.failure` first compares
      ``"pallas"`` with ``"xla"`` on a small input. Where the kernel fails or gives
      other bits, None warns of it once and takes ``"xla"``, and the name raises. The
      environment variable ``GRADCOMP_CHECK_KERNELS=0`` turns the check off.
    *operands: arrays, or None.
    xla: the reference.
    pallas: the kernel, which also takes ``interpret``; or why there is none.
    mosaic: the kernel; or why there is none.
    example: returns the small input. It is called only where there is a CUDA device.

  Raises:
    ValueError: the named implementation has no kernel for these arguments, or its
      kernel does not run on the default backend.
    RuntimeError: ``"pallas"`` was named, and its kernel fails or gives other bits.

  Example:
    >>> functions = {"xla": jnp.sqrt, "pallas": "there is none"}
    >>> example = lambda: self_check.Example((np.ones(8, np.float32),))
    >>> float(run(None, jnp.float32(4.0), **functions, example=example))
    2.0
  """
  if implementation is None:
    if isinstance(pallas, str):
      return xla(*operands)
    if wrong := self_check.failure(pallas, xla, example):
      _warn_once(f"{wrong} XLA runs the reference instead.{_SEE}", RuntimeWarning)
      return xla(*operands)
    return by_platform.call(*operands, cuda=pallas, default=xla)
  if implementation == "xla":
    return xla(*operands)
  kernel = mosaic if implementation == "mosaic" else pallas
  if isinstance(kernel, str):
    raise ValueError(
      f'`implementation` must be None or "xla" here, got {implementation!r}: {kernel}.'
    )
  if implementation == "pallas_interpret":
    return kernel(*operands, interpret=True)
  if missing := _missing(implementation):
    raise ValueError(
      f"`implementation` must be one that runs here, got {implementation!r}, which "
      f'needs {missing}; use None, which takes the fastest, or "xla".'
    )
  if implementation == "pallas":
    if wrong := self_check.failure(kernel, xla, example):
      raise RuntimeError(f'{wrong} Use `implementation` None or "xla".{_SEE}')
  return kernel(*operands)


def _missing(implementation: Implementation) -> str | None:
  """Names the device that a kernel needs and this machine lacks; None if it can run."""
  backend = jax.default_backend()
  if backend != "gpu":
    return f"a GPU, and the default backend is {backend!r}"
  if implementation == "mosaic":
    capability = getattr(jax.devices()[0], "compute_capability", "0")
    if float(capability) < _HOPPER:
      return f"compute capability {_HOPPER} or more, and this GPU has {capability}"
  return None
