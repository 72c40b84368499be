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
from gradcomp._src.codecs.sums.codes import Codes as Codes
from gradcomp._src.codecs.sums.codes import pack_sums as pack_sums
from gradcomp._src.codecs.sums.codes import packed_shape as packed_shape
from gradcomp._src.codecs.sums.codes import sum_bits as sum_bits
from gradcomp._src.codecs.sums.codes import sum_dtype as sum_dtype
from gradcomp._src.codecs.sums.codes import sum_limit as sum_limit
from gradcomp._src.codecs.sums.entries import Blocks as Blocks
from gradcomp._src.codecs.sums.entries import Chosen as Chosen
from gradcomp._src.codecs.sums.entries import Entries as Entries
from gradcomp._src.codecs.sums.entries import Floats as Floats
from gradcomp._src.codecs.sums.numbers import Numbers as Numbers
from gradcomp._src.codecs.sums.sum import LeafRows as LeafRows
from gradcomp._src.codecs.sums.sum import Partial as Partial
from gradcomp._src.codecs.sums.sum import PartialSum as PartialSum
from gradcomp._src.codecs.sums.sum import ReducibleSum as ReducibleSum
from gradcomp._src.codecs.sums.sum import RowDecoder as RowDecoder
from gradcomp._src.codecs.sums.sum import Sent as Sent
from gradcomp._src.codecs.sums.sum import Several as Several
from gradcomp._src.codecs.sums.sum import Sum as Sum
from gradcomp._src.codecs.sums.sum import SumFacts as SumFacts
from gradcomp._src.codecs.sums.sum import Way as Way
from gradcomp._src.codecs.sums.tiles import Ranged as Ranged
from gradcomp._src.codecs.sums.tiles import Tiles as Tiles
from gradcomp._src.codecs.sums.tiles import sum_in_order as sum_in_order


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
