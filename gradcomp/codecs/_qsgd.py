"""QSGD: stochastic quantization on equal levels, bucket by bucket."""

import dataclasses
import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from gradcomp._checks import static_integer
from gradcomp.codecs._codec import Payload, as_float32, codec_key, from_tiles
from gradcomp.kernels import planes, qsgd

Rounding = Literal["stochastic", "nearest"]

_TENSOR_ROW = 512  # words in a row when the whole tensor is one bucket
_BUCKET_MULTIPLE = 32  # of words, so that planes stay whole vectors

_BITS_RULE = "1 to 8 or 16"
_BUCKET_RULE = (
  f"a positive multiple of {_BUCKET_MULTIPLE}, or None for one scale a tensor"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QSGD:
  r"""Quantizes each element to one of a few equal levels of its bucket's norm.

  With :math:`s` intervals and the scale :math:`\lVert v \rVert` of a bucket,

  .. math:: Q_s(v_i) = \lVert v \rVert \, \mathrm{sgn}(v_i) \, \xi_i / s

  where :math:`\xi_i` is :math:`s |v_i| / \lVert v \rVert` rounded to one of its two
  neighbouring integers, up with a probability equal to the fraction.

  ==================  ================  ==========================================
  ``levels``          ``s``             levels
  ==================  ================  ==========================================
  ``sign_magnitude``  ``2**(bits-1)-1``  a sign bit, magnitudes 0, 1, ..., s; needs
                                         bits >= 2; zeros stay zeros
  ``uniform``         ``2**bits-1``      s equal intervals of [-norm, norm]; zero is
                                         not a level, zero buckets stay zeros
  ==================  ================  ==========================================

  Sends ``32 / floor(32 / bits)`` bits an element and 32 bits a bucket: at 4 bits and
  buckets of 512, 4.0625 bits. A payload has whole tiles of ``floor(32 / bits)``
  buckets. Widths that do not divide 32 send more than their name says: 3 -> 3.2,
  5 -> 5.33, 6 -> 6.4, 7 -> 8 bits.

  Unbiased with stochastic rounding, up to the fixed-point grid: the probability is a
  multiple of 2**-16, cut downwards, so the mean can be short by 2**-16 of a level.
  The variance is at most :math:`\min(n/s^2, \sqrt{n}/s) \lVert v \rVert_2^2` with
  ``norm="l2"`` and ``sign_magnitude``. Biased with nearest rounding (ties away from
  zero): use error feedback.

  With ``share_scale``, all workers encode with the largest of their norms, which the
  exchange finds first. Rows carry no scales; codes add up as integers, exactly, so that
  ``psum`` and both stages of ``two_shot`` round nothing after the first encoding.

  A bucket that holds a NaN or an infinity decodes to NaN, all of it. A norm below
  2**-126 counts as zero; between that and 2**-96 the scale is 2**-96.

  Attributes:
    bits: width of a code, 1 to 8 or 16.
    bucket_size: consecutive elements that share a scale, a multiple of 32; None for
      one scale a tensor. The owner's second encoding in a ``two_shot`` exchange then
      uses one scale a row of ``512 * floor(32 / bits)`` elements.
    norm: ``"max"`` or ``"l2"``. The paper found ``"max"`` more accurate; ``"l2"`` is
      the definition that its variance bound holds for.
    levels: ``"sign_magnitude"`` or ``"uniform"``.
    rounding: ``"stochastic"`` or ``"nearest"``.
    share_scale: whether the scales are those of all workers together.

  Raises:
    ValueError: a hyperparameter outside these, when the codec is made; ``encode``
      without a key when rounding is stochastic.
    TypeError: ``encode`` of integers or complex numbers.

  Example:
    >>> codec = QSGD(bits=4, rounding="nearest")
    >>> x = jnp.array([7., -3., 0.4, 2.6])
    >>> payload = codec.encode(x)
    >>> codec.decode(payload, like=x)
    Array([ 7., -3.,  0.,  3.], dtype=float32)
    >>> payload.rows.shape  # one tile: 512 words, 8 scales
    (1, 520)

  References:
    Grubic et al., `Synchronous Multi-GPU Deep Learning with Low-Precision
    Communication <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, sections 2.3 and
    3.2.2; Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017
  """

  bits: int = 4
  bucket_size: int | None = 512
  norm: qsgd.Norm = "max"
  levels: qsgd.Levels = "sign_magnitude"
  rounding: Rounding = "stochastic"
  share_scale: bool = False

  def __post_init__(self) -> None:
    bits = static_integer("bits", _BITS_RULE, self.bits)
    if bits not in (1, 2, 3, 4, 5, 6, 7, 8, 16):
      raise ValueError(f"`bits` must be {_BITS_RULE}, got {bits}.")
    object.__setattr__(self, "bits", bits)
    if self.bucket_size is not None:
      size = static_integer("bucket_size", _BUCKET_RULE, self.bucket_size)
      if size < 1 or size % _BUCKET_MULTIPLE:
        raise ValueError(f"`bucket_size` must be {_BUCKET_RULE}, got {size}.")
      object.__setattr__(self, "bucket_size", size)
    for name, choices in (
      ("norm", qsgd.Norm),
      ("levels", qsgd.Levels),
      ("rounding", Rounding),
    ):
      if getattr(self, name) not in get_args(choices):
        raise ValueError(
          f"`{name}` must be one of {get_args(choices)}, got {getattr(self, name)!r}."
        )
    if self.bits == 1 and self.levels == "sign_magnitude":
      raise ValueError(
        '`bits` must be at least 2 with levels="sign_magnitude", which spends one bit '
        'on the sign, got 1; use levels="uniform".'
      )
    if not isinstance(self.share_scale, bool):
      raise ValueError(f"`share_scale` must be a bool, got {self.share_scale!r}.")

  @property
  def unbiased(self) -> bool:
    return self.rounding == "stochastic"

  @property
  def needs_key(self) -> bool:
    return self.rounding == "stochastic"

  @property
  def shares_stats(self) -> bool:
    return self.share_scale

  @property
  def summable(self) -> bool:
    return self.share_scale

  @property
  def tile_size(self) -> int:
    return planes.planes_per_word(self.bits) * self._row_size

  @property
  def row_words(self) -> int:
    if self.share_scale:
      return self._row_size
    one_scale = self.bucket_size is None
    return self._row_size + (1 if one_scale else planes.planes_per_word(self.bits))

  @property
  def max_code(self) -> int:
    return qsgd.intervals(self.bits, self.levels)

  @property
  def _row_size(self) -> int:
    return _TENSOR_ROW if self.bucket_size is None else self.bucket_size

  def stats(self, x: jax.Array) -> jax.Array:
    """The scales: ``float32[1, 1]`` of a tensor, ``float32[rows, P]`` of buckets."""
    flat = as_float32(x)
    if self.bucket_size is None:
      largest = qsgd.norms(flat, self.norm) if flat.size else jnp.zeros([])
      return qsgd.scales(largest).reshape(1, 1)
    count = planes.planes_per_word(self.bits)
    norms = [jnp.zeros([0, count])]
    for segment in planes.tile_segments(flat, count, self.bucket_size):
      size = segment.planes[0].shape[0] * count
      buckets = qsgd.norms(segment.buckets, self.norm)[:size]
      norms.append(buckets.reshape(-1, count))
    return qsgd.scales(jnp.concatenate(norms))

  def encode(
    self,
    x: jax.Array,
    *,
    key: jax.Array | None = None,
    stats: jax.Array | None = None,
  ) -> Payload:
    flat = as_float32(x)
    key = codec_key(key, self)
    if not self.share_scale and self.bucket_size is not None:
      return Payload(self._encode(flat, key=key))
    scale = self.stats(flat) if stats is None or not self.share_scale else stats
    rows = jnp.broadcast_to(scale, (-(-flat.size // self.tile_size), scale.shape[1]))
    words = self._encode(flat, key=key, scale=rows, inline=not self.share_scale)
    return Payload(words, scale if self.share_scale else None)

  def decode(self, payload: Payload, *, like: jax.Array) -> jax.Array:
    if not self.share_scale:
      return from_tiles(self.decode_rows(payload.rows), like)
    assert payload.stats is not None
    tiles = self.from_codes(self.codes(payload.rows), payload.stats)
    return from_tiles(tiles, like)

  def encode_rows(self, tiles: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
    scale = None
    if self.bucket_size is None:
      flat_rows = tiles.reshape(tiles.shape[0], -1)
      scale = qsgd.scales(qsgd.norms(flat_rows, self.norm))[:, None]
    return self._encode(tiles.reshape(-1), key=codec_key(key, self), scale=scale)

  def decode_rows(self, rows: jax.Array) -> jax.Array:
    return qsgd.decode_rows(
      rows, bits=self.bits, bucket_size=self._row_size, levels=self.levels
    )

  def codes(self, rows: jax.Array) -> jax.Array:
    return qsgd.signed_codes(
      rows, bits=self.bits, bucket_size=self._row_size, levels=self.levels
    )

  def from_codes(self, codes: jax.Array, stats: jax.Array) -> jax.Array:
    return qsgd.from_signed_codes(codes, stats, self.max_code)

  @property
  def _encode(self) -> functools.partial[jax.Array]:
    return functools.partial(
      qsgd.encode_rows,
      bits=self.bits,
      bucket_size=self._row_size,
      norm=self.norm,
      levels=self.levels,
    )
