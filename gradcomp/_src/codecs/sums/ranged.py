"""Sums of tiles for codecs with rows of a smaller range than ``float32``."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.leaf import Context
from gradcomp._src.codecs.ranged import RangedCodec
from gradcomp._src.codecs.sums.sum import Partial, Sent
from gradcomp._src.codecs.sums.tiles import Tiles

_BIAS = 127  # of the exponents of float32


@dataclasses.dataclass(frozen=True)
class Ranged(Tiles):
  """Adds float32 tiles, and divides the rows of partial sums that rows cannot hold.

  A partial sum may be N times as large as the mean. Divided by N on the way, it would
  lose the smallest numbers, so each row is divided only if it must be. The power of two
  travels with it, a word a row.
  """

  codec: RangedCodec

  def hop(
    self,
    partial: Partial,
    key: jax.Array | None,
    context: Context,
    *,
    keep: bool,
  ) -> Sent:
    tiles = partial.total
    exponents = self._exponents(tiles)
    small = Partial(tiles * _power(-exponents, tiles.ndim))
    sent = self.send(small, key, context, keep=keep)
    if sent.lost is not None:
      sent = sent._replace(lost=sent.lost * _power(exponents, tiles.ndim))
    return sent._replace(riders=(exponents.astype(jnp.uint32)[:, None],))

  def add(self, received: Sent, own: jax.Array, *, keep: bool) -> Partial:
    (exponents,) = received.riders
    power = _power(exponents[:, 0].astype(jnp.int32), own.ndim)
    with jax.named_scope("gradcomp_decode"):
      tiles = self.codec.decode_rows(received.rows).reshape(own.shape)
      return Partial(tiles * power + own)

  def _exponents(self, tiles: jax.Array) -> jax.Array:
    """Returns the powers of two that rows must be divided by, ``int32[rows]``."""
    finite = jnp.where(jnp.isfinite(tiles), jnp.abs(tiles), 0.0)
    largest = jnp.max(finite.reshape(tiles.shape[0], -1), axis=1)
    found = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23
    # Less than the power of two below what rows hold needs no rounding to be seen.
    most = int(np.float32(self.codec.largest).view(np.int32)) >> 23
    return jnp.maximum(found - (most - 1), 0)


def _power(exponents: jax.Array, ndim: int) -> jax.Array:
  """Returns ``2**exponents`` of rows, in ``ndim`` axes."""
  powers = jax.lax.bitcast_convert_type((exponents + _BIAS) << 23, jnp.float32)
  return powers.reshape(-1, *[1] * (ndim - 1))
