"""The choice of each leaf's codec, and of the leaves that are too small to compress."""

import math
from collections.abc import Sequence

import jax

from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.protocol import Codec, LeafCodec
from gradcomp._src.codecs.sums.records import Leaf

# Grubic 2018, section 3.2.2: small matrices stay in full precision, as long as more
# than 99 % of all parameters are quantized. Half of that 1 % is taken here, because 1 %
# in float32 would add 8 % to a 4-bit message.
_DENSE_SHARE = 0.005
_DENSE_SHARE_OF_SPARSE = 0.0001


def leaf_codecs(
  leaves: Sequence[Leaf], codec: LeafCodec, *, min_leaf_size: int | None = None
) -> list[Codec]:
  """Binds a codec to each leaf. Small leaves get ``Dense(float32)``.

  A leaf is small if it has fewer than ``min_leaf_size`` elements. By default, the small
  leaves are the smallest ones, which together hold less than 0.5 % of all elements, or
  less than 0.01 % with a sparse codec. A leaf also stays dense if its payload would not
  be smaller. With a codec that adds in its own format, it stays dense only if its
  payload would be larger.

  Example:
    >>> leaves = [Leaf((512,)), Leaf((512, 512))]
    >>> [type(x).__name__ for x in leaf_codecs(leaves, gradcomp.codecs.OneBit())]
    ['Dense', 'OneBit']
  """
  sizes = [leaf.size for leaf in leaves]
  least = {
    drops: default_min_leaf_size(sizes, drops=drops)
    if min_leaf_size is None
    else min_leaf_size
    for drops in (False, True)
  }
  result = []
  for leaf in leaves:
    bound = codec.bind(leaf)
    facts = bound.facts
    rounds = bound.rounds(leaf.shape)
    words = sum(_words(x.codec, math.prod(x.shape)) for x in rounds)
    dense = _words(Dense(), leaf.size)
    saves = words < dense or (words == dense and facts.in_format)
    large = leaf.size >= least[facts.drops]
    result.append(bound if large and saves else Dense())
  return result


def leaf_rows(codec: Codec, leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
  """Returns the number of rows that a leaf fills."""
  return -(-leaf.size // codec.tile_size) if leaf.size else 0


def _words(codec: Codec, size: int) -> int:
  """Returns the number of words in the rows of ``size`` elements."""
  return -(-size // codec.tile_size) * codec.row_words if size else 0


def default_min_leaf_size(sizes: Sequence[int], *, drops: bool = False) -> int:
  """Returns the smallest size of a leaf that is compressed.

  All smaller leaves together hold less than 0.5 % of all elements. With a sparse codec
  they hold less than 0.01 %, because they would be most of the message otherwise. The
  size does not depend on the density, so that it stays when a schedule changes that.

  Example:
    >>> default_min_leaf_size([10, 64, 100_000, 50_000])
    50000
    >>> default_min_leaf_size([300, 300])
    300
  """
  allowed = (_DENSE_SHARE_OF_SPARSE if drops else _DENSE_SHARE) * sum(sizes)
  passed = 0
  for size in sorted(sizes):
    passed += size
    if passed >= allowed:
      return size
  return 0
