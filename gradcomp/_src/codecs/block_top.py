"""Block-top-k: a codec that sends the largest elements of each block of a leaf."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs import quantizing
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.codecs.sums.tiles import Blocks
from gradcomp._src.kernels import block_top
from gradcomp._src.kernels.gpu import dispatch

ValueBits = Literal[2, 8, 32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTop(quantizing.ByKernel):
  r"""Sends the ``count`` largest of every ``block_size`` consecutive elements.

  .. math:: Q(v)_i = q(v_i) \text{ if } |v_i| \text{ is among the largest of its block},
     \quad 0 \text{ otherwise}

  Every block sends an equal number of entries, so nothing is sorted.

  An entry has ``log2(block_size)`` bits for its place, and ``bits`` for :math:`q(v_i)`:

  ==============  ==================================================================
  ``bits``        values
  ==============  ==================================================================
  2               :math:`\pm s` and :math:`\pm \tfrac{3}{8} s`, or nothing is sent,
                  whichever is nearest
  8               :math:`\pm \tfrac{m}{127} s` with the nearest m from 1 to 127, or
                  nothing is sent if m is 0
  32              the element itself
  ==============  ==================================================================

  where :math:`s` is the largest magnitude of a tile: 8192 consecutive elements at the
  defaults. A block that is small beside :math:`s` stays in the residual until it has
  grown. Codes of w bits are packed ``floor(32 / w)`` to a word, and a scale takes 32
  bits. At the defaults a payload has a byte for 64 elements, and 4 bytes for 8192:
  0.129 bits an element.

  Magnitudes are compared by their upper bits: the lowest ``log2(block_size)`` of the 31
  bits of a ``float32`` without its sign do not count. Of elements that are equal then,
  the first is sent. With 2 or 8 bits, :math:`v_i` is rounded with zeros in the place of
  these bits. The residual keeps both losses. At 2 bits the last element of a block is
  never ``3/8 s``: that code sends nothing.

  The codec is biased: without feedback, unsent elements are lost. A NaN or an infinity
  makes its tile NaN, or with 32 bits its block. With 2 or 8 bits a tile with all
  magnitudes below 2**-126 counts as zero.

  Attributes:
    block_size: consecutive elements of a block, a power of two from 8 to 4096. Default:
      64.
    count: elements of each block that are sent, from 1 to 4. Default: 1.
    bits: bits of a value: 2, 8 or 32. Default: 2.
    implementation: the encoder; see :class:`gradcomp.codecs.Codec`. Default: None.

  Example:
    >>> codec = BlockTop(block_size=8, bits=32)
    >>> x = jnp.array([1., -5., 0.5, 2., 0., 0., 0., 0., 3.])
    >>> codec.roundtrip(x)
    Array([ 0., -5.,  0.,  0.,  0.,  0.,  0.,  0.,  3.], dtype=float32)

  References:
    Chen et al., `ScaleCom <https://arxiv.org/abs/2104.11125>`_, 2020, which selects in
    chunks; Sarfi et al., `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025, which
    sends 2-bit values of chunks
  """

  block_size: int = checks.field(64, checks.power_of_two(8, 4096))
  count: int = checks.field(1, checks.integer("a number of elements from 1 to 4", 1, 4))
  bits: ValueBits = checks.field(2, checks.choice(ValueBits))
  implementation: dispatch.Implementation | None = checks.field(None, dispatch.RULE)

  papers: ClassVar[tuple[str, ...]] = ("chen2020scalecom", "sarfi2025sparseloco")

  operation = block_top

  @property
  def form(self) -> block_top.Form:
    return block_top.Form(self.block_size, self.count, self.bits)

  @property
  def contraction(self) -> float:
    return self.density

  @property
  def sums(self) -> Sum:
    return Blocks(self)

  @property
  def density(self) -> float:
    """The share of the elements that is sent."""
    return self.count / self.block_size

  @property
  def slots(self) -> int:
    """The number of entries of a row."""
    return self.count * self.form.blocks

  def entries(self, rows: Array) -> tuple[Array, Array]:
    """Returns positions and values of rows: ``int32`` and ``float32[..., slots]``."""
    found, _ = block_top.entries_of_rows(rows, self.form)
    ends = self.block_size * (jnp.arange(self.form.blocks, dtype=jnp.int32) + 1)
    places = [ends - 1 - behind.astype(jnp.int32) for behind, _ in found]
    values = [value for _, value in found]
    return jnp.concatenate(places, axis=-1), jnp.concatenate(values, axis=-1)
