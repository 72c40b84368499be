"""Scales of QSGD's buckets, from the norm that the codec is given."""

import math
from collections.abc import Callable

import jax
import numpy as np

from gradcomp._src.codecs.qsgd_options import ScaleNorm
from gradcomp._src.codecs.scaling import leaf_scales, row_scales
from gradcomp._src.codecs.shared_scales import SharedScales
from gradcomp._src.kernels.common import planes
from gradcomp._src.kernels.common.scales import scales

# The distance of 2, 4, 8 and 16 equally spaced levels, half of them on each side of
# zero, that has the least squared error for Gaussian numbers of variance 1.
_STEPS = {1: 1.596, 2: 0.996, 3: 0.586, 4: 0.335}


def reach(bits: int, bucket_size: int) -> np.float32:
  """Returns the outermost level of ``norm="rms"``, for a bucket with an l2 norm of 1.

  Example:
    >>> float(reach(4, 64))  # 7.5 steps of 0.335, by the square root of 64
    0.3140625059604645
  """
  return np.float32((2**bits - 1) / 2 * _STEPS[bits] / math.sqrt(bucket_size))


class BucketScales(SharedScales):
  """A base of codecs with a scale for each bucket, or for each tensor."""

  bits: int
  bucket_size: int | None
  norm: ScaleNorm

  def filled(self, flat: jax.Array) -> jax.Array:
    """For ``norm="rms"``, fills the last bucket with copies of its elements."""
    if self.norm != "rms" or self.bucket_size is None:
      return flat
    return planes.filled(flat, self.bucket_size)

  def flat_scales(self, flat: jax.Array) -> jax.Array:
    """Returns the scales of a flat leaf: ``float32[rows, P]``, or ``[1, 1]``."""
    return self._scales(leaf_scales, flat)

  def tile_scales(self, tiles: jax.Array) -> jax.Array:
    """Returns each tile's own scales: ``float32[rows, P]``, or ``[rows, 1]``."""
    return self._scales(row_scales, tiles)

  def _scales(self, measure: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    count = planes.planes_per_word(self.bits)
    if self.norm != "rms":
      return scales(measure(x, count, self.bucket_size, self.norm))
    assert self.bucket_size is not None
    lengths = measure(x, count, self.bucket_size, "l2")
    return scales(lengths * reach(self.bits, self.bucket_size))
