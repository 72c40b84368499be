"""Scales, levels and checked options that quantizing codecs share."""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, Literal, Self

import jax
import numpy as np
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.codes import Codes
from gradcomp._src.codecs.sums.records import (
  Context,
  Encoded,
  Fit,
  Leaf,
  Memory,
  Payload,
  Rounding,
)
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.codecs.sums.tiles import Tiles
from gradcomp._src.codecs.tiles import as_float32
from gradcomp._src.kernels.common import fitted_levels, planes, rotation, scales
from gradcomp._src.kernels.gpu.dispatch import Implementation
from gradcomp._src.kernels.quantize.qsgd import from_signed_codes

_TENSOR_ROW = 512  # words in a row when the whole tensor is one bucket


def bucket_words(bucket_size: int | None) -> int:
  """Returns the words of codes in a row: the elements of a bucket."""
  return _TENSOR_ROW if bucket_size is None else bucket_size


def leaf_scales(
  flat: Array, planes: int, bucket_size: int | None, norm: scales.Norm = "max"
) -> Array:
  """Returns the norms of a leaf: ``float32[1, 1]``, or ``[rows, P]`` of its buckets."""
  if bucket_size is None:
    return scales.tensor_norm(flat, norm).reshape(1, 1)
  return scales.bucket_norms(flat, planes, bucket_size, norm)


def row_scales(
  tiles: Array, planes: int, bucket_size: int | None, norm: scales.Norm = "max"
) -> Array:
  """Returns the norms of each tile by itself: ``float32[rows, 1]`` or ``[rows, P]``."""
  if bucket_size is None:
    return scales.norms(tiles.reshape(tiles.shape[0], -1), norm)[:, None]
  return scales.bucket_norms(tiles, planes, bucket_size, norm)


class RoundsAtRandom(Codec):
  """A base of codecs that are unbiased unless they round to nearest."""

  rounding: Rounding

  @property
  def unbiased(self) -> bool:
    return self.rounding == "stochastic"

  @property
  def needs_key(self) -> bool:
    return self.rounding == "stochastic"

  def to_nearest(self) -> Self:
    """Returns the codec that rounds to nearest."""
    return dataclasses.replace(self, rounding="nearest")  # type: ignore[type-var]

  def encode_leaf(self, x: Array, context: Context, *, keep: bool = False) -> Encoded:
    """Encodes a leaf without filling its last tile first."""
    return Encoded(self.encode_rows(as_float32(x), context))


class SharedScales(Codec):
  """A base of codecs with codes that add up as integers once scales are shared."""

  share_scale: bool

  @property
  def sums(self) -> Sum:
    return Codes(self) if self.share_scale else Tiles(self)

  @property
  @abc.abstractmethod
  def max_code(self) -> int:
    """The largest magnitude of a code."""

  @abc.abstractmethod
  def leaf_statistics(self, x: Array) -> Array:
    """Returns statistics, zero or more, or NaN: ``float32[rows, k]`` or ``[1, 1]``."""

  def agree(self, x: Array) -> Array | None:
    """Returns a leaf's statistics if workers share them."""
    return self._statistics(x) if self.share_scale else None

  @functools.partial(jax.jit, static_argnums=0)  # each shape is traced once
  def _statistics(self, x: Array) -> Array:
    return self.leaf_statistics(x)

  @abc.abstractmethod
  def codes(self, rows: Array) -> Array:
    """Unpacks ``uint32[..., rows, words]`` to codes, ``int32[..., rows, P, B]``."""

  def from_codes(self, codes: Array, agreed: Array) -> Array:
    """Returns the values of codes, or of sums of codes: ``float32[rows, P, B]``."""
    return from_signed_codes(codes, agreed, self.max_code)

  def payload_tiles(self, payload: Payload) -> Array:
    if payload.agreed is None:
      return self.decode_rows(payload.rows)
    return self.from_codes(self.codes(payload.rows), payload.agreed)


ScaleNorm = Literal["max", "l2", "rms"]
Levels = Literal["sign_magnitude", "uniform", "nonuniform"]

BITS = checks.integer("1 to 8 or 16", such=(*range(1, 9), 16).__contains__)
ROTATE = checks.optional(
  checks.integer("8, 32, or None to rotate nothing", such=(8, 32).__contains__)
)

# The distance of 2, 4, 8 and 16 equally spaced levels, half of them on each side of
# zero, that has the least squared error for Gaussian numbers of variance 1.
_STEPS = {1: 1.596, 2: 0.996, 3: 0.586, 4: 0.335}


class BucketCodec(RoundsAtRandom, SharedScales):
  """A base of codecs of few levels, with a scale for each bucket or tensor."""

  bits: int
  bucket_size: int | None
  norm: ScaleNorm
  levels: Levels
  rotate: int | None
  refit_every: int
  implementation: Implementation | None

  most_counted: ClassVar[int] = fitted_levels.MOST_COUNTED

  @property
  def _words(self) -> int:
    return bucket_words(self.bucket_size)

  def check_levels(self) -> None:
    """Raises ValueError for hyperparameters that do not go together."""
    bits, norm, levels = self.bits, self.norm, self.levels
    fitted, clipped = levels == "nonuniform", norm == "rms"
    if bits == 1 and levels == "sign_magnitude":
      raise ValueError(
        '`bits` must be at least 2 with levels="sign_magnitude", which spends one bit '
        'on the sign, got 1; use levels="uniform".'
      )
    if self.rotate and bits not in (1, 2, 4):
      raise ValueError(
        f"`bits` must be 1, 2 or 4 with rotate={self.rotate}, got {bits}; only their "
        "words hold a multiple of 8 codes, across which groups lie."
      )
    if self.rotate and fitted:
      raise ValueError(
        f'`rotate` must be None with levels="nonuniform", got {self.rotate}; rotated '
        'elements are nearly Gaussian, for which norm="rms" has the levels.'
      )
    if fitted and bits not in (2, 3, 4):
      raise ValueError(
        f'`bits` must be 2, 3 or 4 with levels="nonuniform", got {bits}; more '
        'levels than that gain nothing over levels="uniform".'
      )
    if fitted and norm != "max":
      raise ValueError(f'`norm` must be "max" with levels="nonuniform", got {norm!r}.')
    if fitted and self.share_scale:
      raise ValueError(
        '`share_scale` must be False with levels="nonuniform", whose codes cannot be '
        "added, got True."
      )
    if clipped and levels != "uniform":
      raise ValueError(
        '`levels` must be "uniform" with norm="rms", whose steps are those of levels '
        f"beside zero, got {levels!r}."
      )
    if clipped and bits > 4:
      raise ValueError(
        f'`bits` must be 1 to 4 with norm="rms", got {bits}; with more levels nothing '
        'needs to be clipped, so use norm="max".'
      )
    if clipped and self.bucket_size is None:
      raise ValueError(
        '`bucket_size` must be a number with norm="rms", got None; parts of a tensor '
        "that are larger than others would be clipped in every step."
      )

  @property
  def fits(self) -> Fit | None:
    """The fits of levels, if they are ``"nonuniform"``."""
    if self.levels != "nonuniform":
      return None
    return Fit(self.refit_every, self.most_counted, self.measure, fitted_levels.fit)

  def init(self, leaf: Leaf | None = None, key: Array | None = None) -> Memory:
    """Returns equally spaced levels above zero, or no state if none are fitted."""
    return Memory(fitted_levels.first_levels(self.bits)) if self.fits else Memory()

  def measure(self, x: Array) -> Array:
    """Counts normalized magnitudes in a sample of buckets: ``int32[256]``."""
    flat, words = as_float32(x), self._words
    scale = None if self.bucket_size else scales.scales(scales.tensor_norm(flat, "max"))
    return fitted_levels.histogram(flat, bucket_size=words, scale=scale)

  def levels_for(self, x: Array, context: Context) -> Array | None:
    """Returns the levels of the codec state; without one those for a leaf."""
    if not self.fits:
      return None
    if context.memory is not None and len(context.memory.shared):
      return context.memory.shared
    return fitted_levels.fit(self.measure(x), self.init().shared)

  def filled(self, x: Array) -> Array:
    """For ``norm="rms"``, fills the last bucket with copies of its elements."""
    if self.norm != "rms" or self.bucket_size is None:
      return x
    return planes.filled(x.reshape(-1), self.bucket_size)

  def scales_by(self, measure: Callable[..., Array], x: Array) -> Array:
    """Returns the scales that :func:`leaf_scales` or :func:`row_scales` measure."""
    count = planes.planes_per_word(self.bits)
    if self.norm != "rms":
      return scales.scales(measure(x, count, self.bucket_size, self.norm))
    assert self.bucket_size is not None
    lengths = measure(x, count, self.bucket_size, "l2")
    outermost = (2**self.bits - 1) / 2 * _STEPS[self.bits]  # for a mean square of 1
    return scales.scales(lengths * np.float32(outermost / math.sqrt(self.bucket_size)))

  def rotated(self, tiles: Array) -> Array:
    """Rotates tiles, ``float32[rows, tile_size]``, if ``rotate`` is a number."""
    count, by = planes.planes_per_word(self.bits), self.implementation
    return rotation.rotate(tiles, count, self.rotate, by)

  def unrotated(self, tiles: Array) -> Array:
    count, by = planes.planes_per_word(self.bits), self.implementation
    return rotation.unrotate(tiles, count, self.rotate, by)
