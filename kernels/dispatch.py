"""Which implementation of an operation runs: the one place that decides.

An operation is a folder of this package. Its ``reference`` is jnp code, the fast path
on CPU and TPU; ``pallas`` and, where there is one, ``mosaic`` are kernels for GPUs. All
give the same bits, where ``mosaic`` does not say otherwise.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax

Implementation = Literal["xla", "pallas", "pallas_interpret", "mosaic"]

# An implementation, or why there is none for these arguments.
Kernel = Callable[..., Any] | str

NO_MOSAIC = "there is no such kernel for this operation"
_HOPPER = 9.0


def run(
  implementation: Implementation | None,
  *operands: Any,
  xla: Callable[..., Any],
  pallas: Kernel,
  mosaic: Kernel = NO_MOSAIC,
) -> Any:
  """Calls one implementation with the operands, which all take.

  Args:
    implementation: ``"xla"``, ``"pallas"`` (Triton style), ``"pallas_interpret"`` (the
      same on any backend, slowly, for tests), ``"mosaic"`` (Hopper and newer), or None
      for ``"pallas"`` on CUDA devices, where there is such a kernel, and ``"xla"``
      elsewhere. None is decided when the program is lowered for a platform; a program
      that is exported for several at once needs a name.
    *operands: arrays, or None.
    xla: the reference.
    pallas: the kernel; it also takes ``interpret``.
    mosaic: the kernel.

  Raises:
    ValueError: a name whose kernel is not there for these arguments, or does not run on
      the default backend.
  """
  if implementation is None:
    if isinstance(pallas, str):
      return xla(*operands)
    return jax.lax.platform_dependent(*operands, cuda=pallas, default=xla)
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
  return kernel(*operands)


def _missing(implementation: Implementation) -> str | None:
  """What this machine lacks for a kernel."""
  backend = jax.default_backend()
  if backend != "gpu":
    return f"a GPU, and the default backend is {backend!r}"
  if implementation == "mosaic":
    capability = getattr(jax.devices()[0], "compute_capability", "0")
    if float(capability) < _HOPPER:
      return f"compute capability {_HOPPER} or more, and this GPU has {capability}"
  return None
