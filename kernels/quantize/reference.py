"""Rounds elements to codes under scales and packs them over planes, in jnp."""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common import fixed_point, planes
from gradcomp._src.kernels.common.fixed_point import Divide, Lane, divide
from gradcomp._src.kernels.common.scales import bucket_norms, scales
from gradcomp._src.kernels.gpu.tiles import Encoded, Operand


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledForm(abc.ABC):
  """The static options of an encoder, and the rule for one plane of a tile."""

  bits: int  # the width of a code
  bucket_size: int  # elements a bucket, B
  inline: bool = True  # whether the scales follow the words of a row
  keep: bool = False  # whether to return the residual; scales are then inline

  # The values of the lowest 7 bits of a code, if a table has them: float32[128].
  table: tuple[float, ...] = ()

  name: ClassVar[str]

  @property
  def shared(self) -> int:
    """The number of a row's numbers for all its codes, which follow the scales."""
    return 0

  @property
  def planes(self) -> int:
    """The number of codes in a word, and of buckets in a tile."""
    return planes.planes_per_word(self.bits)

  def unit(self, scale: Array) -> Array:
    """Returns the scale that travels, from the largest magnitude of a bucket."""
    return scale

  @property
  def top(self) -> int:
    """The largest distance from zero in fixed point, which scales stand for."""
    return 1 << fixed_point.FRACTION

  def factor(self, scale: Array, divide: Divide = divide) -> Array:
    """Returns the factor from values to fixed point."""
    return fixed_point.top_multiplier(self.top, scale, divide)

  @abc.abstractmethod
  def code(self, x: Array, factor: Array, lane: Lane, limit: Operand = None) -> Array:
    """Returns the codes of one plane, ``uint32`` like ``x``; ``limit`` clips it."""

  def pack(self, codes: Iterable[Array]) -> Array:
    """Packs one array of codes a plane, or of the first ones: ``uint32[rows, B]``."""
    return planes.pack_planes(codes, self.bits)

  def value(self, codes: Array, scale: Array, *shared: Array) -> Array:
    """Returns the values of codes; last come shared numbers, or a table's entries."""
    raise NotImplementedError


def encode_rows(
  x: Array,
  scale: Operand,
  dither: Operand,
  limit: Any = None,
  *,
  form: ScaledForm,
  first_row: int = 0,
) -> Encoded:
  """Encodes an array as rows, ``uint32[rows, B + scales]``, with its residual."""
  # Scales are `float32[rows, 1]` or `[rows, P]`; None for each bucket's largest
  # magnitude. The dither is `uint32[3]`, None to round to nearest. A limit,
  # `float32[]`, clips magnitudes; fitted levels have their lines in its place.
  if scale is None:
    scale = form.unit(scales(bucket_norms(x, form.planes, form.bucket_size, "max")))
  rows = []
  for tiles in planes.tile_segments(x, form.planes, form.bucket_size):
    own = tiles.rows_of(scale)
    factor = jnp.broadcast_to(form.factor(own), (tiles.shape[0], form.planes))
    factors = lax.split(factor, [1] * form.planes, axis=1)
    each = zip(tiles.planes, factors, tiles.lanes(dither, first_row), strict=True)
    codes = [form.code(*given, limit) for given in each]
    rows.append([form.pack(codes), *[planes.float_words(own)] * form.inline])
  words = planes.stacked(rows, form.bucket_size + form.inline * scale.shape[1])
  if not form.keep:
    return words, None
  return words, planes.less(x, decode_rows(words, form))


def decode_rows(rows: Array, form: ScaledForm) -> Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, P, B]``."""
  size = form.bucket_size
  codes = planes.unpack_planes(lax.slice_in_dim(rows, 0, size, axis=-1), form.bits)
  numbers = planes.floats(lax.slice_in_dim(rows, size, None, axis=-1))[..., None]
  if form.table:
    entry = jnp.asarray(form.table, jnp.float32)[codes.astype(jnp.int32) & 127]
    return form.value(codes, numbers, entry)
  start, stop = numbers.shape[-2] - form.shared, numbers.shape[-2]
  shared = (numbers[..., i : i + 1, :] for i in range(start, stop))
  return form.value(codes, numbers[..., :start, :], *shared)


# A coordinate is the number of the level below a value, plus the share of the way to
# the next level. Rounding it rounds the value, and searches no table.
class Line(NamedTuple):
  """A line to coordinates ``trunc(t * slope) + offset``, in units of ``2**-16``."""

  start: Array | np.float32  # the smallest value on the line
  slope: Array | np.float32
  offset: Array | np.int32


def coordinate(t: Array, lines: Sequence[Line]) -> Array:
  """Returns the coordinates of values of zero or more, ``uint32``, without a clamp."""
  slope = jnp.full_like(t, lines[0].slope)
  offset = jnp.full(t.shape, lines[0].offset)
  for line in lines[1:]:
    reached = t >= line.start
    slope = jnp.where(reached, line.slope, slope)
    offset = jnp.where(reached, line.offset, offset)
  return ((t * slope).astype(jnp.int32) + offset).astype(jnp.uint32)
