"""FloatCast: the codec of floats of few bits, scaled by leaf or by a constant."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs import contractions
from gradcomp._src.codecs.protocol import Codec, as_float32
from gradcomp._src.codecs.sums import records
from gradcomp._src.codecs.sums.sum import Partial, RowDecoder, Sent, Sum, SumFacts
from gradcomp._src.codecs.sums.tiles import UNROLLED, in_order
from gradcomp._src.floats.arithmetic import kahan_step, rounded_sum
from gradcomp._src.kernels import float_cast
from gradcomp._src.kernels.common import float_codes, planes, scales
from gradcomp._src.kernels.common.fixed_point import scaled
from gradcomp._src.kernels.common.float_codes import FloatRounding
from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.materialize import materialized, packed, slice_at, starts


def _scale(name: str, value: Any) -> Any:
  rule = 'a number from 2**-126 to 2**126, or "auto"'
  return value if value == "auto" else checks.static_factor(name, rule, value)


_SCALE = checks.Rule(_scale, outside=(0, 2.0**127, "none"))


_FACTS = SumFacts(
  in_format=True,
  refusals={
    "reduced": "a codec that adds in its own format, as no backend does, got {codec}; "
    'use exchange="auto", "two_shot" or "ring".'
  },
)


@dataclasses.dataclass(frozen=True)
class Numbers(Sum):
  """Adds scaled numbers, ``float32[rows, P, B]``, and rounds sums to their format."""

  codec: "FloatCast"

  @property
  def facts(self) -> SumFacts:
    return dataclasses.replace(_FACTS, rounds=self.codec.accumulate == "format")

  @property
  def _rounds(self) -> bool:
    return self.codec.accumulate != "float32"

  @property
  def rider_words(self) -> int:
    return self.codec.row_words if self.codec.accumulate == "kahan" else 0

  def unpacked(self, rows: Array) -> Array:
    return self.codec.decode_rows(rows)

  def gathered(self, rows: Array, agreed: Array | None, scale: float) -> RowDecoder:
    return self._decoder(rows, agreed, scale)

  def gathered_loss(self, rows: Array, agreed: Array | None, own: Array) -> RowDecoder:
    # Every worker does all additions, and keeps the loss of adding its own numbers.
    return self._decoder(rows, agreed, 1.0, own)

  def start(self, own: Array, context: records.Context, *, keep: bool) -> Sent:
    return Sent(own, (jnp.zeros_like(own),) if self.codec.accumulate == "kahan" else ())

  def add(self, received: Sent, own: Array, *, keep: bool) -> Partial:
    partial = self._first(self.codec.decode_rows(received.rows), keep=keep)
    for rider in received.riders:
      partial = partial._replace(compensation=self.codec.decode_rows(rider))
    return self._plus(partial, self.codec.decode_rows(own))

  def add_all(self, own: Array, *, keep: bool) -> Partial:
    return self._fold(own, keep)._replace(scale=1.0)  # which jit made an array

  def fold(self, rows: Array, scale: float, *, keep: bool) -> Partial:
    added = materialized(lambda rows: self._fold(rows, keep)[:3], rows)
    return Partial(*added)._replace(scale=scale)

  def send(self, partial: Partial, context: records.Context, *, keep: bool) -> Sent:
    rows = packed(self.codec.encode_sums(partial.total))
    lost = partial.lost
    if lost is not None and not self._rounds:  # a rounded sum encodes exactly
      lost = lost + (partial.total - self.codec.decode_rows(rows))
    compensation = () if partial.compensation is None else (partial.compensation,)
    riders = tuple(map(self.codec.encode_sums, compensation))
    return Sent(rows, riders, lost, scale=partial.scale)

  def read(self, own: Array) -> Array:
    return self.codec.decode_rows(own)

  def loss(self, lost: Array, agreed: Array | None) -> RowDecoder:
    return self._decoder(lost, agreed, 1.0)

  def _first(self, number: Array, *, keep: bool) -> Partial:
    # The zeros have the type of the number: they vary over the axes over which it does.
    zero = jax.lax.full_like(number, 0)
    zeros = jax.lax.select(jax.lax.eq(number, number), zero, zero)
    compensates = self.codec.accumulate == "kahan"
    return Partial(number, zeros if compensates else None, zeros if keep else None)

  def _plus(self, partial: Partial, x: Array, counts: Array | bool = True) -> Partial:
    """Adds one worker's numbers; with ``counts`` this worker keeps the loss."""
    exact = partial.total + x
    if not self._rounds:
      return partial._replace(total=exact)
    total, compensation, lost = partial[:3]
    fmt, saturate = self.codec.format, self.codec.scale == "auto"
    if compensation is None:
      total = rounded_sum(total, x, fmt, saturate=saturate)
    else:
      given = total, compensation, x, fmt
      total, compensation = kahan_step(*given, saturate=saturate)
    if lost is not None:
      lost = lost + jnp.where(counts, exact - total, 0.0)
    return partial._replace(total=total, compensation=compensation, lost=lost)

  @functools.partial(jax.jit, static_argnums=(0, 2))  # leaves of a shape: traced once
  def _fold(self, rows: Array, keep: bool, own: Array | None = None) -> Partial:
    """Adds K payloads in order; with ``own`` keeps only the loss of adding that one."""

    def step(k: Array | int, arrays: tuple) -> tuple:
      kept = True if own is None else k == own
      return self._plus(Partial(*arrays), self.codec.decode_rows(rows[k]), kept)[:3]

    first = self._first(self.codec.decode_rows(rows[0]), keep=keep)
    lost = first.lost
    if lost is not None and own is not None:
      # Workers keep different losses, and a loop needs that in their type at the start.
      lost = jnp.where(own == 0, lost, lost)
    arrays = (first.total, first.compensation, lost)
    # An addition that rounds takes 60 operations. So fewer of them are written out,
    # which bounds the compile time.
    unrolled = 4 if self._rounds else UNROLLED
    return Partial(*in_order(step, rows.shape[0], arrays, unrolled))

  def _decoder(
    self, given: Array, agreed: Array | None, scale: float, own: Array | None = None
  ) -> RowDecoder:
    """Returns the decoder of payloads or losses, which divides them by their scale."""
    rows = given.shape[given.dtype == jnp.uint32]
    at = starts(rows, given if agreed is None else agreed, fused=True)
    return lambda a, b: self._decoded(given, agreed, own, at(a, b), b - a, scale)

  @functools.partial(jax.jit, static_argnums=(0, 5, 6))  # leaves of a shape: once
  def _decoded(
    self,
    given: Array,  # uint32[K, rows, words], or float32[rows, P, B]
    agreed: Array | None,
    own: Array | None,  # the payload to return the loss of adding, alone
    start: Array | int,
    count: int,
    scale: float,
  ) -> Array:
    if given.dtype == jnp.uint32:
      part = slice_at(given, start, count, 1)
      total, _, lost = self._fold(part, own is not None, own)[:3]
      numbers = total if own is None else lost
    else:
      numbers = slice_at(given, start, count)
    assert numbers is not None
    per_word = self.codec.tile_size // self.codec.row_words
    tiles = scaled(numbers, scale).reshape(count, per_word, self.codec.row_words)
    lines = None if agreed is None else slice_at(agreed, start, count)
    return self.codec.unscaled(tiles, lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FloatCast(Codec):
  r"""Casts to an IEEE float of few bits, scaled so that sums just fit: APS.

  With ``scale="auto"``, Auto Precision Scaling, a leaf is multiplied by the largest
  power of two with which no sum of N workers' elements can overflow. The sum is divided
  by it:

  .. math:: Q(g) = 2^{-f} \, \mathrm{cast}(2^f g), \qquad
     f = 2^{e - 1} - 1 - \max_{workers} \lceil \log_2 (N \max_i |g_i|) \rceil

  The workers agree on that exponent, one byte a leaf, before anyone casts. Elements
  underflow that lie more than the format's range below the largest one. A number for
  ``scale`` is the baseline, loss scaling: one constant factor for all leaves, with
  which elements may overflow to infinity.

  Every partial sum is rounded to the format, in every exchange, so that all that
  crosses the wire is in it. The codec is biased. Stochastic rounding makes only the
  cast unbiased: partial sums are rounded to nearest even in any case. A payload has 4,
  8, 16 or 32 bits an element, the fewest that hold 1 + e + m, in rows of 128 words, and
  a byte a leaf.

  With ``"auto"``, a leaf of elements below 2**-126 decodes to zeros. With a constant
  factor each element is by itself: NaN and infinities stay (both are NaN without
  mantissa bits), and a number that is too large becomes infinite.

  The codec departs from the paper in three ways. The byte holds the exponent less
  :math:`\lceil \log_2 N \rceil`, so that it never overflows. A layer of zeros has an
  exponent, where the paper takes the logarithm of zero. A sum that is too large because
  addends were rounded up becomes the largest number; this may happen with stochastic
  rounding, and with ``kahan`` or ``float32`` in formats of two or three exponent bits.

  Attributes:
    exponent_bits: e, bits of the exponent, 1 to 8. Default: 5.
    mantissa_bits: m, bits of the mantissa, 0 to 23; 1 or more with one exponent bit.
      The paper uses (5, 2), (4, 3) and (3, 0). Default: 2.
    rounding: the rule of the cast: ``"nearest_even"``, as in the paper,
      ``"stochastic"`` or ``"toward_zero"``. Default: ``"nearest_even"``.
    scale: ``"auto"``, or a constant factor from 2**-126 to 2**126; 1 is a plain cast.
      Default: ``"auto"``.
    accumulate: how workers' numbers are added. ``"format"`` rounds each partial sum, as
      in the paper. ``"kahan"`` is Kahan's compensated summation in the format; its
      compensation travels around a ring, and doubles the bytes there. ``"float32"``
      adds in float32, and rounds what it sends on, in a ring each addition. Default:
      ``"format"``.
    addends: the number of addends that the scale has room for, 1 or more and below
      2**23; exchanges set it to N. Default: 1.
    implementation: the encoder; see :class:`gradcomp.codecs.Codec`. Default: None.

  Raises:
    ValueError: a hyperparameter is outside these; there is one exponent bit and no
      mantissa; or the largest element would be cast to zero, to leave room for all
      addends (64 with (3, 0)).

  Example:
    >>> codec = FloatCast(exponent_bits=4, mantissa_bits=3)
    >>> x = jnp.array([3.0, -1.1, 0.0]) * 2.0**-60
    >>> payload = codec.encode(x)
    >>> codec.decode(payload, like=x) * 2.0**60, payload.agreed
    (Array([ 3.   , -1.125,  0.   ], dtype=float32), Array([[68]], dtype=uint8))

  References:
    Han et al., `APS <https://arxiv.org/abs/1911.08907>`_, 2021, sections 3, 4.1 and
    4.2, algorithm 1
  """

  exponent_bits: int = checks.field(5, float_codes.EXPONENT_BITS)
  mantissa_bits: int = checks.field(2, float_codes.MANTISSA_BITS)
  rounding: FloatRounding = checks.field("nearest_even", checks.choice(FloatRounding))
  scale: float | Literal["auto"] = checks.field("auto", _SCALE)
  accumulate: records.Accumulate = checks.field(
    "format", checks.choice(records.Accumulate)
  )
  addends: int = checks.field(
    1, checks.integer("a number of addends, 1 or more", 1, 2**23 - 1)
  )
  implementation: dispatch.Implementation | None = checks.field(None, dispatch.RULE)

  row_words: ClassVar[int] = float_cast.Form.bucket_size

  def __post_init__(self) -> None:
    super().__post_init__()
    if not self.format.max_finite:
      raise ValueError(
        "`mantissa_bits` must be 1 or more with one exponent bit, got 0: the format "
        "has no number but zero."
      )
    room = 2.0**self.format.max_exponent / self.addends
    if self.scale == "auto" and room <= self.format.smallest / 2:
      raise ValueError(
        "`exponent_bits` must leave room for the sum of all workers' numbers, got "
        f"{self.exponent_bits}, with {self.mantissa_bits} mantissa bits and "
        f"{self.addends} workers: scaled so that it cannot overflow, even the largest "
        "element would be cast to zero. Use more bits, or a constant scale."
      )

  @property
  def papers(self) -> tuple[str, ...]:
    scaled = ("micikevicius2017mixed", "han2021aps/scaled")
    return ("han2021aps",) if self.scale == "auto" else scaled

  @property
  def format(self) -> float_codes.FloatFormat:
    """The number format."""
    return float_codes.FloatFormat(self.exponent_bits, self.mantissa_bits)

  @property
  def contraction(self) -> float:
    fmt, draws = self.format, self.needs_key
    lost = contractions.of_floats(2.0**-self.mantissa_bits, self.rounding)
    if self.scale == "auto":  # small elements have numbers of equal distances
      top = 2.0**fmt.max_exponent / self.addends
      lost += contractions.of_levels(max(2, top / fmt.smallest / 2), None, draws=draws)
    return contractions.of_energy(lost, draws=draws)

  @property
  def sums(self) -> Sum:
    return Numbers(self)

  @property
  def needs_key(self) -> bool:
    return self.rounding == "stochastic"

  @property
  def tile_size(self) -> int:
    return planes.planes_per_word(float_cast.width(self.format)) * self.row_words

  def bind(self, leaf: records.Leaf) -> "FloatCast":
    """Binds the number of addends, so that the scale leaves room for their sum."""
    if leaf.addends is None:
      return self
    return dataclasses.replace(self, addends=leaf.addends)

  def agree(self, x: Array) -> Array | None:
    """Returns the sum's exponent as a byte, ``uint8[1, 1]``; None for a fixed scale."""
    return self._exponent(x) if self.scale == "auto" else None

  @functools.partial(jax.jit, static_argnums=0)  # each shape is traced once
  def _exponent(self, x: Array) -> Array:
    largest = scales.tensor_norm(as_float32(x), "max").reshape(1, 1)
    return float_cast.exponent_byte(largest, self.addends)

  def encode_leaf(
    self, x: Array, context: records.Context, *, keep: bool = False
  ) -> records.Encoded:
    flat = as_float32(x)
    if self.scale != "auto":
      return records.Encoded(self._encode(scaled(flat, self.scale), None, context))
    assert context.agreed is not None
    exponent = float_cast.shift(context.agreed[0, 0], self.format, self.addends)
    return records.Encoded(self._encode(flat, exponent, context))

  def encode_rows(self, tiles: Array, context: records.Context) -> Array:
    return self._encode(tiles, None, context)

  def decode_rows(self, rows: Array) -> Array:
    return float_cast.decode_rows(rows, self.format)

  def encode_sums(self, tiles: Array) -> Array:
    """Encodes scaled sums, rounded to nearest even."""
    nearest = dataclasses.replace(self, rounding="nearest_even")
    return nearest.encode_rows(tiles, records.NOTHING)

  def unscaled(self, tiles: Array, agreed: Array | None) -> Array:
    """Divides decoded numbers by the scale: ``float32[rows, P, B]``."""
    if self.scale != "auto":
      return scaled(tiles, 1 / self.scale)
    assert agreed is not None
    return float_cast.unshifted(tiles, agreed, self.format, self.addends)

  def _encode(
    self, x: Array, exponent: Array | None, context: records.Context
  ) -> Array:
    form = float_cast.Form(self.format, self.rounding, saturate=self.scale == "auto")
    dither, by = context.drawn if self.needs_key else None, self.implementation
    given = x, exponent, dither
    return float_cast.encode_rows(*given, form=form, implementation=by)[0]
