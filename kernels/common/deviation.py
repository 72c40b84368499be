"""The standard deviation of a leaf, with the same bits in every mode and on TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.kernels.common.fixed_point import held
from gradcomp._src.kernels.common.scales import sum_by_halves, sum_lanes
from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.tpu import sums

# Sums of 128 elements as 16 additions of 8 lanes: XLA:CPU unrolls and vectorizes these.
_LANES = 8
_STEPS = 16
_BLOCK = _LANES * _STEPS
_GROUP = _BLOCK * _STEPS  # elements whose sums are a block


def deviation(
  x: Array, largest: Array, implementation: dispatch.Implementation | None = None
) -> Array:
  """Returns the standard deviation of a flat array, in one pass: ``float32[]``."""
  # Differences from the first element are added, so that a mean far from zero loses no
  # digits. A power of two near `largest`, the norm, divides them: no square overflows.
  if not x.size:
    return jnp.zeros([], jnp.float32)
  exponent = jnp.clip(jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23, 1, 253)
  up = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
  down = jax.lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
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


_of_groups = dispatch.on_tpu(sums.of_groups, mosaic=True)(sums_of_groups)


def _sums_of_blocks(x: Array, first: Array, down: Array) -> list[Array]:
  """Returns sums of differences and of squares: 8 for each 128 elements, in order."""
  d = (_filled(x - first) * down).reshape(-1, _STEPS, _LANES)
  return [a.reshape(-1) for a in sum_lanes((d, _square(d)))]


def _sums_of_sums(sums: list[Array]) -> list[Array]:
  """Adds each 16 of blocks' sums."""
  blocks = [_filled(a).reshape(-1, _STEPS, _LANES) for a in sums]
  return [a.reshape(-1) for a in sum_lanes(tuple(blocks))]


def _filled(x: Array) -> Array:
  """Fills a flat array with zeros to whole blocks."""
  missing = -x.size % _BLOCK
  return jnp.pad(x, (0, missing)) if missing else x


def _square(x: Array) -> Array:
  return held(x * x)
