"""Fits levels to the gradients, and encodes with them, plane by plane."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.kernels.common import fixed_point, scales
from gradcomp._src.kernels.common.fixed_point import Divide, Lane, divide
from gradcomp._src.kernels.gpu.tiles import Encoded
from gradcomp._src.kernels.quantize import (
  Line,
  ScaledForm,
  coordinate,
  encode_reference,
)

BINS = 256
_SAMPLED = 128  # buckets of a leaf that are counted, at most
MOST_COUNTED = 1 << 16  # elements of a leaf that are counted, at most
_WEIGHT = (1 << 13) - BINS  # the sum that counts are cut to, with room for rounding
_NEVER = np.uint32(1 << 31)  # the cost of a step that leads to no higher edge


def first_levels(bits: int) -> Array:
  """Returns equally spaced levels above zero: ``float32[2**(bits - 1)]``."""
  count = 2 ** (bits - 1)
  places = np.round(BINS * (np.arange(count) + 0.5) / (count - 0.5))
  return jnp.asarray(places / BINS, jnp.float32)


def histogram(x: Array, *, bucket_size: int, scale: Array | None) -> Array:
  """Counts the normalized magnitudes of a sample in 256 bins: ``int32[256]``."""
  # The sample is of whole buckets. Elements with a scale of 0 or NaN are not counted.
  # The scale is `float32[]`, or None for each bucket's largest magnitude.
  if not x.size:
    return jnp.zeros(BINS, jnp.int32)
  whole = max(1, x.size // bucket_size)
  size = min(x.size, bucket_size)
  count = min(whole, _SAMPLED, max(1, MOST_COUNTED // size))
  sample = x[: whole * size].reshape(whole, size)[np.arange(count) * whole // count]
  if scale is None:
    scale = scales.scales(scales.norms(sample, "max"))[:, None]
  sample = sample[:, :MOST_COUNTED]
  valid = jnp.broadcast_to(scale > 0, sample.shape)  # neither zero nor NaN
  place = jnp.abs(sample) * (np.float32(BINS) / scale)
  place = jnp.minimum(jnp.where(valid, place, 0.0).astype(jnp.int32), BINS - 1)
  return jnp.zeros(BINS, jnp.int32).at[place].add(valid.astype(jnp.int32))


def fit(counts: Array, levels: Array) -> Array:
  """Returns levels of least variance (Zhang et al., ZipML, 2017, section 3)."""
  # A magnitude mu between levels a and b has the variance (b - mu)(mu - a), and one
  # below the first level l has l^2 - mu^2. A dynamic program over the 257 edges of the
  # bins finds the least sum, for magnitudes in the middle of their bins.
  # Sums of integers have the same value in any order. These are four times the
  # variances, and stay below 2**31 because counts are cut to a total below 2**13.
  total = jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)
  weight = jnp.round(counts * (np.float32(_WEIGHT) / total)).astype(jnp.uint32)
  edge = np.arange(BINS + 1)
  twice = 2 * np.arange(BINS) + 1  # the middle of a bin
  below = np.maximum(2 * edge[:, None] - twice, 0).astype(np.uint32)  # [edge, bin]
  above = np.maximum(twice - 2 * edge[:, None], 0).astype(np.uint32)
  around = np.maximum((2 * edge[:, None]) ** 2 - twice**2, 0).astype(np.uint32)
  cost = jnp.where(edge[:, None] < edge, jnp.dot(above * weight, below.T), _NEVER)
  least = jnp.dot(around, weight)
  arrived = []
  for _ in range(levels.size - 1):
    totals = least[:, None] + cost
    arrived.append(jnp.argmin(totals, axis=0))
    least = jnp.minimum(jnp.min(totals, axis=0), _NEVER - 1)
  places = [jnp.int32(BINS)]
  for source in reversed(arrived):
    places.append(source[places[-1]].astype(jnp.int32))
  fitted = jnp.stack(places[::-1]).astype(jnp.float32) / BINS
  return jnp.where(jnp.any(counts > 0), fitted, levels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(ScaledForm):
  """The options of fitted levels, which follow the scales in each row."""

  @property
  def shared(self) -> int:
    """The levels above zero."""
    return 2 ** (self.bits - 1)

  def factor(self, scale: Array, divide: Divide = divide) -> Array:
    """Returns the factor of the scales in front of the levels: ``2**16 / scale``."""
    unit = 1 << fixed_point.FRACTION
    return fixed_point.inverse(unit, scale[:, : -self.shared], divide)

  def code(self, x: Array, factor: Array, lane: Lane, limit: Any = None) -> Array:
    """Returns codes of one plane, by lines in ``limit``; they count from the lowest."""
    most = jnp.uint32((2 * self.shared - 1) << (fixed_point.FRACTION - 1))
    fixed = jnp.minimum(coordinate(jnp.abs(x) * factor, limit), most)
    return fixed_point.rounded(jnp.where(x < 0, most - fixed, most + fixed), lane)

  def value(self, codes: Array, scale: Array, *levels: Array) -> Array:
    """Returns the values of codes, which count levels from the lowest one."""
    codes = codes.astype(jnp.int32)
    negative = codes < self.shared
    number = jnp.where(negative, self.shared - 1 - codes, codes - self.shared)
    level = levels[0]
    for i, other in enumerate(levels[1:], start=1):
      level = jnp.where(number >= i, other, level)
    sign = jnp.where(negative, jnp.uint32(1 << 31), jnp.uint32(0))
    return fixed_point.signed(level * scale, sign)


def encode_rows(
  x: Array,
  scale: Array,
  dither: Array | None,
  levels: Array,
  *,
  form: Form,
  implementation: Any = None,
) -> Encoded:
  """Encodes an array as rows of words, scales and levels, by XLA only."""
  # Lines lead from magnitudes to coordinates, which count codes from zero.
  places = (levels * BINS).astype(jnp.int32)
  unit = 1 << fixed_point.FRACTION
  lines = [Line(np.float32(0), np.float32(BINS // 2) / places[0], np.int32(0))]
  for i in range(levels.size - 1):
    distance = places[i + 1] - places[i]
    offset = i * unit + unit // 2 - places[i] * unit // distance
    lines.append(Line(levels[i] * unit, np.float32(BINS) / distance, offset))
  each = jnp.broadcast_to(levels, (len(scale), form.shared))
  numbers = jnp.concatenate([scale, each], axis=1)
  return encode_reference(x, numbers, dither, lines, form=form)
