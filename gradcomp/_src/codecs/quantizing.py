"""Scales, levels and checked options that quantizing codecs share."""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, Literal, Self

import jax
import numpy as np

from gradcomp._src.checks import static_integer, step_count
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.codes import Codes
from gradcomp._src.codecs.sums.records import (
  Context,
  Fit,
  Leaf,
  Memory,
  Payload,
  Rounding,
)
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.codecs.sums.tiles import Tiles
from gradcomp._src.codecs.tiles import as_float32
from gradcomp._src.kernels.common import fitted_levels, planes, rotation
from gradcomp._src.kernels.common.planes import planes_per_word
from gradcomp._src.kernels.common.scales import (
  Norm,
  bucket_norms,
  norms,
  scales,
  tensor_norm,
)

_TENSOR_ROW = 512  # words in a row when the whole tensor is one bucket


def bucket_words(bucket_size: int | None) -> int:
  """Returns the words of codes in a row: the elements of a bucket."""
  return _TENSOR_ROW if bucket_size is None else bucket_size


def leaf_scales(
  flat: jax.Array, planes: int, bucket_size: int | None, norm: Norm = "max"
) -> jax.Array:
  """Returns the norms of a leaf: ``float32[1, 1]``, or ``[rows, P]`` of its buckets."""
  if bucket_size is None:
    return tensor_norm(flat, norm).reshape(1, 1)
  return bucket_norms(flat, planes, bucket_size, norm)


def row_scales(
  tiles: jax.Array, planes: int, bucket_size: int | None, norm: Norm = "max"
) -> jax.Array:
  """Returns the norms of each tile by itself: ``float32[rows, 1]`` or ``[rows, P]``."""
  if bucket_size is None:
    return norms(tiles.reshape(tiles.shape[0], -1), norm)[:, None]
  return bucket_norms(tiles.reshape(-1), planes, bucket_size, norm)


class RoundsAtRandom:
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


class SharedScales(Codec):
  """A base of codecs with codes that add up as integers once scales are shared.

  Before anyone encodes, the exchange takes the largest result of :meth:`agree` over all
  workers. Rows then hold only codes.
  """

  share_scale: bool

  @property
  def sums(self) -> Sum:
    return Codes(self) if self.share_scale else Tiles(self)

  @property
  @abc.abstractmethod
  def max_code(self) -> int:
    """The largest magnitude of a code."""

  @abc.abstractmethod
  def leaf_statistics(self, x: jax.Array) -> jax.Array:
    """Returns a leaf's statistics: zero or more, or NaN.

    They are ``float32[rows, k]``, or ``float32[1, 1]`` for all rows.
    """

  def agree(self, x: jax.Array) -> jax.Array | None:
    """Returns a leaf's statistics if workers share them."""
    return _statistics(self, x) if self.share_scale else None

  @abc.abstractmethod
  def codes(self, rows: jax.Array) -> jax.Array:
    """Unpacks ``uint32[..., rows, words]`` to codes, ``int32[..., rows, P, B]``."""

  @abc.abstractmethod
  def from_codes(self, codes: jax.Array, agreed: jax.Array) -> jax.Array:
    """Returns the values of codes, or of sums of codes: ``float32[rows, P, B]``."""

  def payload_tiles(self, payload: Payload) -> jax.Array:
    """Decodes a payload to tiles, by the statistics in it if workers share them."""
    if payload.agreed is None:
      return self.decode_rows(payload.rows)
    return self.from_codes(self.codes(payload.rows), payload.agreed)


@functools.partial(jax.jit, static_argnums=0)
def _statistics(codec: SharedScales, x: jax.Array) -> jax.Array:
  """Computes a leaf's statistics; jitted, so that each shape is traced once."""
  return codec.leaf_statistics(x)


ScaleNorm = Literal["max", "l2", "rms"]
Levels = Literal["sign_magnitude", "uniform", "nonuniform"]

_BITS_RULE = "1 to 8 or 16"
_ROTATE_RULE = "8, 32, or None to rotate nothing"


def checked_bits(value: int, levels: Levels) -> int:
  """Returns the width of a code; ValueError for all that no code can have."""
  bits = static_integer("bits", _BITS_RULE, value)
  if bits not in (1, 2, 3, 4, 5, 6, 7, 8, 16):
    raise ValueError(f"`bits` must be {_BITS_RULE}, got {bits}.")
  if bits == 1 and levels == "sign_magnitude":
    raise ValueError(
      '`bits` must be at least 2 with levels="sign_magnitude", which spends one bit '
      'on the sign, got 1; use levels="uniform".'
    )
  return bits


def checked_refit_every(value: int) -> int:
  """Returns the steps from one fit of levels to the next; ValueError for all else."""
  return step_count("refit_every", value)


def checked_rotate(value: int | None, bits: int, levels: Levels) -> int | None:
  """Returns the elements of a group that is rotated, or None; ValueError for others."""
  if value is None:
    return None
  size = static_integer("rotate", _ROTATE_RULE, value)
  if size not in (8, 32):
    raise ValueError(f"`rotate` must be {_ROTATE_RULE}, got {size}.")
  if bits not in (1, 2, 4):
    raise ValueError(
      f"`bits` must be 1, 2 or 4 with rotate={size}, got {bits}; only their words hold "
      "a multiple of 8 codes, across which groups lie."
    )
  if levels == "nonuniform":
    raise ValueError(
      f'`rotate` must be None with levels="nonuniform", got {size}; rotated elements '
      'are nearly Gaussian, for which norm="rms" has the levels.'
    )
  return size


def check_levels(
  bits: int, norm: ScaleNorm, levels: Levels, bucket_size: int | None, share_scale: bool
) -> None:
  """Raises ValueError for hyperparameters that do not go together."""
  if levels == "nonuniform":
    _check_fitted(bits, norm, share_scale)
  if norm == "rms":
    _check_clipped(bits, levels, bucket_size)


def _check_fitted(bits: int, norm: ScaleNorm, share_scale: bool) -> None:
  """Raises ValueError for hyperparameters with which levels cannot be fitted."""
  if bits not in (2, 3, 4):
    raise ValueError(
      f'`bits` must be 2, 3 or 4 with levels="nonuniform", got {bits}; more '
      'levels than that gain nothing over levels="uniform".'
    )
  if norm != "max":
    raise ValueError(f'`norm` must be "max" with levels="nonuniform", got {norm!r}.')
  if share_scale:
    raise ValueError(
      '`share_scale` must be False with levels="nonuniform", whose codes cannot be '
      "added, got True."
    )


def _check_clipped(bits: int, levels: Levels, bucket_size: int | None) -> None:
  """Raises ValueError for hyperparameters that ``norm="rms"`` has no steps for."""
  if levels != "uniform":
    raise ValueError(
      '`levels` must be "uniform" with norm="rms", whose steps are those of levels '
      f"beside zero, got {levels!r}."
    )
  if bits > 4:
    raise ValueError(
      f'`bits` must be 1 to 4 with norm="rms", got {bits}; with more levels nothing '
      'needs to be clipped, so use norm="max".'
    )
  if bucket_size is None:
    raise ValueError(
      '`bucket_size` must be a number with norm="rms", got None; parts of a tensor '
      "that are larger than others would be clipped in every step."
    )


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


class BucketCodec(RoundsAtRandom, SharedScales):
  """A base of codecs of few levels, with a scale for each bucket or tensor.

  Levels may be fitted to the gradients of all workers, and tiles may be rotated.
  """

  bits: int
  bucket_size: int | None
  norm: ScaleNorm
  levels: Levels
  rotate: int | None
  refit_every: int

  most_counted: ClassVar[int] = fitted_levels.MOST_COUNTED

  @property
  def fits(self) -> Fit | None:
    """The fits of levels, if they are ``"nonuniform"``."""
    if self.levels != "nonuniform":
      return None
    return Fit(self.refit_every, self.most_counted, self.measure, fitted_levels.fit)

  def init(self, leaf: Leaf | None = None, key: jax.Array | None = None) -> Memory:
    """Returns equally spaced levels above zero, or no state if none are fitted."""
    del leaf, key
    return Memory(fitted_levels.first_levels(self.bits)) if self.fits else Memory()

  def measure(self, x: jax.Array) -> jax.Array:
    """Counts normalized magnitudes in a sample of buckets: ``int32[256]``."""
    flat = as_float32(x)
    return fitted_levels.histogram(
      flat,
      bucket_size=bucket_words(self.bucket_size),
      scale=None if self.bucket_size else scales(tensor_norm(flat, "max")),
      norm="max",
    )

  def levels_for(self, flat: jax.Array, context: Context) -> jax.Array | None:
    """Returns the levels of the codec state; without one those for a flat leaf."""
    if not self.fits:
      return None
    if context.memory is not None and len(context.memory.shared):
      return context.memory.shared
    return fitted_levels.fit(self.measure(flat), self.init().shared)

  def filled(self, x: jax.Array) -> jax.Array:
    """For ``norm="rms"``, fills the last bucket with copies of its elements."""
    if self.norm != "rms" or self.bucket_size is None:
      return x
    return planes.filled(x.reshape(-1), self.bucket_size)

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

  def rotated(self, tiles: jax.Array) -> jax.Array:
    """Rotates tiles, ``float32[rows, tile_size]``, if ``rotate`` is a number."""
    if self.rotate is None:
      return tiles
    return rotation.rotate(self._planes(tiles), self.rotate).reshape(tiles.shape)

  def unrotated(self, tiles: jax.Array) -> jax.Array:
    """Undoes :meth:`rotated` for tiles, or sums of tiles, of one or two axes each."""
    if self.rotate is None:
      return tiles
    return rotation.unrotate(self._planes(tiles), self.rotate).reshape(tiles.shape)

  def _planes(self, tiles: jax.Array) -> jax.Array:
    """Returns tiles as planes: ``float32[rows, P, B]``."""
    shape = (planes_per_word(self.bits), bucket_words(self.bucket_size))
    return tiles.reshape(tiles.shape[0], *shape)
