"""Dense: the codec that sends all elements as floats of 32 or 16 bits."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from gradcomp._src import checks
from gradcomp._src.codecs import contractions, quantizing
from gradcomp._src.codecs.sums.records import Context, Rounding
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.codecs.sums.tiles import Floats
from gradcomp._src.floats.dtypes import limit_of
from gradcomp._src.kernels.common import dithers, float_codes, planes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(quantizing.RoundsAtRandom):
  r"""Sends all elements as floats, bitcast to words: the baseline.

  .. math:: Q(v_i) = \mathrm{cast}(v_i)

  A payload has 32 or 16 bits an element, in rows of 128 words. ``float32`` is exact.
  NaN and infinities stay as they are. A number that is half a step or more above the
  largest becomes infinite: in ``float16`` 65520 and above.

  16 bits are rounded to nearest even, which is biased, or at random to one of the two
  neighbors :math:`a \le |v| < b`, which is unbiased and needs no residual:

  .. math:: P(|Q(v)| = b) = \frac{|v| - a}{b - a}

  The 16 random bits make this exact for ``bfloat16``, which drops 16 bits, and for
  ``float16`` from 2**-17 on. Below, a mean is short by less than 2**-40, and below
  2**-40 all elements become zero.

  ``encode`` rounds float64 to these. Exchanges of ``Dense()`` add float64 gradients as
  they are: see :func:`gradcomp.dense`.

  Attributes:
    dtype: the type of elements on the wire: ``float32``, ``bfloat16`` or ``float16``.
      Default: ``float32``.
    rounding: ``"nearest"``, or ``"stochastic"`` with 16 bits. Default: ``"nearest"``.

  Raises:
    ValueError: ``dtype`` or ``rounding`` is another one, or ``float32`` is rounded at
      random.

  Example:
    >>> codec = Dense(dtype=jnp.bfloat16)
    >>> x = jnp.array([1.0, 1.001])
    >>> codec.decode(codec.encode(x), like=x)
    Array([1., 1.], dtype=float32)
  """

  dtype: DTypeLike = checks.field(jnp.float32, checks.FLOAT_DTYPE)
  rounding: Rounding = checks.field("nearest", checks.choice(Rounding))

  row_words: ClassVar[int] = 128  # few, because small leaves fill rows badly

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.rounding == "stochastic" and self._bits == 32:
      raise ValueError(
        '`rounding` must be "nearest" with float32, which is not rounded, got '
        '"stochastic"; choose bfloat16 or float16.'
      )

  @property
  def unbiased(self) -> bool:
    return self._bits == 32 or super().unbiased

  @property
  def contraction(self) -> float:
    step = float(jnp.finfo(self.dtype).eps)
    lost = 0.0 if self._bits == 32 else contractions.of_floats(step, self.rounding)
    return contractions.of_energy(lost)

  @property
  def largest(self) -> float | None:
    return limit_of(self.dtype)

  @property
  def sums(self) -> Sum:
    return Floats(self) if self._bits == 32 else super().sums

  @property
  def tile_size(self) -> int:
    return self.row_words * planes.planes_per_word(self._bits)

  @property
  def _bits(self) -> int:
    return 8 * np.dtype(self.dtype).itemsize

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    dither = context.drawn if self.needs_key else None
    count = planes.planes_per_word(self._bits)
    rows = []
    for part in planes.tile_segments(tiles, count, self.row_words):
      if dither is None:
        codes = [self._nearest(plane) for plane in part.planes]
      else:
        codes = list(map(self._stochastic, part.planes, part.lanes(dither)))
      rows.append([planes.pack_planes(codes, self._bits)])
    return planes.stacked(rows, self.row_words)

  def decode_rows(self, rows: Array) -> Array:
    codes = planes.unpack_planes(rows, self._bits)
    if self._bits == 16:
      codes = codes.astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(codes, self.dtype).astype(jnp.float32)

  def _nearest(self, plane: Array) -> Array:
    unsigned = jnp.uint32 if self._bits == 32 else jnp.uint16
    code = jax.lax.bitcast_convert_type(plane.astype(self.dtype), unsigned)
    return code.astype(jnp.uint32)

  def _stochastic(self, plane: Array, lane: Array) -> Array:
    """Rounds by 16 random bits; gives infinity only where rounding to nearest does."""
    info = jnp.finfo(self.dtype)
    fmt = float_codes.FloatFormat(info.nexp, info.nmant)
    halfway = fmt.max_finite + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)
    infinity = jnp.copysign(jnp.float32(jnp.inf), plane)
    given = jnp.where(jnp.abs(plane) >= halfway, infinity, plane)
    draw = dithers.signed_lane(lane, plane) << 16
    return float_codes.to_codes(given, fmt, rounding=draw, saturate=True)
