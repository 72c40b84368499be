"""Says how the payloads of a codec add up, and how their sums travel."""

from typing import cast

from gradcomp.codecs import (
  Codec,
  Dense,
  DroppingCodec,
  LeafCodec,
  LinearCodec,
  Policy,
  RoundsCodec,
  SparseCodec,
  is_adding,
  is_ranged,
  is_shared,
)
from gradcomp.sums._blocks import Blocks as Blocks
from gradcomp.sums._codes import Codes as Codes
from gradcomp.sums._codes import pack_sums as pack_sums
from gradcomp.sums._codes import packed_shape as packed_shape
from gradcomp.sums._codes import sum_bits as sum_bits
from gradcomp.sums._codes import sum_dtype as sum_dtype
from gradcomp.sums._codes import sum_limit as sum_limit
from gradcomp.sums._entries import Entries as Entries
from gradcomp.sums._numbers import Numbers as Numbers
from gradcomp.sums._order import sum_in_order as sum_in_order
from gradcomp.sums._ranged import Ranged as Ranged
from gradcomp.sums._several import Several as Several
from gradcomp.sums._sum import LeafRows as LeafRows
from gradcomp.sums._sum import Partial as Partial
from gradcomp.sums._sum import PartialSum as PartialSum
from gradcomp.sums._sum import ReducibleSum as ReducibleSum
from gradcomp.sums._sum import RowDecoder as RowDecoder
from gradcomp.sums._sum import Sent as Sent
from gradcomp.sums._sum import Sum as Sum
from gradcomp.sums._sum import SumFacts as SumFacts
from gradcomp.sums._sum import Way as Way
from gradcomp.sums._tiles import Tiles as Tiles
from gradcomp.sums._values import Chosen as Chosen
from gradcomp.sums._values import Floats as Floats


def facts(codec: LeafCodec) -> SumFacts:
  """Returns the facts about a codec's sums; for a policy, those of all its codecs.

  Example:
    >>> facts(gradcomp.codecs.Policy([(".", gradcomp.codecs.TopK())])).drops
    True
  """
  if isinstance(codec, Policy):
    return Several(tuple(facts(part) for part in codec.codecs))
  return of(codec)


def of(codec: LeafCodec) -> Sum:
  """Returns the sum of a codec's payloads.

  Example:
    >>> type(of(gradcomp.codecs.Ternary())).__name__  # workers share its scale
    'Codes'
    >>> type(of(gradcomp.codecs.OneBit())).__name__
    'Tiles'
  """
  if isinstance(codec, RoundsCodec):
    return of(codec.inner)
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


def every(codec: LeafCodec) -> tuple[Sum, ...]:
  """Returns the sums of a codec; of a policy those of all its codecs."""
  parts = codec.codecs if isinstance(codec, Policy) else (codec,)
  return tuple(map(of, parts))
