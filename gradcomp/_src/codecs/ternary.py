"""TernGrad: the codec of three values, with one scale a leaf or a bucket."""

import dataclasses
import functools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs import contractions, protocol, quantizing
from gradcomp._src.codecs.sums.records import Context, Encoded, Rounding
from gradcomp._src.kernels import quantize, rules
from gradcomp._src.kernels.common.planes import floats
from gradcomp._src.kernels.common.scales import deviation, norms, scales
from gradcomp._src.kernels.gpu import dispatch

Scaler = Literal["clipped", "sigma"]

_SIGMAS = checks.optional(
  checks.number("a number of standard deviations above 0, or None to clip nothing")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ternary(quantizing.Elementwise, quantizing.SharedScales):
  r"""Rounds each element to :math:`-s`, 0 or :math:`s`, the largest magnitude.

  Elements are clipped first, leaf by leaf, to :math:`c` standard deviations:

  .. math:: f(g_i) = \mathrm{sgn}(g_i) \min(|g_i|, c \sigma), \qquad
     Q(g_i) = s \, \mathrm{sgn}(g_i) \, b_i, \qquad
     P(b_i = 1) = |f(g_i)| / s

  where :math:`\sigma` is the standard deviation of the leaf about its mean, and
  :math:`s = \max_i |f(g_i)|`. With ``share_scale``, :math:`s` is the largest of all
  workers, found before anyone encodes; each worker clips to its own :math:`\sigma`. A
  constant leaf, with a :math:`\sigma` of zero, is not clipped.

  Rounding is unbiased for the clipped gradient: ``E[decode(encode(x))] == f(x)``.
  Clipping is a bias: at 2.5 it shortens a Gaussian gradient by 1.1 % and turns it by
  2.8 degrees. The variance of an element is :math:`|f| (s - |f|)`; without clipping it
  grows with the leaf. Rounding errors may be longer than the gradient, so no residual
  is kept by default, and error feedback refuses the codec. It accepts small buckets
  without shared scales, fewer sigmas, and ``rounding="nearest"``. A payload has 2 bits
  an element, or 1.6 with ``packing="base3"`` (20 in a word), and one scale a leaf, in
  rows of 8192 or 10240 elements. With shared scales, sums of N workers' codes are
  integers from -N to N: ``psum`` and ``two_shot`` give the exact mean of N ternary
  gradients, and the second stage of ``two_shot`` takes ``ceil(log2(2N + 1))`` bits.

  Attributes:
    clip_sigmas: :math:`c`, in standard deviations of the leaf, above 0; None to clip
      nothing. The paper found 2.5 on CIFAR-10 and used it everywhere. Default: 2.5.
    bucket_size: consecutive elements that share a scale, a multiple of 32; None for one
      scale a leaf, the paper's "layer-wise ternarizing". Clipping is always by leaf.
      Default: None.
    share_scale: whether workers share their scales; True or False. Default: True.
    packing: ``"2bit"`` or ``"base3"``, a fifth smaller and slower to encode. Default:
      ``"2bit"``.
    scaler: ``"clipped"``, the paper's :math:`\max |f(g)|`, or ``"sigma"``, the
      :math:`c \sigma` of its authors' program, which is larger if nothing was clipped.
      Default: ``"clipped"``.
    rounding: ``"stochastic"``, the paper's, or ``"nearest"``, which is biased and
      serves owners that keep the loss of a mean. Default: ``"stochastic"``.
    implementation: the encoder; see :class:`gradcomp.codecs.Codec`. Default: None.

  Example:
    >>> codec = Ternary(clip_sigmas=None)
    >>> x = jnp.array([2., -2., 0., 2.])
    >>> payload = codec.encode(x, key=jax.random.key(0))
    >>> codec.decode(payload, like=x)
    Array([ 2., -2.,  0.,  2.], dtype=float32)
    >>> payload.rows.shape, payload.agreed
    ((1, 512), Array([[2.]], dtype=float32))

  References:
    Wen et al., `TernGrad <https://arxiv.org/abs/1705.07878>`_, 2017, sections 3.1, 3.3
    and 4.2
  """

  clip_sigmas: float | None = checks.field(2.5, _SIGMAS)
  bucket_size: int | None = checks.field(None, checks.TENSOR_BUCKET)
  share_scale: bool = checks.field(True, checks.FLAG)
  packing: rules.Packing = checks.field("2bit", checks.choice(rules.Packing))
  scaler: Scaler = checks.field("clipped", checks.choice(Scaler))
  rounding: Rounding = checks.field("stochastic", checks.choice(Rounding))
  implementation: dispatch.Implementation | None = checks.field(None, dispatch.RULE)

  papers: ClassVar[tuple[str, ...]] = ("wen2017terngrad",)

  operation = quantize
  max_code: ClassVar[int] = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.clip_sigmas is None and self.scaler == "sigma":
      raise ValueError(
        '`clip_sigmas` must be a number with scaler="sigma", got None; use '
        'scaler="clipped".'
      )

  @property
  def contraction(self) -> float:
    draws, size = self.needs_key, self.bucket_size
    shared = contractions.SHARING if self.share_scale and size else 1
    energy = contractions.of_levels(1, size and shared * size, draws=draws)
    if self.clip_sigmas is not None:
      energy = min(energy, contractions.of_clipped(self.clip_sigmas))
      energy = max(energy, 18 / self.clip_sigmas**2)  # clipped parts come later
    return contractions.of_energy(energy, draws=draws)

  @functools.cached_property
  def form(self) -> rules.Ternary:
    words, inline = self.bucket_size or quantizing.TENSOR_ROW, not self.share_scale
    return rules.Ternary(bucket_size=words, packing=self.packing, inline=inline)

  @functools.partial(jax.jit, static_argnums=0)  # each shape is traced once
  def leaf_statistics(self, x: Array) -> tuple[Array, Array]:
    """Returns scales of clipped values, ``[1, 1]`` or ``[rows, P]``, and the limit."""
    flat = protocol.as_float32(x)
    largest = quantizing.scales_of(flat, self.form.planes, self.bucket_size)
    if self.clip_sigmas is None:
      return scales(largest), jnp.float32(jnp.inf)
    every = largest.reshape(-1)
    norm = norms(every, "max") if len(every) != 1 else every[0]
    sigma = deviation(flat, norm, self.implementation)
    limit = jnp.float32(self.clip_sigmas) * sigma
    limit = jnp.where((limit > 0) & jnp.isfinite(limit), limit, jnp.inf)
    # A comparison with NaN is false, so that a NaN as the largest is the scale, too.
    beyond = largest > limit if self.scaler == "clipped" else largest < jnp.inf
    return scales(jnp.where(beyond & jnp.isfinite(limit), limit, largest)), limit

  def encode_leaf(self, x: Array, context: Context, *, keep: bool = False) -> Encoded:
    scale, limit = context.agreed, context.measured
    if limit is None:
      own, limit = self.leaf_statistics(x)
      scale = own if scale is None else scale
    return self.encode_by(scale, protocol.as_float32(x), context, limit)

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    """Encodes the tiles of a mean, without clipping them again."""
    scale, flat = self.scales_for(tiles), tiles.reshape(-1)
    return self.encode_by(scale, flat, context, jnp.float32(jnp.inf)).rows

  def decode_rows(self, rows: Array) -> Array:
    scale = floats(rows[..., self.form.bucket_size :])
    return self.from_codes(self.codes(rows), scale)

  def codes(self, rows: Array) -> Array:
    return rules.ternary_codes(rows, self.form)
