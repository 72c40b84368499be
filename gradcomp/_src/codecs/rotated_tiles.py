"""Rotation of tiles, which spreads a large element over its bucket."""

import jax

from gradcomp._src.codecs.scaling import bucket_words
from gradcomp._src.kernels.common import rotation
from gradcomp._src.kernels.common.planes import planes_per_word


class RotatedTiles:
  """A base of codecs that may rotate their tiles: see :class:`RotatingCodec`."""

  bits: int
  bucket_size: int | None
  rotate: int | None

  def rotated(self, tiles: jax.Array) -> jax.Array:
    """Rotates tiles, ``float32[rows, tile_size]``, if ``rotate`` is a number."""
    if self.rotate is None:
      return tiles
    return rotation.rotate(self._planes(tiles), self.rotate).reshape(tiles.shape)

  def unrotated(self, tiles: jax.Array) -> jax.Array:
    """Undoes :meth:`rotated` for tiles, or sums of tiles, of one or two axes each."""
    if self.rotate is None:
      return tiles
    return rotation.unrotate(self._planes(tiles), self.rotate).reshape(tiles.shape)

  def _planes(self, tiles: jax.Array) -> jax.Array:
    """Returns tiles as planes: ``float32[rows, P, B]``."""
    shape = (planes_per_word(self.bits), bucket_words(self.bucket_size))
    return tiles.reshape(tiles.shape[0], *shape)
