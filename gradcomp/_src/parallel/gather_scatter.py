"""All-gather and reduce-scatter: each of the two is the other's gradient."""

import functools

import jax
from jax import lax

from gradcomp._src.mesh.types import mark_varying
from gradcomp._src.parallel.options import Wire, folded
from gradcomp._src.parallel.transport import (
  concat,
  gather_encoded,
  reduce_encoded,
  split_parts,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gather_shards(
  wire: Wire, axis: int, equal: bool, x: jax.Array, key: jax.Array | None
) -> jax.Array:
  """Concatenates all workers' arrays; ``equal`` types the result as replicated."""
  result = concat(gather_encoded(x, wire, key), axis).astype(x.dtype)
  return result if equal else mark_varying(result, wire.axis_name)


def _gather_forward(
  wire: Wire, axis: int, equal: bool, x: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
  return gather_shards(wire, axis, equal, x, key), key


def _gather_backward(
  wire: Wire, axis: int, equal: bool, key: jax.Array | None, cotangent: jax.Array
) -> tuple[jax.Array, None]:
  if equal:  # and so is the cotangent, of all workers together
    parts = split_parts(cotangent, axis, wire.size)
    return parts[lax.axis_index(wire.axis_name)], None
  return scatter_sums(wire.reversed, axis, cotangent, folded(key, 1)), None


gather_shards.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scatter_sums(
  wire: Wire, axis: int, x: jax.Array, key: jax.Array | None
) -> jax.Array:
  """Returns this worker's part of the sum, ``[..., n, ...]`` of ``[..., N n, ...]``."""
  return reduce_encoded(split_parts(x, axis, wire.size), wire, key).astype(x.dtype)


def _scatter_forward(
  wire: Wire, axis: int, x: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
  return scatter_sums(wire, axis, x, key), key


def _scatter_backward(
  wire: Wire, axis: int, key: jax.Array | None, cotangent: jax.Array
) -> tuple[jax.Array, None]:
  return gather_shards(wire.reversed, axis, False, cotangent, folded(key, 1)), None


scatter_sums.defvjp(_scatter_forward, _scatter_backward)
