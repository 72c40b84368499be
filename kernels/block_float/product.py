"""Products of arrays of floats of few bits with a scale for each block."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradcomp._src.kernels.gpu import dispatch, table

Operand = tuple[Array, Array]  # elements, [rows, K], and scales, [rows, blocks]


def multiply(a: Operand, b: Operand) -> Array:
  """Returns the sums over K, ``float32[rows of a, rows of b]``."""
  # GPUs from Blackwell on have such a product. Elsewhere elements times scales are
  # bfloat16, which holds each of them exactly.
  # `jax.lax.scaled_dot` chooses likewise, but XLA cannot compile it for GPUs inside of
  # jax.shard_map, with JAX 0.10: "failed to legalize operation 'mhlo.unknown'".
  operands = *a, *b
  able = lambda *given: (
    _decoded(*given) if table.older_than(table.BLACKWELL) else _by_unit(*given)
  )
  reference = jax.jit(_decoded).trace(*operands)
  return dispatch.by_platform(operands, {"cuda": able}, reference)


# JAX has no rule for a vmap that maps one of its operands and not the other.
@jax.custom_batching.sequential_vmap
def _by_unit(x: Array, x_scales: Array, y: Array, y_scales: Array) -> Array:
  return jax.nn.scaled_matmul(x[None], y[None], x_scales[None], y_scales[None])[0]


def _decoded(x: Array, x_scales: Array, y: Array, y_scales: Array) -> Array:
  return dot(_bfloat16(x, x_scales), _bfloat16(y, y_scales), 1)


def _bfloat16(elements: Array, scales: Array) -> Array:
  shape = *scales.shape, elements.shape[1] // scales.shape[1]
  each = elements.astype(jnp.bfloat16).reshape(shape)
  return (each * scales.astype(jnp.bfloat16)[..., None]).reshape(elements.shape)


def dot(a: Array, b: Array, axis: int) -> Array:
  """Sums over the last axis of a matrix and an axis of another, in ``float32``."""
  dims: Any = ((1,), (axis,)), ((), ())
  return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
