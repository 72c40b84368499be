"""Scales, levels and checked options that quantizing codecs share."""

import abc
import dataclasses
import functools
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs.protocol import Codec, as_float32
from gradcomp._src.codecs.sums import tiles
from gradcomp._src.codecs.sums.codes import Codes
from gradcomp._src.codecs.sums.records import Context, Encoded, Rounding
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.kernels import quantize, rules
from gradcomp._src.kernels.common import scales
from gradcomp._src.kernels.gpu import dispatch

ROTATE = checks.optional(
  checks.integer("8, 32, or None to rotate nothing", such=(8, 32).__contains__)
)

TENSOR_ROW = 512  # words of codes in a row when the whole tensor is one bucket


def scales_of(
  x: Array, planes: int, bucket_size: int | None, norm: scales.Norm = "max"
) -> Array:
  """Returns norms of buckets, ``[rows, P]``, a flat leaf, ``[1, 1]``, or tiles."""
  if bucket_size is not None:
    return scales.bucket_norms(x, planes=planes, bucket_size=bucket_size, norm=norm)
  if x.ndim == 1:
    return scales.tensor_norm(x, norm).reshape(1, 1)
  return scales.norms(x.reshape(x.shape[0], -1), norm)[:, None]


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
    return dataclasses.replace(self, rounding="nearest")  # type: ignore[type-var]

  def encode_leaf(self, x: Array, context: Context, *, keep: bool = False) -> Encoded:
    """Encodes a leaf without filling its last tile first."""
    return Encoded(self.encode_rows(as_float32(x), context))


class ByKernel(Codec):
  """A base of codecs that an operation of kernels encodes and decodes."""

  implementation: dispatch.Implementation | None
  operation: Any  # its module

  @property
  @abc.abstractmethod
  def form(self) -> Any:
    """The options of the operation."""

  @property
  def tile_size(self) -> int:
    return self.form.planes * self.form.bucket_size

  @property
  def row_words(self) -> int:
    return self.form.row_words

  def encode_leaf(self, x: Array, context: Context, *, keep: bool = False) -> Encoded:
    form, by = dataclasses.replace(self.form, keep=keep), self.implementation
    wide = as_float32(x).reshape(x.shape)
    return Encoded(*self.operation.encode_rows(wide, form=form, implementation=by))

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    return self.encode_leaf(tiles.reshape(-1), context).rows

  def decode_rows(self, rows: Array) -> Array:
    form, by = self.form, self.implementation
    return self.operation.decode_rows(rows, form=form, implementation=by)


class Elementwise(RoundsAtRandom, ByKernel):
  """A base of codecs that round each element by a kernel, most of them under scales."""

  bucket_size: int | None

  @property
  def row_words(self) -> int:
    form = self.form
    count = 1 if self.bucket_size is None else form.planes
    return form.bucket_size + form.inline * count + form.shared

  def scales_for(self, x: Array) -> Array | None:
    """Returns scales of a leaf or of tiles; None where the encoder finds them."""
    return scales.scales(scales_of(x, self.form.planes, self.bucket_size))

  def encode_leaf(self, x: Array, context: Context, *, keep: bool = False) -> Encoded:
    flat, scale = self.filled(as_float32(x)), context.agreed
    if scale is None:
      scale = self.scales_for(flat)
    return self.encode_by(scale, flat, context)

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    return self.encode_by(self.scales_for(tiles), tiles, context).rows

  def encode_by(
    self,
    scale: Array | None,
    x: Array,
    context: Context,
    *more: Any,
    keep: bool = False,
  ) -> Encoded:
    """Encodes elements by scales, ``float32[1 or rows, 1 or P]``, and ``more``."""
    if scale is not None:
      rows = -(-x.size // self.tile_size)
      scale = jnp.broadcast_to(scale, (rows, scale.shape[1]))
    form = dataclasses.replace(self.form, keep=True) if keep else self.form
    dither, by = context.drawn if self.needs_key else None, self.implementation
    given = x, scale, dither, *more
    return Encoded(*self.operation.encode_rows(*given, form=form, implementation=by))


class Levels(Elementwise):
  """A base of codecs of levels under scales, which the common kernel decodes."""

  def decode_rows(self, rows: Array) -> Array:
    return quantize.decode_reference(rows, self.form)

  def sum_rows(self, rows: Array) -> Array:
    if len(rows) > 1:
      return tiles.sum_in_order(self.decode_rows, rows)  # a frame less than by super
    form, by = self.form, self.implementation
    return quantize.decode_rows(rows[0], form=form, implementation=by)


class SharedScales(Codec):
  """A base of codecs with codes that add up as integers once scales are shared."""

  share_scale: bool

  @functools.cached_property
  def sums(self) -> Sum:
    return Codes(self) if self.share_scale else tiles.Tiles(self)

  @property
  @abc.abstractmethod
  def max_code(self) -> int:
    """The largest magnitude of a code."""

  @abc.abstractmethod
  def leaf_statistics(self, x: Array) -> tuple[Array, Any]:
    """Returns scales, or NaN, ``float32[rows, k]`` or ``[1, 1]``, and the rest."""

  def agree(self, x: Array) -> Array | None:
    return self.statistics(x)[0]

  def statistics(self, x: Array) -> tuple[Array | None, Any]:
    return self.leaf_statistics(x) if self.share_scale else (None, None)

  @abc.abstractmethod
  def codes(self, rows: Array) -> Array:
    """Unpacks ``uint32[..., rows, words]`` to codes, ``int32[..., rows, P, B]``."""

  def from_codes(self, codes: Array, agreed: Array) -> Array:
    """Returns the values of codes, or of sums of codes: ``float32[rows, P, B]``."""
    return rules.from_signed_codes(codes, agreed, self.max_code)
