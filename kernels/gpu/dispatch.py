"""Dispatch: chooses the implementation of each operation; no other file does.

An operation has a ``reference``, which is jnp code and the fast path on CPU and TPU.
``pallas`` and, for some, ``mosaic`` are kernels for GPUs. All give the same bits,
unless the file ``mosaic`` says otherwise.

``jax.lax.platform_dependent`` traces both, and so would import Pallas, with its back
ends for GPUs, wherever an encoder is traced. The primitive of this file traces the
kernel where a program is lowered for CUDA.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from gradcomp._src.checks import see
from gradcomp._src.kernels.gpu import mosaic_tiles, self_check, triton_tiles

Implementation = Literal["xla", "pallas", "pallas_interpret", "mosaic"]

_HOPPER = 9.0
_SEE = see("runs-the-reference-instead")

# Whatever the filters of warnings say, each text once in a process.
_warn_once = functools.cache(warnings.warn)

_Function = Callable[..., Any]


class Operation(NamedTuple):
  """The functions of an operation; a kernel may be why there is none, a sentence."""

  xla: _Function
  pallas: _Function | str
  mosaic: _Function | str = "there is no such kernel for this operation"


def encoder(reference: Any, pallas: Any, mosaic: Any = None) -> _Function:
  """Returns the encoder of modules that each have an ``encode_rows``.

  It takes an array, the other operands, ``form`` and ``implementation``, and returns
  the rows and the residual or None, as ``reference.encode_rows`` does.
  """

  def encode_rows(
    x: jax.Array,
    *operands: jax.Array | None,
    form: triton_tiles.Form,
    implementation: Implementation | None = None,
  ) -> tuple[jax.Array, jax.Array | None]:
    functions = Operation(
      reference.encode_rows,
      triton_tiles.refusal(x.size, form) or pallas.encode_rows,
    )
    if mosaic is not None:
      no = mosaic_tiles.refusal(x.size, form)
      functions = functions._replace(mosaic=no or mosaic.encode_rows)
    tile = form.planes * form.bucket_size
    example = lambda: self_check.few_tiles(tile, *operands)
    return run(functions, implementation, (x, *operands), {"form": form}, example)

  return encode_rows


def run(
  operation: Operation,
  implementation: Implementation | None,
  operands: tuple[Any, ...],
  options: dict[str, Any],
  example: Callable[[], self_check.Example],
) -> Any:
  """Calls one implementation with the operands, and returns its result.

  In a process with CUDA devices, :func:`self_check.failure` first compares ``"pallas"``
  with ``"xla"`` on a small input. Where the kernel fails or gives other bits, None
  warns of it once and takes ``"xla"``, and the name raises. The environment variable
  ``GRADCOMP_CHECK_KERNELS=0`` turns the check off.

  Args:
    operation: its functions; kernels in Triton style also take ``interpret``.
    implementation: ``"xla"`` for the reference; ``"pallas"`` for the kernel in Triton
      style; ``"pallas_interpret"`` for the same kernel on any backend, slowly, for
      tests; ``"mosaic"`` for the kernel for Hopper and newer; or None. None takes
      ``"pallas"`` on CUDA devices, where there is such a kernel, and ``"xla"``
      elsewhere. It decides where the program is lowered for a platform.
    operands: trees of arrays, or None.
    options: static, and hashable.
    example: returns the small input. It is called only where there is a CUDA device.

  Raises:
    ValueError: the named implementation has no kernel for these arguments, or its
      kernel does not run on the default backend.
    RuntimeError: ``"pallas"`` was named, and its kernel fails or gives other bits.

  Example:
    >>> operation = Operation(jnp.sqrt, "there is none")
    >>> example = lambda: self_check.Example((np.ones(8, np.float32),))
    >>> float(run(operation, None, (jnp.float32(4.0),), {}, example))
    2.0
  """
  xla = _jitted(operation.xla, **options)
  found = operation.mosaic if implementation == "mosaic" else operation.pallas
  if implementation == "xla" or (implementation is None and isinstance(found, str)):
    return xla(*operands)
  if isinstance(found, str):
    raise ValueError(
      f'`implementation` must be None or "xla" here, got {implementation!r}: {found}.'
    )
  kernel = functools.partial(found, **options)
  if implementation == "pallas_interpret":
    return kernel(*operands, interpret=True)
  if implementation is not None and (missing := _missing(implementation)):
    raise ValueError(
      f"`implementation` must be one that runs here, got {implementation!r}, which "
      f'needs {missing}; use None, which takes the fastest, or "xla".'
    )
  if implementation != "mosaic":
    reference = functools.partial(operation.xla, **options)
    if wrong := self_check.failure(kernel, reference, example):
      if implementation == "pallas":
        raise RuntimeError(f'{wrong} Use `implementation` None or "xla".{_SEE}')
      _warn_once(f"{wrong} XLA runs the reference instead.{_SEE}", RuntimeWarning)
      return xla(*operands)
  if implementation is None:
    return by_platform(operands, kernel, xla.trace(*operands))
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


@functools.lru_cache(1024)
def _jitted(function: _Function, **options: Any) -> Any:
  """Returns one jitted function for equal options, which JAX traces once a shape."""
  return jax.jit(functools.partial(function, **options))


_CALL = Primitive("gradcomp_kernel")
_CALL.multiple_results = True


def by_platform(operands: Any, kernel: _Function, traced: Any) -> Any:
  """Calls ``kernel`` where a program is lowered for CUDA, else the traced reference."""
  leaves, structure = jax.tree.flatten(operands)

  def flat(*leaves: Any) -> list[Any]:
    return jax.tree.leaves(kernel(*jax.tree.unflatten(structure, leaves)))

  found = _CALL.bind(*leaves, kernel=flat, reference=traced.jaxpr)
  return jax.tree.unflatten(jax.tree.structure(traced.out_info), found)


@_CALL.def_abstract_eval
def _types(*_: Any, kernel: _Function, reference: ClosedJaxpr) -> list[Any]:
  return reference.out_avals


@_CALL.def_impl
def _run(*leaves: Any, kernel: _Function, reference: ClosedJaxpr) -> Any:
  is_cuda = jax.lax.platform_dependent(cuda=lambda: True, default=lambda: False)
  return (kernel if is_cuda else _program(reference))(*leaves)


def _batched(
  leaves: Any, axes: Any, *, kernel: _Function, reference: ClosedJaxpr
) -> tuple[Any, list[int]]:
  traced = jax.jit(jax.vmap(jaxpr_as_fun(reference), axes)).trace(*leaves)
  found = by_platform(leaves, jax.vmap(kernel, axes), traced)
  return found, [0] * len(found)


@functools.lru_cache(maxsize=1024)
def _program(reference: ClosedJaxpr) -> _Function:
  """Returns a function that a program holds once, whatever number of leaves call it."""
  return jax.jit(jaxpr_as_fun(reference))


def _lower(ctx: Any, *leaves: Any, kernel: _Function, reference: ClosedJaxpr) -> Any:
  return mlir.lower_fun(_program(reference))(ctx, *leaves)


def _lower_kernel(ctx: Any, *leaves: Any, kernel: _Function, reference: Any) -> Any:
  return mlir.lower_fun(kernel)(ctx, *leaves)


batching.primitive_batchers[_CALL] = _batched
mlir.register_lowering(_CALL, _lower)
mlir.register_lowering(_CALL, _lower_kernel, platform="cuda")
