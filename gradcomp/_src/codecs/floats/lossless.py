"""Lossless: the codec that sends bfloat16 in 12 bits, and loses nothing."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from gradcomp._src.codecs import contractions, protocol
from gradcomp._src.codecs.sums.records import Context
from gradcomp._src.kernels import lossless
from gradcomp._src.kernels.common.planes import pack_planes, unpack_planes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lossless(protocol.Codec):
  r"""Sends bfloat16 numbers in 12 bits an element, and loses nothing.

  The sign and the 7 bits of the mantissa :math:`m_i` travel as they are, and the
  exponent field :math:`x_i` as 4 bits. With :math:`X` for the largest field below 255
  in a bucket of 128 elements,

  .. math::
     v_i = \pm m_i 2^{x_i - 127}, \qquad
     c_i = \begin{cases} X - x_i & X - 14 < x_i \le X,\ x_i \ne 0 \\
     14 & x_i = 0 \\ 15 & \text{otherwise} \end{cases}

  Zeros and subnormals have a code of their own. NaN, infinities and numbers that are
  small beside the largest escape: a row of 8 buckets lists 10 escapes by place and
  exponent. With the list and the largest fields a payload has 12.375 bits an element.

  A row with more escapes decodes to NaN throughout. :func:`gradcomp.compress` and
  :func:`gradcomp.parallel.zero` then send the step again, as plain 16 bits: all workers
  see the same NaN. So the result is exact for every gradient. Such a step, also one
  with a NaN of its own, sends 28.375 bits an element: :func:`gradcomp.explain` shows
  the usual step, and :func:`gradcomp.wire_report` both. Collectives of
  :mod:`gradcomp.parallel` repeat themselves, too: there workers receive different rows,
  and each call adds a maximum of one flag. Scans refuse this codec for gradients,
  because they send none again. Wider numbers are first rounded to the nearest bfloat16,
  ties to even. A payload holds every bit of a NaN, where casts of XLA may change the
  mantissa. For bfloat16 gradients choose ``feedback=None``: there is nothing to keep.
  ``two_shot`` rounds the mean to bfloat16.

  Example:
    >>> codec = Lossless()
    >>> x = jnp.array([1.0, -0.75, 0.0, jnp.inf], jnp.bfloat16)
    >>> codec.roundtrip(x)
    Array([1, -0.75, 0, inf], dtype=bfloat16)
  """

  tile_size: ClassVar[int] = lossless.PLANES * lossless.COLUMNS
  row_words: ClassVar[int] = lossless.ROW_WORDS
  contraction = contractions.of_energy(contractions.of_floats(2.0**-7, "nearest"))
  largest: ClassVar[float] = float(jnp.finfo(jnp.bfloat16).max)

  @property
  def fallback(self) -> protocol.Codec:
    return Halves()

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    return lossless.encode_rows(tiles)

  def decode_rows(self, rows: Array) -> Array:
    return lossless.decode_rows(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halves(protocol.Codec):
  """Sends bfloat16 as it is, in tiles of :class:`Lossless`."""

  tile_size: ClassVar[int] = Lossless.tile_size
  row_words: ClassVar[int] = Lossless.tile_size // 2
  largest: ClassVar[float] = Lossless.largest

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    x = lossless.halves(tiles.reshape(-1, 2, lossless.PLANES // 2, lossless.COLUMNS))
    return pack_planes([x[:, 0], x[:, 1]], 16).reshape(-1, self.row_words)

  def decode_rows(self, rows: Array) -> Array:
    codes = unpack_planes(rows, 16)
    return lossless.numbers(codes.reshape(-1, lossless.PLANES, lossless.COLUMNS))
