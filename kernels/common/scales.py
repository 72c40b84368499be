"""Norms, scales and deviations, with the same bits in every mode."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common.fixed_point import held
from gradcomp._src.kernels.common.planes import floats, tile_segments
from gradcomp._src.kernels.gpu import tiles
from gradcomp._src.kernels.gpu.dispatch import Implementation, on_tpu, with_kernel
from gradcomp._src.kernels.tpu import lines

# A plain reduction of floats adds in an order that depends on the shape around it, and
# may drop NaN. The sums here have one order, and the maximum keeps NaN.
Norm = Literal["max", "l2"]

# A norm below the smallest normal number counts as zero, because CPUs flush subnormal
# numbers. A scale is at least 2**-96, so that its reciprocal times 2**31 is finite.
_SMALLEST_NORMAL = np.float32(2.0**-126)
_SMALLEST_SCALE = np.float32(2.0**-96)

_VECTOR = 128  # elements: lanes of a register of a TPU
_MAX_BLOCK = 512  # elements: a maximum over short rows is faster than over long ones

# Sums of 128 elements as 16 additions of 8 lanes: XLA:CPU unrolls and vectorizes these.
_LANES = 8
_STEPS = 16
_BLOCK = _LANES * _STEPS
_GROUP = _BLOCK * _STEPS  # elements: their sums are a block

# Elements of a line of a kernel for sums. Norms and the encoder view the leaf as lines
# of 512, too: another view would be another copy of it in memory.
_LINE = 512


def scales(norm: Array) -> Array:
  """Returns the scales that travel: 0 for a subnormal norm, or ``2**-96`` and more."""
  kept = lax.max(norm, _SMALLEST_SCALE)
  return jnp.where(lax.lt(norm, _SMALLEST_NORMAL), np.float32(0), kept)


def scales_of_bits(bits: Array) -> Array:
  """Returns the :func:`scales` of norms from their ``int32`` bits, without floats."""
  least = jnp.maximum(bits, int(_SMALLEST_SCALE.view(np.int32)))
  return floats(jnp.where(bits < int(_SMALLEST_NORMAL.view(np.int32)), 0, least))


# TPUs find one maximum of integers sooner.
@on_tpu(lambda x: floats(tiles.largest_bits(x)))
def _largest(x: Array) -> Array:
  """Returns the largest magnitude over the last axis, or NaN if there is one."""
  # One variadic reduction of maximum and minimum, because XLA:CPU's library call for a
  # plain maximum drops NaN (seen in 0.10.2 and 0.12.0).
  high, low = lax.reduce(
    (x, x),
    (np.float32(-np.inf), np.float32(np.inf)),
    lambda a, b: (lax.max(a[0], b[0]), lax.min(a[1], b[1])),
    (x.ndim - 1,),
  )
  return lax.max(high, -low)


def norms(x: Array, norm: Norm) -> Array:
  """Returns the norm over the last axis, or NaN if anything in it is not finite."""
  largest = _largest(x)
  nan = lax.full_like(largest, np.nan)
  largest = lax.select(lax.is_finite(largest), largest, nan)
  if norm == "max":
    return largest
  return _lengths(largest, sum_by_halves(_shares(x, largest)))


def _shares(x: Array, largest: Array) -> Array:
  """Returns the squares of elements over the largest magnitude of their bucket."""
  # So squares neither overflow nor vanish.
  return _square(x / jnp.where(largest == 0, 1.0, largest)[..., None])


def _lengths(largest: Array, total: Array) -> Array:
  """Returns l2 norms, from the sums of :func:`_shares`."""
  # A norm is cut to the largest finite number, which is still at least the maximum.
  return jnp.minimum(largest * jnp.sqrt(total), jnp.finfo(jnp.float32).max)


def tensor_norm(x: Array, norm: Norm) -> Array:
  """Returns the norm of a whole flat array: ``float32[]``."""
  if not x.size:
    return jnp.zeros([], jnp.float32)
  return norms(x, norm) if norm == "l2" else _tensor_maximum(x)


_maximum = functools.partial(norms, norm="max")


@on_tpu(_maximum)  # which need no block, and would move the array into its order
def _tensor_maximum(x: Array) -> Array:
  whole = x.size // _MAX_BLOCK * _MAX_BLOCK
  if not whole:
    return _maximum(x)
  parts = [_maximum(x[:whole].reshape(-1, _MAX_BLOCK))]
  if whole < x.size:
    parts.append(_maximum(x[whole:])[None])
  return _maximum(jnp.concatenate(parts))


def _lengths_of_planes(planes: Sequence[Array]) -> Array:
  """Returns the l2 norms of planes, ``[rows, B]`` each: ``float32[P, rows]``."""
  # First the vectors of a bucket are added, and then, in a fourth of the array or less,
  # the elements of a vector, as rows. Below a vector's 128 lanes, each half would be as
  # dear as the whole.
  found = []
  largest = [norms(plane, "max") for plane in planes]
  for x, own in zip(planes, largest, strict=True):
    starts = range(0, x.shape[1], _VECTOR)
    parts = [_shares(x[:, at : at + _VECTOR], own) for at in starts]
    while half := len(parts) // 2:
      parts = list(map(jnp.add, parts[:half], parts[half:]))
    found += parts
  sums = jnp.stack(found)
  columns = sums.reshape(-1, _VECTOR).T
  while half := len(columns) // 2:
    columns = columns[:half] + columns[half:]
  return _lengths(jnp.stack(largest), columns.reshape(sums.shape[:2]))


def _norms_of_planes(x: Array, *, planes: int, bucket_size: int, norm: Norm) -> Array:
  """Returns :func:`bucket_norms` for TPUs, from one plane after the other."""
  lines = [jnp.zeros([0, planes], jnp.float32)]
  whole, rest = divmod(bucket_size, _VECTOR)
  of_planes: Any = lambda planes: [norms(plane, norm) for plane in planes]
  if norm == "l2" and not rest and not whole & (whole - 1):
    of_planes = _lengths_of_planes
  for segment in tile_segments(x, planes, bucket_size):
    lines.append(jnp.stack(of_planes(segment.planes), axis=1))
  return jnp.concatenate(lines)


@on_tpu(_norms_of_planes)
def bucket_norms(x: Array, *, planes: int, bucket_size: int, norm: Norm) -> Array:
  """Returns the norms of an array's buckets, one line a tile: ``float32[rows, P]``."""
  lines = [jnp.zeros([0, planes], jnp.float32)]
  for segment in tile_segments(x, planes, bucket_size):
    count = segment.shape[0] * planes
    lines.append(norms(segment.buckets, norm)[:count].reshape(-1, planes))
  return jnp.concatenate(lines)


def sum_lanes(operands: tuple[Array, ...]) -> list[Array]:
  """Sums over the last axis but one, each lane from first to last, in one pass."""
  # XLA reduces several operands together in this order. For a single one it would make
  # a library call, which adds in an order of its own.
  return lax.reduce(
    operands,
    tuple(np.zeros((), operand.dtype)[()] for operand in operands),
    lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
    (operands[0].ndim - 2,),
  )


def sum_by_halves(x: Array) -> Array:
  """Sums over the last axis: adds its halves until one element is left."""
  while (size := x.shape[-1]) > 1:
    if size % 2:
      x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
    half = x.shape[-1] // 2
    x = x[..., :half] + x[..., half:]
  return x[..., 0]


def deviation(
  x: Array, largest: Array, implementation: Implementation | None = None
) -> Array:
  """Returns the standard deviation of a flat array, in one pass: ``float32[]``."""
  # Differences from the first element are added, so that a mean far from zero loses no
  # digits. A power of two near `largest`, the norm, divides them: no square overflows.
  if not x.size:
    return jnp.zeros([], jnp.float32)
  exponent = jnp.clip(lax.bitcast_convert_type(largest, jnp.int32) >> 23, 1, 253)
  up, down = (floats(bits << 23) for bits in (exponent, 254 - exponent))
  if x.size <= _GROUP:
    found = _sums_of_blocks(x, x[0], down)
  else:
    whole = x.size // _GROUP * _GROUP
    parts = [_of_groups(x[:whole], x[0], down, implementation=implementation)]
    if whole < x.size:
      parts.append(sums_of_groups(x[whole:], x[0], down))
    found = [jnp.concatenate(halves) for halves in zip(*parts, strict=True)]
  while found[0].size > _BLOCK:
    found = _sums_of_sums(found)
  share = np.float32(1 / x.size)
  mean, mean_square = (held(jnp.abs(sum_by_halves(a)) * share) for a in found)
  return jnp.sqrt(jnp.maximum(mean_square - _square(mean), 0.0)) * up


def sums_of_groups(x: Array, first: Array, down: Array) -> list[Array]:
  """Returns sums of differences and of squares: 8 for each 2048 elements, in order."""
  return _sums_of_sums(_sums_of_blocks(x, first, down))


def sums_by_kernel(
  x: Array, first: Array, down: Array, *, interpret: Any = False
) -> list[Array]:
  """Returns :func:`sums_of_groups` for TPUs, to the same bits."""

  def sums(x: Array) -> Array:  # of blocks, and then of each 16 of these sums
    blocks = []  # the first of each line, the second and so on
    for start in range(0, _LINE, _BLOCK):
      parts = (x[at : at + _LANES] for at in range(start, start + _BLOCK, _LANES))
      total = functools.reduce(jnp.add, parts)
      blocks.append(total.T.reshape(-1, _GROUP // _LINE, _LANES))
    steps = [block[:, line] for line in range(_GROUP // _LINE) for block in blocks]
    return lax.bitcast_convert_type(functools.reduce(jnp.add, steps), jnp.int32)

  def body(x: Array, first: Array, down: Array) -> tuple[Array, ...]:
    d = (x.T - first) * down
    return sums(d), sums(_square(d))

  launch = tiles.Launch("sums_of_groups", [_LANES] * 2, interpret)
  found = lines.encode(body, x, launch, _GROUP, _LINE, (first, down))
  return [floats(part).reshape(-1) for part in found]


_of_groups = with_kernel(sums_of_groups, sums_by_kernel)


def _sums_of_sums(sums: Sequence[Array]) -> list[Array]:
  """Sums each 16 of blocks of 8 numbers, in order."""
  blocks = [_filled(x).reshape(-1, _STEPS, _LANES) for x in sums]
  return [x.reshape(-1) for x in sum_lanes(tuple(blocks))]


def _sums_of_blocks(x: Array, first: Array, down: Array) -> list[Array]:
  """Returns sums of differences and of squares: 8 for each 128 elements, in order."""
  d = (x - first) * down
  return _sums_of_sums([d, _square(d)])


def _filled(x: Array) -> Array:
  """Fills a flat array with zeros to whole blocks."""
  missing = -x.size % _BLOCK
  return jnp.pad(x, (0, missing)) if missing else x


def _square(x: Array) -> Array:
  return held(x * x)
