"""1-bit SGD: a sign for each element, and two means for each bucket."""

import dataclasses
from typing import ClassVar

import jax

from gradcomp._checks import bucket, flag, optional_one_of, static_integer
from gradcomp.codecs._codec import Payload, as_float32, as_matrix, decode_payload
from gradcomp.kernels import Implementation, one_bit


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBit:
  r"""Replaces each element by the mean of the elements of its sign in its bucket.

  .. math:: Q(v_i) = \mathrm{avg}_+ \text{ if } v_i \ge 0, \quad
     \mathrm{avg}_- \text{ otherwise}

  where :math:`\mathrm{avg}_+` is the mean of a bucket's values that are zero or more,
  :math:`\mathrm{avg}_-` that of the others, and the mean of no values is zero.

  Sends 1 bit an element and two 32-bit means a bucket: 2 bits an element at buckets of
  64, 1.125 at 512. A payload has whole tiles of 32 buckets.

  Biased: ``E[decode(encode(x))]`` is the bucket's two means, not ``x``. The squared
  error of a side is its variance times its count: on Gaussian values 0.36 of the
  squared length (:math:`1 - 2/\pi`) for large buckets. So it always goes with error
  feedback, which is exact: code and residual add up to the gradient, each element.

  ``per_column`` is what CNTK does: the first dimension of a leaf is the row, the others
  are flattened to columns, and each column is a bucket of its own, in words of its own.
  A convolution's first dimension is its height: at 3, a column sends as much as in
  float32. The paper's "1bitSGD*", buckets of consecutive values, is the cure and the
  default.

  A bucket that holds a NaN or an infinity decodes to NaN, all of it.

  Attributes:
    bucket_size: consecutive elements that share two means, a multiple of 32. The paper
      found 64 as accurate as float32, and 512 about one point worse on AlexNet.
    per_column: whether buckets are the columns of each leaf instead.
    implementation: of the encoder: see :func:`gradcomp.kernels.dispatch.run`.

  Raises:
    ValueError: a hyperparameter outside these, when the codec is made.
    TypeError: ``encode`` of integers or complex numbers.

  Example:
    >>> codec = OneBit()
    >>> x = jnp.array([-3., -1., 2., 4.])
    >>> payload, residual = codec.encode_with_residual(x)
    >>> codec.decode(payload, like=x)
    Array([-2., -2.,  3.,  3.], dtype=float32)
    >>> residual
    Array([-1.,  1., -1.,  1.], dtype=float32)

  References:
    Seide et al., `1-bit stochastic gradient descent
    <https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html>`_, 2014;
    Grubic et al., `Synchronous Multi-GPU Deep Learning with Low-Precision
    Communication <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, sections 2.2 and
    3.2.1
  """

  bucket_size: int = 64
  per_column: bool = False
  implementation: Implementation | None = None

  unbiased: ClassVar[bool] = False
  needs_key: ClassVar[bool] = False
  shares_stats: ClassVar[bool] = False
  summable: ClassVar[bool] = False
  fitted: ClassVar[bool] = False
  adds: ClassVar[bool] = False

  def __post_init__(self) -> None:
    flag("per_column", self.per_column)
    optional_one_of("implementation", Implementation, self.implementation)
    if self.per_column:
      static_integer("bucket_size", "a number of rows", self.bucket_size)
    else:
      object.__setattr__(self, "bucket_size", bucket("bucket_size", self.bucket_size))

  @property
  def by_column(self) -> bool:
    return self.per_column

  @property
  def tile_size(self) -> int:
    return self.bucket_size * (1 if self.per_column else one_bit.WORD)

  @property
  def row_words(self) -> int:
    if self.per_column:
      return -(-self.bucket_size // one_bit.WORD) + 2
    return self.bucket_size + 2 * one_bit.WORD

  def with_rows(self, count: int) -> "OneBit":
    """The codec of leaves whose first dimension is ``count``: that is the bucket."""
    return dataclasses.replace(self, bucket_size=count)

  def filled(self, flat: jax.Array) -> jax.Array:
    """A flat leaf whose last bucket repeats its own elements in turn."""
    return one_bit.filled(flat, self.bucket_size)

  def encode(
    self,
    x: jax.Array,
    *,
    key: jax.Array | None = None,
    stats: jax.Array | None = None,
  ) -> Payload:
    del key, stats
    return Payload(self._encode(x, keep=False)[0])

  def encode_with_residual(
    self,
    x: jax.Array,
    *,
    key: jax.Array | None = None,
    stats: jax.Array | None = None,
  ) -> tuple[Payload, jax.Array]:
    """The payload, and ``x`` less what it decodes to, without decoding it.

    Returns:
      A :class:`Payload`, and ``float32`` in the shape of ``x``.
    """
    del key, stats
    rows, rest = self._encode(x, keep=True)
    assert rest is not None
    return Payload(rows), rest.reshape(x.shape)

  def _encode(self, x: jax.Array, keep: bool) -> tuple[jax.Array, jax.Array | None]:
    flat = as_float32(x)
    if self.per_column:
      return one_bit.encode_columns(as_matrix(flat.reshape(x.shape)))
    return one_bit.encode_rows(
      flat,
      bucket_size=self.bucket_size,
      keep=keep,
      implementation=self.implementation,
    )

  def decode(self, payload: Payload, *, like: jax.Array) -> jax.Array:
    codec = self
    if self.per_column:
      codec = self.with_rows(like.shape[0] if like.shape else 1)
    return decode_payload(payload, like, codec)

  def encode_rows(
    self,
    tiles: jax.Array,
    *,
    key: jax.Array | None = None,
    stats: jax.Array | None = None,
  ) -> jax.Array:
    if self.per_column:
      tiles = tiles.reshape(tiles.shape[0], -1).T
    else:
      tiles = tiles.reshape(-1)
    return self.encode(tiles, key=key, stats=stats).rows

  def decode_rows(self, rows: jax.Array) -> jax.Array:
    if self.per_column:
      return one_bit.decode_columns(rows, size=self.bucket_size)
    return one_bit.decode_rows(rows, bucket_size=self.bucket_size)
