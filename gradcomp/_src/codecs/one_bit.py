"""1-bit SGD: the codec that sends the sign of each element, and two means a bucket."""

import dataclasses
from typing import ClassVar

from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs import around, contractions, quantizing
from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.codecs.sums.tiles import OF_TILES, Tiles
from gradcomp._src.kernels import one_bit
from gradcomp._src.kernels.common import planes
from gradcomp._src.kernels.gpu import dispatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBit(quantizing.ByKernel):
  r"""Replaces each element by the mean of the elements of its sign in its bucket.

  .. math:: Q(v_i) = \mathrm{avg}_+ \text{ if } v_i \ge 0, \quad
     \mathrm{avg}_- \text{ otherwise}

  where :math:`\mathrm{avg}_+` is the mean of a bucket's values that are zero or more,
  and :math:`\mathrm{avg}_-` the mean of the others. The mean of no values is zero.

  A payload has 1 bit an element and two 32-bit means a bucket, in tiles of 32 buckets.
  The codec is biased: in large Gaussian buckets the squared error is :math:`1 - 2/\pi`
  of the squared length, 0.36. It always goes with error feedback, which is exact: code
  and residual of each element add up to the gradient.

  Attributes:
    bucket_size: consecutive elements that share two means, a multiple of 32. The paper
      found 64 as accurate as float32, and 512 about one point worse on AlexNet.
      Default: 64.
    per_column: CNTK's rule, True or False: the first dimension of a leaf is the row,
      and the others are flattened to columns, each a bucket in its own words. A
      convolution's first dimension is its height: at 3, a column sends as much as in
      float32. False is the paper's "1bitSGD*". Default: False.
    implementation: the encoder; see :class:`gradcomp.codecs.Codec`. Default: None.

  Example:
    >>> codec = OneBit()
    >>> x = jnp.array([-3., -1., 2., 4.])
    >>> codec.roundtrip(x)
    Array([-2., -2.,  3.,  3.], dtype=float32)

  References:
    Seide et al., `1-bit stochastic gradient descent
    <https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html>`_, 2014;
    Grubic et al., `Synchronous Multi-GPU Deep Learning
    <https://doi.org/10.3929/ethz-b-000319485>`_, 2018, sections 2.2, 3.2.1 and 4
  """

  bucket_size: int = checks.field(64, checks.BUCKET)
  per_column: bool = checks.field(False, checks.FLAG)
  implementation: dispatch.Implementation | None = checks.field(None, dispatch.RULE)

  operation = one_bit
  papers: ClassVar[tuple[str, ...]] = ("seide2014onebit", "grubic2018synchronous")

  @property
  def contraction(self) -> float:
    return contractions.of_signs(self.bucket_size)

  @property
  def sums(self) -> Sum:
    return Tiles(self, facts=dataclasses.replace(OF_TILES, needs_feedback=True))

  @property
  def form(self) -> one_bit.Form:
    return one_bit.Form(self.bucket_size)

  def bind(self, leaf: Leaf) -> Codec:
    """Returns the codec of a leaf: of its columns with ``per_column``."""
    rows = leaf.shape[0] if leaf.shape else 1
    return around.ByColumn(codec=self, rows=rows) if self.per_column else self

  def filled(self, x: Array) -> Array:
    """Fills the last bucket of a leaf with copies of its elements."""
    return planes.filled(x.reshape(-1), self.bucket_size)
