"""Sums: how the payloads of each codec are added, and how their sums travel."""

from typing import cast

from gradcomp._src.codecs.dense import Dense
from gradcomp._src.codecs.policy import Policy
from gradcomp._src.codecs.protocol import (
  Codec,
  LeafCodec,
  is_adding,
  is_ranged,
  is_shared,
)
from gradcomp._src.codecs.rounds import RoundsCodec
from gradcomp._src.codecs.sparse import DroppingCodec, LinearCodec, SparseCodec
from gradcomp._src.codecs.sums.codes import Codes
from gradcomp._src.codecs.sums.entries import Blocks, Chosen, Entries, Floats
from gradcomp._src.codecs.sums.numbers import Numbers
from gradcomp._src.codecs.sums.sum import Several, Sum, SumFacts
from gradcomp._src.codecs.sums.tiles import Ranged, Tiles


def facts_of(codec: LeafCodec) -> SumFacts:
  """Returns the facts about a codec's sums; for a policy, about all its codecs' sums.

  Example:
    >>> facts_of(gradcomp.codecs.Policy([(".", gradcomp.codecs.TopK())])).drops
    True
  """
  if isinstance(codec, Policy):
    return Several(tuple(facts_of(part) for part in codec.codecs))
  return sum_of(codec)


def sum_of(codec: LeafCodec) -> Sum:
  """Returns the sum of a codec's payloads.

  Example:
    >>> type(sum_of(gradcomp.codecs.Ternary())).__name__  # workers share its scale
    'Codes'
    >>> type(sum_of(gradcomp.codecs.OneBit())).__name__
    'Tiles'
  """
  if isinstance(codec, RoundsCodec):
    return sum_of(codec.inner)
  if is_adding(codec):
    return Numbers(codec)
  if is_shared(codec):
    return Codes(codec)
  if isinstance(codec, LinearCodec):
    return Chosen(codec)
  if isinstance(codec, SparseCodec):
    return Entries(codec)
  if isinstance(codec, DroppingCodec):
    return Blocks(codec)
  if is_ranged(codec):
    return Ranged(codec)
  rows = cast(Codec, codec)  # compress makes sure of that
  return Floats(rows) if rows == Dense() else Tiles(rows)


def sums_of(codec: LeafCodec) -> tuple[Sum, ...]:
  """Returns the sum of a codec's payloads; for a policy, the sums of all its codecs."""
  parts = codec.codecs if isinstance(codec, Policy) else (codec,)
  return tuple(map(sum_of, parts))
