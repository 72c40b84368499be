"""Which exchange: what can be asked for, what "auto" takes, and what it costs."""

from fractions import Fraction
from typing import Literal, NamedTuple, get_args

import jax
import numpy as np

from gradcomp._axes import AxisName
from gradcomp._checks import static_integer
from gradcomp.codecs import (
  Codec,
  Dense,
  LinearCodec,
  SelectingCodec,
  SparseCodec,
  is_adding,
  is_shared,
)
from gradcomp.layout import Layout
from gradcomp.sums import packed_shape, sum_dtype

Exchange = Literal[
  "auto", "all_gather", "two_shot", "psum", "ring", "hierarchical", "local"
]

# Below this many bytes from all workers together, a second stage costs more in latency
# than it saves: two messages of 64 KiB take 1 ms at 1 Gbit/s, a stage about 0.1 ms.
_TINY_MESSAGE = 1 << 16

_GROUP_RULE = "a number of workers, 1 or more"


def check_exchange(
  exchange: str, codec: Codec, axis_name: AxisName | None, group_size: int | None
) -> None:
  """ValueError for an unknown name, and for what the codec or the axes do not allow."""
  if exchange not in get_args(Exchange):
    raise ValueError(
      f"`exchange` must be one of {get_args(Exchange)}, got {exchange!r}."
    )
  if exchange == "psum" and codec.adds:
    raise ValueError(
      '`exchange` must not be "psum" for a codec that adds in its own format, which no '
      f'backend does, got {codec}; use exchange="auto", "two_shot" or "ring".'
    )
  sparse = isinstance(codec, SparseCodec)
  if sparse and exchange == "ring":
    raise ValueError(
      '`exchange` must not be "ring" for a sparse codec, which would choose anew among '
      f'the elements of every partial sum, got {codec}; use "two_shot", whose owners '
      "choose once."
    )
  if isinstance(codec, LinearCodec) and exchange in ("two_shot", "hierarchical"):
    raise ValueError(
      f'`exchange` must not be "{exchange}" for a codec that sends the same elements '
      f'from all workers, got {codec}: their sums need no second encoding; use "psum".'
    )
  reuses = isinstance(codec, SelectingCodec) and codec.reuses
  if reuses and exchange == "hierarchical":
    raise ValueError(
      '`exchange` must not be "hierarchical" for a codec that uses thresholds again, '
      f'got {codec}: what is encoded there are sums of groups; use selection="auto".'
    )
  if exchange == "psum" and not codec.summable and not isinstance(codec, LinearCodec):
    raise ValueError(
      '`exchange` must not be "psum" for a codec whose codes cannot be added, got '
      f'{codec}; use exchange="auto", a codec that shares its scale '
      "(share_scale=True), or gradcomp.dense() for the plain mean."
    )
  if exchange in ("ring", "hierarchical") and is_shared(codec):
    raise ValueError(
      f'`exchange` must not be "{exchange}" for a codec that shares its scale, because '
      f"partial sums are encoded again with scales of their own, got {codec}; use "
      '"psum", whose sums are exact, or share_scale=False.'
    )
  if group_size is not None:
    group_size = static_integer("group_size", _GROUP_RULE, group_size)
    if group_size < 1:
      raise ValueError(f"`group_size` must be {_GROUP_RULE}, got {group_size}.")
  two_axes = isinstance(axis_name, tuple) and len(axis_name) == 2
  one_axis = isinstance(axis_name, str) or (
    isinstance(axis_name, tuple) and len(axis_name) == 1
  )
  if exchange == "hierarchical":
    if axis_name is not None and not (
      (two_axes and group_size is None) or (one_axis and group_size is not None)
    ):
      raise ValueError(
        '`axis_name` must be two axes (between, inside) for exchange="hierarchical", '
        f"or one axis with group_size=, got {axis_name!r} and group_size={group_size}."
      )
  elif group_size is not None:
    raise ValueError(
      f'`group_size` must be None unless exchange="hierarchical", got {group_size} '
      f"with {exchange!r}."
    )


class Choice(NamedTuple):
  """An exchange, and why."""

  exchange: Exchange
  reason: str


def choose(exchange: Exchange, layout: Layout, workers: int) -> Choice:
  """The exchange behind ``"auto"``; one that was asked for as it is.

  1. Where every leaf is dense float32 there is nothing to encode: ``psum``.
  2. A codec that shares its statistics has exact sums: ``psum`` or ``two_shot``,
     whichever sends less. Of one that sends the same elements from all workers, the
     values are added: ``psum``.
  3. Up to two workers, where the bytes are equal, and for messages that are tiny:
     ``all_gather``, which encodes once. A worker sends ``(N-1) c`` bytes by it. Also
     for other sparse codecs, whose owners would drop what other workers chose, as long
     as it sends less than a plain mean.
  4. Else ``two_shot``: ``2 (N-1)/N c`` bytes, whatever N is, for a second encoding.

  ``ring`` sends as much as ``two_shot`` and encodes N times; ``hierarchical`` needs to
  know which links are fast. They are for those who ask for them.
  """
  if exchange != "auto":
    return Choice(exchange, "asked for")
  if all(codec == Dense() for codec in layout.codecs):
    return Choice("psum", "all is dense float32, and there is nothing to encode")
  if any(is_shared(codec) for codec in layout.codecs):
    psum, two_shot = (bytes_sent(e, layout, workers) for e in ("psum", "two_shot"))
    if psum <= two_shot:
      return Choice("psum", "sums of codes are exact, and integers send less")
    return Choice("two_shot", "sums of codes are exact, and packed they send less")
  if any(isinstance(codec, LinearCodec) for codec in layout.codecs):
    return Choice("psum", "all workers send the same elements, whose values are added")
  if any(isinstance(codec, SparseCodec) for codec in layout.codecs):
    dense = Fraction(8 * (workers - 1), workers) * layout.elements
    if bytes_sent("all_gather", layout, workers) < dense:
      return Choice("all_gather", "it adds up what all workers chose, in one encoding")
  return reencoding(layout, workers)


def reencoding(layout: Layout, workers: int) -> Choice:
  """Rules 3 and 4."""
  if workers <= 2:
    return Choice("all_gather", "up to two workers it sends no more, and encodes once")
  if workers * layout.nbytes <= _TINY_MESSAGE:
    return Choice("all_gather", "the message is tiny, and a second stage takes longer")
  return Choice("two_shot", "it sends 2/N of all_gather's bytes")


def bytes_sent(
  exchange: Exchange, layout: Layout, workers: int, group_size: int = 1
) -> Fraction:
  """What one of N workers sends, and receives, for a message; as the HLO says it.

  With c the bytes of a payload, of whole rows and N equal shares, and f those of the
  same rows as float32:

  ================  =====================================================
  ``all_gather``    ``(N-1) c``
  ``two_shot``      ``(N-1)/N (c + c2)``; c2 = c, or the bytes of exact sums
  ``ring``          ``2 (N-1)/N c``
  ``hierarchical``  ``(C-1)/C f + (H-1)/H (c/C) + (N-1)/N c``
  ``psum``          ``2 (N-1)/N`` times the integers, or the float32 elements
  ================  =====================================================

  Statistics that workers share add an all-reduce of their own. With a codec that adds
  in its own format, f is c, and Kahan's compensation doubles the first half of a ring.

  Args:
    exchange: not ``"auto"``.
    layout: of the message.
    workers: N.
    group_size: C, for ``hierarchical``; the number of groups H is N / C.
  """
  return sum(bytes_by_leaf(exchange, layout, workers, group_size), Fraction(0))


def bytes_by_leaf(
  exchange: Exchange, layout: Layout, workers: int, group_size: int = 1
) -> list[Fraction]:
  """:func:`bytes_sent` for each leaf; rows that fill up shares count for all alike."""
  if exchange == "local":
    return [Fraction(0) for _ in layout.slots]
  result = []
  for like, (group, start, stop) in zip(layout.like, layout.slots, strict=True):
    codec, rows = layout.codecs[group], layout.rows[group]
    if exchange == "psum" and not codec.shares_stats:
      sent = like.size
      if any(isinstance(other, LinearCodec) for other in layout.codecs):
        header = codec.header_words if isinstance(codec, LinearCodec) else 0
        sent = (stop - start) * (codec.row_words - header)
      size = 8 if like.dtype == np.float64 else 4  # half precision is added in float32
      result.append(Fraction(2 * (workers - 1), workers) * size * sent)
      continue
    inside = _inside_row(layout, codec)
    total = _codec_bytes(exchange, codec, rows, workers, group_size, inside)
    stats = _stats_bytes(codec, like, workers)
    result.append(stats + (total * (stop - start) / rows if rows else 0))
  return result


def inside_bytes(layout: Layout, workers: int, group_size: int) -> Fraction:
  """Of ``hierarchical``'s bytes, those that stay inside a group of two axes' second."""
  total = Fraction(0)
  for codec, rows in zip(layout.codecs, layout.rows, strict=True):
    share = -(-rows // workers)
    dense = _inside_row(layout, codec) * Fraction(workers, group_size)
    gathered = 4 * codec.row_words * Fraction(workers, group_size)
    total += (group_size - 1) * share * (dense + gathered)
  return total


def _inside_row(layout: Layout, codec: Codec) -> int:
  """Bytes of a row inside groups: of float32, or of codes where codecs add those."""
  adding = any(is_adding(codec) for codec in layout.codecs)
  return 4 * (codec.row_words if adding else codec.tile_size)


def _codec_bytes(
  exchange: Exchange,
  codec: Codec,
  rows: int,
  workers: int,
  group_size: int,
  inside_row: int,
) -> Fraction:
  """What the rows of one codec add."""
  n = Fraction(workers)
  share = -(-rows // workers)
  row = 4 * codec.row_words
  if exchange == "psum" and is_shared(codec):
    width = sum_dtype(codec, workers).itemsize
    return 2 * (n - 1) / n * rows * codec.tile_size * width
  if exchange == "all_gather":
    return (n - 1) * rows * row
  second = (n - 1) * share * row
  if exchange == "two_shot" and is_shared(codec):
    sums, words = packed_shape(codec, workers, share)
    second = (n - 1) * sums * 4 * words
  if exchange == "hierarchical":
    inside, groups = Fraction(group_size), n / group_size
    dense = (inside - 1) * groups * share * inside_row
    return dense + (groups - 1) * share * row + second
  first = (n - 1) * share * row
  if exchange == "ring" and is_adding(codec) and codec.accumulate == "kahan":
    first *= 2
  return first + second


def _stats_bytes(codec: Codec, like: jax.ShapeDtypeStruct, workers: int) -> Fraction:
  """What the maximum of a leaf's statistics adds: an all-reduce."""
  if not codec.shares_stats:
    return Fraction(0)
  assert is_shared(codec) or is_adding(codec)
  stats = jax.eval_shape(codec.stats, like)
  return Fraction(2 * (workers - 1), workers) * stats.dtype.itemsize * stats.size
