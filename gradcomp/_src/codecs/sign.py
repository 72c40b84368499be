"""Sign: the codec of one bit an element, with a mean magnitude a bucket or a vote."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs import contractions, protocol
from gradcomp._src.codecs.sums.codes import Votes
from gradcomp._src.codecs.sums.records import Context, Encoded
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.codecs.sums.tiles import OF_TILES, Tiles
from gradcomp._src.kernels.common import fixed_point, planes, scales

Scale = Literal["mean", "one"]
Vote = Literal["mean", "majority"]

_PLANES = planes.planes_per_word(1)  # buckets in a tile, and signs in a word


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sign(protocol.Codec):
  r"""Replaces each element by its sign, times one scale for each bucket.

  .. math:: Q(v_i) = s \, \mathrm{sgn}(v_i), \qquad s = \mathrm{mean}_j |v_j|
     \quad \text{or} \quad s = 1

  where :math:`j` runs over the bucket of element :math:`i`. A zero counts as positive.
  A bucket of zeros has the scale zero, and decodes to zeros. The codec is biased.

  ``scale="mean"`` is EF-signSGD's operator, which always goes with error feedback. A
  payload has 1 bit an element and one 32-bit mean a bucket, in tiles of 32 buckets.
  Constant magnitudes are exact in buckets of a power of two.

  ``scale="one"`` sends signs alone, in ``1 + 2 / bucket_size`` bits an element. Results
  are signs whatever the size of a gradient, so every leaf is encoded, however small,
  and ``feedback=None`` is required: a residual would never come down to zero. With N
  workers the result is the mean of the signs, or with ``vote="majority"``

  .. math:: \mathrm{sgn} \Bigl( \sum_k \mathrm{sgn}(v_i^{(k)}) \Bigr)

  A tie is 0. Counts are exact. In ``two_shot`` owners send counts, in
  ``ceil(log2(2N + 2))`` bits, or the winner, in 2 bits. A worker with a bucket of zeros
  does not vote in it.

  Attributes:
    bucket_size: consecutive elements that share a scale, a multiple of 32. Default: 64.
    scale: ``"mean"``, the mean magnitude of the bucket, or ``"one"``. Default:
      ``"mean"``.
    vote: ``"mean"``, or ``"majority"`` with ``scale="one"``. Default: ``"mean"``.

  Example:
    >>> x = jnp.array([-3., -1., 2., 4.])
    >>> Sign().roundtrip(x)
    Array([-2.5, -2.5,  2.5,  2.5], dtype=float32)

    Two of three workers vote for the second element:

    >>> tx = gradcomp.compress(
    ...   Sign(scale="one", vote="majority"), axis_name="data", feedback=None)
    >>> votes = jnp.array([[2., 1.], [3., -1.], [-9., 1.]])
    >>> step = lambda x: tx.update(x, tx.init(x))[0]
    >>> jax.jit(jax.vmap(step, axis_name="data"))(votes)[0]
    Array([1., 1.], dtype=float32)

  References:
    Karimireddy et al., `Error Feedback Fixes SignSGD
    <https://arxiv.org/abs/1901.09847>`_, 2019, algorithm 1; Bernstein et al., `signSGD
    with Majority Vote <https://arxiv.org/abs/1810.05291>`_, 2018, algorithm 1
  """

  bucket_size: int = checks.field(64, checks.BUCKET)
  scale: Scale = checks.field("mean", checks.choice(Scale))
  vote: Vote = checks.field("mean", checks.choice(Vote))

  papers: ClassVar[tuple[str, ...]] = ("karimireddy2019error", "bernstein2018vote")

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.vote == "majority" and self.scale != "one":
      raise ValueError(
        '`vote` must be "mean" with scale="mean", got "majority"; use scale="one".'
      )

  @property
  def contraction(self) -> float:
    # A unit is not smaller for a small gradient.
    return 0.0 if self.scale == "one" else contractions.of_signs(self.bucket_size)

  @property
  def sums(self) -> Sum:
    if self.scale == "one":
      return Votes(self, self.vote == "majority")
    return Tiles(self, facts=dataclasses.replace(OF_TILES, needs_feedback=True))

  @property
  def tile_size(self) -> int:
    return self.bucket_size * _PLANES

  @property
  def row_words(self) -> int:
    return self.bucket_size + (2 if self.scale == "one" else _PLANES)

  def filled(self, x: Array) -> Array:
    """Fills the last bucket of a leaf, since zeros would draw its mean to zero."""
    return planes.filled(x.reshape(-1), self.bucket_size) if self.scale == "mean" else x

  def encode_leaf(self, x: Array, context: Context, *, keep: bool = False) -> Encoded:
    rows = []
    form = _PLANES, self.bucket_size, self.filled
    for tiles in planes.tile_segments(protocol.as_float32(x), *form):
      signs = [(plane < 0).astype(jnp.uint32) for plane in tiles.planes]
      buckets = tiles.buckets[: tiles.shape[0] * _PLANES]
      if self.scale == "one":
        scale = jnp.sign(scales.scales(scales.norms(buckets, "max")))
        scale = scale.reshape(-1, _PLANES)
        flags = [flag.astype(jnp.uint32) for flag in (scale != 0, jnp.isnan(scale))]
        cut = [[flag[:, k : k + 1] for k in range(_PLANES)] for flag in flags]
        after = [planes.pack_planes(bits, 1) for bits in cut]
      else:
        # Elements are multiplied by a power of two, so that no finite sum overflows.
        power = 1 << (self.bucket_size - 1).bit_length()
        total = scales.sum_by_halves(jnp.abs(buckets) * np.float32(1 / power))
        mean = fixed_point.scaled(total, power / self.bucket_size)
        mean = jnp.where(jnp.isfinite(mean), mean, np.float32(np.nan))
        after = [planes.float_words(mean.reshape(-1, _PLANES))]
      rows.append([planes.pack_planes(signs, 1), *after])
    return Encoded(planes.stacked(rows, self.row_words))

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    return self.encode_leaf(tiles, context).rows

  def decode_rows(self, rows: Array) -> Array:
    negative = planes.unpack_planes(rows[..., : self.bucket_size], 1) == 1
    words = rows[..., self.bucket_size :]
    if self.scale == "mean":
      scale = planes.floats(words)[..., None]
    else:
      some, bad = (planes.unpack_planes(words[..., k : k + 1], 1) for k in range(2))
      scale = jnp.where(bad == 1, np.float32(np.nan), some.astype(jnp.float32))
    return jnp.where(negative, -scale, scale)
