"""Norms, deviations and scales, with the same bits in every mode.

A plain reduction of floats adds in an order that depends on the shape around it, so
that a worker emulated by ``vmap`` would not get the bits of a real one. It may also
drop NaN. The sums here have one order, and the maximum keeps NaN.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.kernels.common.fixed_point import held
from gradcomp._src.kernels.common.planes import tile_segments

Norm = Literal["max", "l2"]

# A norm below the smallest normal number counts as zero, because CPUs flush subnormal
# numbers. A scale is at least 2**-96, so that its reciprocal times 2**31 is finite.
_SMALLEST_NORMAL = np.float32(2.0**-126)
_SMALLEST_SCALE = np.float32(2.0**-96)

_MAX_BLOCK = 512  # elements: a maximum over short rows is faster than over long ones
# Sums of 128 elements as 16 additions of 8 lanes: XLA:CPU unrolls and vectorizes these.
_LANES = 8
_STEPS = 16
_BLOCK = _LANES * _STEPS


def scales(norm: jax.Array) -> jax.Array:
  """Returns the scales that travel: 0 for a subnormal norm, else at least ``2**-96``.

  NaN stays NaN.

  Example:
    >>> scales(jnp.array([2.5, 1e-39, jnp.nan]))
    Array([2.5, 0. , nan], dtype=float32)
  """
  return jnp.where(norm < _SMALLEST_NORMAL, 0.0, jnp.maximum(norm, _SMALLEST_SCALE))


def scales_of_bits(bits: jax.Array) -> jax.Array:
  """Returns the :func:`scales` of norms from their ``int32`` bits, without floats.

  Example:
    >>> bits = jax.lax.bitcast_convert_type(jnp.array([2.5, 1e-38, 1e-30]), jnp.int32)
    >>> scales_of_bits(bits) == scales(jnp.array([2.5, 1e-38, 1e-30]))
    Array([ True,  True,  True], dtype=bool)
  """
  least = jnp.maximum(bits, int(_SMALLEST_SCALE.view(np.int32)))
  bits = jnp.where(bits < int(_SMALLEST_NORMAL.view(np.int32)), 0, least)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def norms(x: jax.Array, norm: Norm) -> jax.Array:
  """Returns the norm over the last axis, or NaN if anything in it is not finite.

  The l2 norm is scaled by the maximum, so that squares neither overflow nor vanish. It
  is cut to the largest finite number, which is still at least the maximum.

  Example:
    >>> norms(jnp.array([[3., -4.], [0., jnp.inf]]), "l2")
    Array([ 5., nan], dtype=float32)
  """
  # One variadic reduction of maximum and minimum, because XLA:CPU's library call for a
  # plain maximum drops NaN (seen in 0.10.2 and 0.12.0).
  high, low = jax.lax.reduce(
    (x, x),
    (np.float32(-np.inf), np.float32(np.inf)),
    lambda a, b: (jnp.maximum(a[0], b[0]), jnp.minimum(a[1], b[1])),
    (x.ndim - 1,),
  )
  largest = jnp.maximum(high, -low)
  largest = jnp.where(jnp.isfinite(largest), largest, jnp.nan)
  if norm == "max":
    return largest
  unit = x / jnp.where(largest == 0, 1.0, largest)[..., None]
  length = largest * jnp.sqrt(sum_by_halves(_square(unit)))
  return jnp.minimum(length, jnp.finfo(jnp.float32).max)


def tensor_norm(x: jax.Array, norm: Norm) -> jax.Array:
  """Returns the norm of a whole flat array: ``float32[]``.

  Example:
    >>> tensor_norm(jnp.arange(-3.0, 2.0), "max")
    Array(3., dtype=float32)
  """
  if not x.size:
    return jnp.zeros([], jnp.float32)
  whole = x.size // _MAX_BLOCK * _MAX_BLOCK
  if norm == "l2" or not whole:
    return norms(x, norm)
  parts = [norms(x[:whole].reshape(-1, _MAX_BLOCK), norm)]
  if whole < x.size:
    parts.append(norms(x[whole:], norm)[None])
  return norms(jnp.concatenate(parts), norm)


def bucket_norms(x: jax.Array, planes: int, bucket_size: int, norm: Norm) -> jax.Array:
  """Returns the norms of an array's buckets, one line a tile: ``float32[rows, P]``.

  Buckets that only fill the last tile have the norm zero.

  Example:
    >>> bucket_norms(jnp.array([1.0, -2.0, 3.0]), planes=2, bucket_size=2, norm="max")
    Array([[2., 3.]], dtype=float32)
  """
  lines = [jnp.zeros([0, planes], jnp.float32)]
  for segment in tile_segments(x, planes, bucket_size):
    count = segment.shape[0] * planes
    lines.append(norms(segment.buckets, norm)[:count].reshape(-1, planes))
  return jnp.concatenate(lines)


def deviation(x: jax.Array, largest: jax.Array) -> jax.Array:
  """Returns the standard deviation of a flat array, in one pass: ``float32[]``.

  Differences from the first element are added, so that a constant array has none, and a
  mean far from zero loses no digits. They are divided by a power of two near the
  largest element, so that no square overflows, and none that matters vanishes.
  ``largest`` is the norm, from 0 to infinity, or NaN.

  Example:
    >>> deviation(jnp.array([1., 3., 1., 3.]), jnp.float32(3))
    Array(1., dtype=float32)
  """
  if not x.size:
    return jnp.zeros([], jnp.float32)
  exponent = jnp.clip(jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23, 1, 253)
  up = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
  down = jax.lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
  whole = x.size // _BLOCK * _BLOCK
  parts = []
  for part in (x[:whole] - x[0], _filled(x[whole:] - x[0])):
    d = (part * down).reshape(-1, _STEPS, _LANES)
    parts.append(sum_lanes((d, _square(d))))
  sums = [jnp.concatenate(halves).reshape(-1) for halves in zip(*parts, strict=True)]
  while sums[0].size > _BLOCK:
    blocks = [_filled(a).reshape(-1, _STEPS, _LANES) for a in sums]
    sums = [a.reshape(-1) for a in sum_lanes(tuple(blocks))]
  mean, mean_square = (
    held(jnp.abs(sum_by_halves(a)) * np.float32(1 / x.size)) for a in sums
  )
  return jnp.sqrt(jnp.maximum(mean_square - _square(mean), 0.0)) * up


def _filled(x: jax.Array) -> jax.Array:
  """Fills a flat array with zeros to whole blocks."""
  return jnp.pad(x, (0, -x.size % _BLOCK))


def sum_lanes(operands: tuple[jax.Array, ...]) -> list[jax.Array]:
  """Sums over the last axis but one, each lane from first to last, in one pass."""
  # XLA reduces several operands together in this order. For a single one it would make
  # a library call, which adds in an order of its own.
  return jax.lax.reduce(
    operands,
    tuple(np.zeros((), operand.dtype)[()] for operand in operands),
    lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
    (operands[0].ndim - 2,),
  )


def sum_by_halves(x: jax.Array) -> jax.Array:
  """Sums over the last axis: adds its halves until one element is left."""
  while (size := x.shape[-1]) > 1:
    if size % 2:
      x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
    half = x.shape[-1] // 2
    x = x[..., :half] + x[..., half:]
  return x[..., 0]


def _square(x: jax.Array) -> jax.Array:
  return held(x * x)
