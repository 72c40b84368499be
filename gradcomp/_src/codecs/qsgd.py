"""QSGD: the codec of few levels, stochastic rounding, and a scale for each bucket."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from gradcomp._src import checks
from gradcomp._src.bibliography import ALISTARH_2017, GRUBIC_2018, ZHANG_2017, Citation
from gradcomp._src.codecs import contraction as contractions
from gradcomp._src.codecs import quantizing
from gradcomp._src.codecs.sums.records import Context, Encoded, Payload, Rounding
from gradcomp._src.codecs.sums.tiles import sum_in_order
from gradcomp._src.codecs.tiles import as_float32, codec_dither, to_tiles
from gradcomp._src.kernels.common import fitted_levels, planes
from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.quantize import fitted, qsgd, reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class QSGD(quantizing.BucketCodec):
  r"""Quantizes each element to one of a few levels of its bucket's norm.

  With :math:`s` intervals and the scale :math:`\lVert v \rVert` of a bucket,

  .. math:: Q_s(v_i) = \lVert v \rVert \, \mathrm{sgn}(v_i) \, \xi_i / s

  where :math:`\xi_i` is :math:`s |v_i| / \lVert v \rVert` rounded to one of its two
  neighboring integers, up with a probability equal to the fraction.

  ==================  =================  =========================================
  ``levels``          ``s``              levels
  ==================  =================  =========================================
  ``sign_magnitude``  ``2**(bits-1)-1``  a sign bit, magnitudes 0, 1, ..., s; needs
                                         bits >= 2; zeros stay zeros
  ``uniform``         ``2**bits-1``      s equal intervals of [-norm, norm]; zero is
                                         not a level, zero buckets stay zeros
  ``nonuniform``      ``2**bits-1``      s intervals of [-norm, norm] that are small
                                         where many elements are; 2, 3 or 4 bits
  ==================  =================  =========================================

  With ``norm="rms"`` the norm is a multiple of a bucket's root mean square: ``uniform``
  levels are 1.596, 0.996, 0.586 or 0.335 of these apart at 1 to 4 bits, which loses
  least of Gaussian buckets. Elements beyond the outermost level are clipped to it. That
  is a bias, so the codec has error feedback by default: the clipped part is sent later.

  Non-uniform levels are multiples of 1/256 of the norm, the same on both sides of zero.
  Of all such levels they have the least variance of stochastic rounding. They are
  fitted to the gradients of all workers every ``refit_every`` steps, for all leaves
  together, and travel in every row.

  With ``rotate`` each element is spread over a group of 8 or 32 before it is encoded,
  and gathered after the last sum. Then a few large elements do not spoil the others.

  A payload has ``32 / floor(32 / bits)`` bits an element and 32 bits a bucket, 4.0625
  bits at 4 bits and buckets of 512, in whole tiles of ``floor(32 / bits)`` buckets.

  Stochastic rounding is unbiased up to the fixed-point grid: the probability is a
  multiple of 2**-16, cut downwards, so the mean can be short by 2**-16 of a level.
  The variance is at most :math:`\min(n/s^2, \sqrt{n}/s) \lVert v \rVert_2^2` with
  ``norm="l2"`` and ``sign_magnitude``. Nearest rounding (ties away from zero) is
  biased: use error feedback. Of 2 bits at random it takes buckets of 128 elements or
  fewer, and refuses others, whose residual would grow: see ``contraction`` of
  :class:`gradcomp.codecs.Codec`.

  With ``share_scale``, all workers encode with the largest of their norms, which the
  exchange finds first. Rows then carry no scales, and codes add up as integers,
  exactly. So ``psum`` and both stages of ``two_shot`` round nothing after the first
  encoding.

  A bucket that holds a NaN or an infinity decodes to NaN, all of it; with ``rotate``
  all of the 8 buckets that a group lies in.

  Attributes:
    bits: bits of a code, 1 to 8 or 16; with ``sign_magnitude`` 2 or more. Default: 4.
    bucket_size: elements that share a scale, consecutive ones, a multiple of 32; None
      for one scale a tensor. The owner's second encoding in a ``two_shot`` exchange
      then uses one scale a row of ``512 * floor(32 / bits)`` elements. Default: 512.
    norm: the scale of a bucket: ``"max"``, ``"l2"``, or ``"rms"`` with ``uniform``
      levels, buckets and 1 to 4 bits. QSGD's bound of the variance holds for ``"l2"``.
      The paper found ``"max"`` more accurate. Default: ``"max"``.
    levels: where the levels lie: ``"sign_magnitude"``, ``"uniform"`` or
      ``"nonuniform"``, as in the table of :class:`gradcomp.codecs.QSGD`. Default:
      ``"sign_magnitude"``.
    rounding: ``"stochastic"``, which is unbiased, or ``"nearest"``. Default:
      ``"stochastic"``.
    share_scale: whether all workers encode with the largest of their scales, so that
      codes add up as integers; True or False. Default: False.
    rotate: elements of a group that is rotated, 8 or 32, at 1, 2 or 4 bits; None
      rotates nothing. Default: None.
    refit_every: steps from one fit of non-uniform levels to the next, 1 or more.
      Default: 100.
    implementation: how the encoder runs: ``"xla"``; ``"pallas"``, on GPUs from
      Hopper on; ``"pallas_interpret"``, slow and for tests; or None, which takes
      ``"pallas"`` where it runs and ``"xla"`` elsewhere. See docs/inside/kernels.md.
      Default: None.

  Raises:
    ValueError: a hyperparameter is outside these, when the codec is made; or ``encode``
      has no key, and rounding is stochastic.
    TypeError: ``encode`` is given integers or complex numbers.

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
    3.2.2; Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017; Zhang et
    al., `ZipML <https://arxiv.org/abs/1611.05402>`_, 2017, section 3
  """

  bits: int = checks.field(4, quantizing.BITS)
  bucket_size: int | None = checks.field(512, checks.TENSOR_BUCKET)
  norm: quantizing.ScaleNorm = checks.field("max", checks.choice(quantizing.ScaleNorm))
  levels: quantizing.Levels = checks.field(
    "sign_magnitude", checks.choice(quantizing.Levels)
  )
  rounding: Rounding = checks.field("stochastic", checks.choice(Rounding))
  share_scale: bool = checks.field(False, checks.FLAG)
  rotate: int | None = checks.field(None, quantizing.ROTATE)
  refit_every: int = checks.field(100, checks.STEPS)
  implementation: dispatch.Implementation | None = checks.field(None, dispatch.RULE)

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_levels()

  @property
  def citations(self) -> tuple[Citation, ...]:
    papers = (
      Citation(
        GRUBIC_2018,
        'A probability of rounding up is a multiple of 2**-16. The norm "rms", rotated '
        "elements and shared scales are not the paper's.",
      ),
      Citation(ALISTARH_2017, "Codes have a fixed width; there is no Elias code."),
    )
    levels = Citation(
      ZHANG_2017,
      "Levels are multiples of 1/256 of the norm, the same on both sides of zero and "
      "for all leaves. They are fitted again every few steps.",
    )
    return (*papers, levels) if self.fits else papers

  @property
  def unbiased(self) -> bool:
    return super().unbiased and self.norm != "rms"

  @property
  def contraction(self) -> float:
    draws, size = self.needs_key, self.bucket_size
    if self.norm == "rms":  # what is clipped waits
      return (0.3, 0.45, 0.6, 0.65)[self.bits - 1]
    uneven = self.levels == "sign_magnitude"
    intervals = 2 ** (self.bits - 1) - 1 if uneven else (2**self.bits - 1) / 2
    if self.norm == "l2":
      energy = contractions.of_lengths(intervals, size, draws=draws or not uneven)
    else:
      shared = contractions.SHARING if self.share_scale and size else 1
      energy = contractions.of_levels(intervals, size and shared * size, draws=draws)
    return contractions.of_energy(energy, draws=draws)

  def to_nearest(self) -> "QSGD":
    """Returns the codec that rounds to nearest; this one if that has no contraction.

    With 1 bit and ``"max"`` every element would be as large as the largest. With an l2
    norm and few levels all elements would be zeros, and owners would send nothing.
    """
    nearest = super().to_nearest()
    return nearest if nearest.contraction > 0 else self

  @property
  def without_key(self) -> str:
    size = "" if self.bucket_size else ", a bucket_size"
    cure = f', or choose norm="rms"{size} and rounding="nearest"'
    return super().without_key or cure

  @property
  def tile_size(self) -> int:
    return planes.planes_per_word(self.bits) * self._words

  @property
  def row_words(self) -> int:
    if self.share_scale:
      return self._words
    scales = 1 if self.bucket_size is None else planes.planes_per_word(self.bits)
    return self._words + scales + (2 ** (self.bits - 1) if self.fits else 0)

  @property
  def _form(self) -> qsgd.Form:
    assert self.levels != "nonuniform"
    levels, inline = self.levels, not self.share_scale
    return qsgd.Form(
      bits=self.bits, bucket_size=self._words, levels=levels, inline=inline
    )

  @property
  def max_code(self) -> int:
    return self._form.intervals

  def leaf_statistics(self, x: Array) -> Array:
    """Returns the scales: ``float32[1, 1]``, or ``float32[rows, P]`` of buckets."""
    return self.scales_by(quantizing.leaf_scales, self._prepared(x))

  def _prepared(self, x: Array) -> Array:
    """Returns the elements of a leaf in the encoder's order: filled or rotated."""
    flat = as_float32(x)
    return self.filled(flat) if not self.rotate else to_tiles(flat, self).reshape(-1)

  def encode_leaf(self, x: Array, context: Context, *, keep: bool = False) -> Encoded:
    dither = codec_dither(self, context)
    if keep and self._scales_inside and not self.rotate:
      leaf = as_float32(x).reshape(x.shape)
      return Encoded(*self._encode(leaf, None, dither, None, keep=True))
    flat = self._prepared(x)
    scale = context.agreed
    if scale is None and not self._scales_inside:
      scale = self.scales_by(quantizing.leaf_scales, flat)
    return Encoded(self._encode(flat, scale, dither, self.levels_for(flat, context))[0])

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    by = quantizing.row_scales
    scale = None if self._scales_inside else self.scales_by(by, tiles)
    dither = codec_dither(self, context)
    return self._encode(tiles, scale, dither, self.levels_for(tiles, context))[0]

  def decode_rows(self, rows: Array) -> Array:
    if self.fits:
      return fitted_levels.decode_rows(rows, bits=self.bits, bucket_size=self._words)
    return reference.decode_rows(rows, self._form)

  def payload_tiles(self, payload: Payload) -> Array:
    shared = payload.agreed is not None
    return super().payload_tiles(payload) if shared else self._decode_one(payload.rows)

  def sum_rows(self, rows: Array) -> Array:
    if len(rows) == 1:
      return self._decode_one(rows[0])
    return sum_in_order(self.decode_rows, rows)

  def _decode_one(self, rows: Array) -> Array:
    """Decodes a payload that nothing is added to."""
    by = self.implementation
    if self.fits:
      sizes = {"bits": self.bits, "bucket_size": self._words}
      return fitted.decode_one(rows, **sizes, implementation=by)
    return qsgd.decode_one(rows, form=self._form, implementation=by)

  def codes(self, rows: Array) -> Array:
    return qsgd.signed_codes(rows, self._form)

  @property
  def _scales_inside(self) -> bool:
    """True if the encoder computes the scales, so that a kernel reads elements once."""
    bucketed = self.bucket_size is not None and self.norm == "max"
    return bucketed and not self.share_scale and not self.fits

  def _encode(
    self,
    x: Array,
    scale: Array | None,
    dither: Array | None,
    levels: Array | None,
    keep: bool = False,
  ) -> tuple[Array, Array | None]:
    if scale is not None:
      rows = -(-x.size // self.tile_size)
      scale = jnp.broadcast_to(scale, (rows, scale.shape[1]))
    if self.fits:
      assert scale is not None and levels is not None
      sizes = {"bits": self.bits, "bucket_size": self._words}
      return fitted_levels.encode_rows(x, scale, levels, dither, **sizes), None
    form, by = dataclasses.replace(self._form, keep=keep), self.implementation
    return qsgd.encode_rows(x, scale, dither, form=form, implementation=by)
