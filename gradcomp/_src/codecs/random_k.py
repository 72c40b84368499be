"""Random-k: sends a random element of every stride, the same one on all workers."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src import checks
from gradcomp._src.codecs import protocol, sparse
from gradcomp._src.codecs.sums.records import Context, Encoded
from gradcomp._src.codecs.sums.sum import Sum
from gradcomp._src.codecs.sums.tiles import Chosen
from gradcomp._src.kernels.common.dithers import threefry2x32


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomK(sparse.SparseRows):
  r"""Sends one random element of every ``stride`` consecutive ones, as it is.

  .. math:: Q(v)_i = v_i \text{ with probability } 1 / \mathrm{stride}, \quad
     0 \text{ otherwise}

  with ``stride = ceil(n / ceil(density * n))``. It is the control experiment for
  :class:`TopK`: the difference is the gain of choosing large elements. All workers
  share the key, and so the choice. With ``exchange="psum"`` only the values are added,
  as a dense array of k numbers.

  A payload has 32 bits for each stride, and 64 a row for the key, which ``psum`` does
  not send. A row that holds a NaN or an infinity sends NaN for each of its values.

  The codec is biased, as :class:`TopK` is. Values ``stride`` times as large would be
  unbiased, with a variance of ``stride - 1`` times the squared length.

  Attributes:
    density: the share of the elements to send, above 0 and at most 1: one of every
      ``1 / density`` consecutive ones. Default: 0.001.
    range_size: consecutive elements of a row, from 1 to 2**30. None for whole leaves,
      or for 2, 4, 8, ... parts of longer ones. Default: None.

  Example:
    >>> codec = RandomK(density=0.25)
    >>> x = jnp.arange(1.0, 9.0)
    >>> sent = codec.decode(codec.encode(x, key=jax.random.key(0)), like=x)
    >>> [int((part != 0).sum()) for part in (sent[:4], sent[4:])]
    [1, 1]

  References:
    Stich et al., `Sparsified SGD with memory <https://arxiv.org/abs/1809.07599>`_,
    2018, section 2
  """

  density: float = checks.field(0.001, sparse.DENSITY)
  range_size: int | None = checks.field(None, sparse.RANGE)

  papers: ClassVar[tuple[str, ...]] = ("stich2018memory",)
  needs_key: ClassVar[bool] = True
  header_words: ClassVar[int] = 2  # of the key

  @property
  def contraction(self) -> float:
    return 1 / math.ceil(1 / self.density)

  @property
  def sums(self) -> Sum:
    return Chosen(self)

  @property
  def row_words(self) -> int:
    return self.header_words + self.slots

  @property
  def slots(self) -> int:
    """The entries of a row, one for each stride; the last stride may be cut short."""
    return -(-self.tile_size // self._stride)

  @property
  def _stride(self) -> int:
    return -(-self.tile_size // sparse.sent_of(self.density, self.tile_size)) or 1

  def encode_leaf(self, x: Array, context: Context, *, keep: bool = False) -> Encoded:
    """Encodes a leaf, and its residual, which has zeros in the chosen places."""
    tiles = protocol.to_tiles(x, self)
    rows = self.encode_rows(tiles, context)
    if not keep:
      return Encoded(rows)
    positions, values = self.entries(rows)
    row = jnp.arange(tiles.shape[0])[:, None]
    rest = tiles.at[row, positions].add(-values, mode="drop", unique_indices=True)
    return Encoded(rows, protocol.from_tiles(rest, x, self))

  def encode_rows(self, tiles: Array, context: Context) -> Array:
    tiles = tiles.reshape(-1, self.tile_size)
    assert context.key is not None  # it needs one
    keys = self.header(context.key, tiles.shape[0])
    positions = self._positions(keys)
    # A NaN that is not drawn must be seen, too: all values of its row are NaN.
    finite = jnp.isfinite(tiles).all(axis=1, keepdims=True)
    tiles = jnp.where(finite, tiles, jnp.nan)
    values = jnp.take_along_axis(tiles, positions, axis=1, mode="fill", fill_value=0)
    words = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.concatenate([keys, words], axis=1)

  def header(self, key: Array, rows: int) -> Array:
    """Derives a key for each row, so that rows decode one by one: ``[rows, 2]``."""
    number = jnp.arange(rows, dtype=jnp.uint32)
    return jnp.stack(threefry2x32(key, (number, number)), axis=1)

  def entries(self, rows: Array) -> tuple[Array, Array]:
    keys, words = rows[..., : self.header_words], rows[..., self.header_words :]
    return self._positions(keys), jax.lax.bitcast_convert_type(words, jnp.float32)

  def _positions(self, keys: Array) -> Array:
    """Draws positions, ``int32[..., slots]``, from keys, ``uint32[..., 2]``."""
    # The last may lie beyond a row. The remainder of a random 32-bit number prefers an
    # element by at most `stride / 2**32` of its share.
    slot = jnp.arange(self.slots, dtype=jnp.uint32)
    key = jnp.moveaxis(keys[..., None], -2, 0)
    bits, _ = threefry2x32(key, (slot, jnp.zeros_like(slot)))
    position = slot * jnp.uint32(self._stride) + bits % jnp.uint32(self._stride)
    return position.astype(jnp.int32)
