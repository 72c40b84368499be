"""A call of a kernel or of its reference, chosen where a program is lowered.

``jax.lax.platform_dependent`` traces both, and so would import Pallas, with its back
ends for GPUs, wherever an encoder is traced. Here CUDA's lowering traces the kernel.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

_CALL = Primitive("gradcomp_kernel")
_CALL.multiple_results = True

_Function = Callable[..., Any]


def call(*operands: Any, cuda: _Function, default: _Function) -> Any:
  """Calls one of two functions of the same types by the platform of the program.

  Args:
    *operands: trees of arrays.
    cuda: runs on CUDA devices.
    default: runs on all others, and is traced here.

  Example:
    >>> call(jnp.float32(4), cuda=jnp.sqrt, default=lambda x: x / 2)
    Array(2., dtype=float32)
  """
  leaves, structure = jax.tree.flatten(operands)

  def kernel(*leaves: Any) -> list[Any]:
    return jax.tree.leaves(cuda(*jax.tree.unflatten(structure, leaves)))

  reference, out = jax.make_jaxpr(default, return_shape=True)(*operands)
  found = _CALL.bind(*leaves, kernel=kernel, reference=reference)
  return jax.tree.unflatten(jax.tree.structure(out), found)


@_CALL.def_abstract_eval
def _types(*_: Any, kernel: _Function, reference: ClosedJaxpr) -> list[Any]:
  return reference.out_avals


@_CALL.def_impl
def _run(*leaves: Any, kernel: _Function, reference: ClosedJaxpr) -> Any:
  is_cuda = jax.lax.platform_dependent(cuda=lambda: True, default=lambda: False)
  return (kernel if is_cuda else jaxpr_as_fun(reference))(*leaves)


def _batched(
  leaves: Any, axes: Any, *, kernel: _Function, reference: ClosedJaxpr
) -> tuple[Any, list[int]]:
  default = jax.vmap(jaxpr_as_fun(reference), axes)
  found = call(*leaves, cuda=jax.vmap(kernel, axes), default=default)
  return found, [0] * len(found)


def _lower(ctx: Any, *leaves: Any, kernel: _Function, reference: ClosedJaxpr) -> Any:
  return mlir.lower_fun(jaxpr_as_fun(reference))(ctx, *leaves)


def _lower_kernel(ctx: Any, *leaves: Any, kernel: _Function, reference: Any) -> Any:
  return mlir.lower_fun(kernel)(ctx, *leaves)


batching.primitive_batchers[_CALL] = _batched
mlir.register_lowering(_CALL, _lower)
mlir.register_lowering(_CALL, _lower_kernel, platform="cuda")
