"""Which exchange: what can be asked for, what "auto" takes, and what it costs."""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np

from gradcomp import sums
from gradcomp._axes import AxisName
from gradcomp.codecs import Codec, LinearCodec, is_adding, is_shared
from gradcomp.exchange._all_gather import AllGather
from gradcomp.exchange._all_reduce import AllReduce
from gradcomp.exchange._exchange import Exchange
from gradcomp.exchange._hierarchical import Hierarchical
from gradcomp.exchange._local import Local
from gradcomp.exchange._ring import Ring
from gradcomp.exchange._two_shot import TwoShot
from gradcomp.layout import Layout
from gradcomp.sums import packed_shape, sum_dtype

ExchangeName = Literal[
  "auto", "all_gather", "two_shot", "psum", "ring", "hierarchical", "local"
]

# Below this many bytes from all workers together, a second stage costs more in latency
# than it saves: two messages of 64 KiB take 1 ms at 1 Gbit/s, a stage about 0.1 ms.
_TINY_MESSAGE = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto:
  """The exchange that fits a message: see :func:`choose`.

  Attributes:
    feedback: of :class:`TwoShot`, where that is what fits.
  """

  feedback: bool = True

  name: ClassVar[str] = "auto"
  sends: ClassVar[bool] = True

  def __post_init__(self) -> None:
    TwoShot(feedback=self.feedback)

  @property
  def keeps(self) -> bool:
    return self.feedback


_SHORT_FORMS: dict[str, Callable[[], Any]] = {
  kind.name: kind
  for kind in (Auto, AllGather, TwoShot, AllReduce, Ring, Hierarchical, Local)
}


def as_exchange(given: Any) -> Auto | Exchange:
  """Returns an exchange as it is, or the one of a short form, with its defaults.

  Raises:
    ValueError: it is neither.

  Example:
    >>> as_exchange("two_shot")
    TwoShot(feedback=True)
  """
  if isinstance(given, str) and given in _SHORT_FORMS:
    return _SHORT_FORMS[given]()
  if not isinstance(given, type) and isinstance(given, Auto | Exchange):
    return given
  raise ValueError(
    f"`exchange` must be one of {tuple(_SHORT_FORMS)}, or an exchange like "
    f"gradcomp.exchange.TwoShot(), got {given!r}."
  )


def check_exchange(
  exchange: Auto | Exchange, codec: Codec, axis_name: AxisName | None
) -> None:
  """Raises ValueError for what the codec's sums or the axes do not allow."""
  if isinstance(exchange, Auto):
    return
  refusal = sums.of(codec).refusals.get(exchange.way)
  if refusal:
    raise ValueError(f'`exchange` must not be "{exchange.name}" for {refusal}')
  exchange.check_axes(axis_name)


class Choice(NamedTuple):
  """An exchange, and why."""

  exchange: Exchange
  reason: str


def choose(exchange: Auto | Exchange, layout: Layout, workers: int) -> Choice:
  """Returns the exchange behind ``Auto()``; one that was asked for as it is.

  1. Where every leaf is dense float32 there is nothing to encode: ``psum``.
  2. Sums that a backend can add are added by it: ``psum``. Or, of codes, by owners, if
     their packed sums are shorter: ``two_shot``.
  3. Up to two workers, where the bytes are equal, and for messages that are tiny:
     ``all_gather``, which encodes once. A worker sends ``(N-1) c`` bytes by it. Also
     for sparse codecs, whose owners would drop what other workers chose, as long as it
     sends less than a plain mean.
  4. Else ``two_shot``: ``2 (N-1)/N c`` bytes, whatever N is, for a second encoding.

  ``ring`` sends as much as ``two_shot`` and encodes N times; ``hierarchical`` needs to
  know which links are fast. They are for those who ask for them.
  """
  if not isinstance(exchange, Auto):
    return Choice(exchange, "asked for")
  every = [sums.of(codec) for codec in layout.codecs]
  coded = [total for total in every if not total.plain]
  owned = TwoShot(feedback=exchange.feedback)
  if not coded:
    return Choice(AllReduce(), "all is dense float32, and there is nothing to encode")
  if not any("reduced" in total.refusals for total in coded):
    if not all(total.exact for total in coded):
      return Choice(
        AllReduce(), "all workers send the same elements, whose values are added"
      )
    added, packed = (bytes_sent(e, layout, workers) for e in (AllReduce(), owned))
    if added <= packed:
      return Choice(AllReduce(), "sums of codes are exact, and integers send less")
    return Choice(owned, "sums of codes are exact, and packed they send less")
  if any(total.drops for total in coded):
    dense = Fraction(8 * (workers - 1), workers) * layout.elements
    if bytes_sent(AllGather(), layout, workers) < dense:
      return Choice(AllGather(), "it adds up what all workers chose, in one encoding")
  return reencoding(exchange, layout, workers)


def reencoding(exchange: Auto | Exchange, layout: Layout, workers: int) -> Choice:
  """Returns the exchange by the rules 3 and 4."""
  if workers <= 2:
    return Choice(AllGather(), "up to two workers it sends no more, and encodes once")
  if workers * layout.nbytes <= _TINY_MESSAGE:
    return Choice(AllGather(), "the message is tiny, and a second stage takes longer")
  return Choice(TwoShot(feedback=exchange.keeps), "it sends 2/N of all_gather's bytes")


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
  if exchange.name == "local":
    return [Fraction(0) for _ in layout.slots]
  result = []
  for like, (group, start, stop) in zip(layout.like, layout.slots, strict=True):
    codec, rows = layout.codecs[group], layout.rows[group]
    if exchange.name == "psum" and not codec.shares_stats:
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
  if exchange.name == "psum" and is_shared(codec):
    width = sum_dtype(codec, workers).itemsize
    return 2 * (n - 1) / n * rows * codec.tile_size * width
  if exchange.name == "all_gather":
    return (n - 1) * rows * row
  second = (n - 1) * share * row
  if exchange.name == "two_shot" and is_shared(codec):
    sums, words = packed_shape(codec, workers, share)
    second = (n - 1) * sums * 4 * words
  if exchange.name == "hierarchical":
    inside, groups = Fraction(group_size), n / group_size
    dense = (inside - 1) * groups * share * inside_row
    return dense + (groups - 1) * share * row + second
  first = (n - 1) * share * row
  if exchange.name == "ring" and is_adding(codec) and codec.accumulate == "kahan":
    first *= 2
  return first + second


def _stats_bytes(codec: Codec, like: jax.ShapeDtypeStruct, workers: int) -> Fraction:
  """What the maximum of a leaf's statistics adds: an all-reduce."""
  if not codec.shares_stats:
    return Fraction(0)
  assert is_shared(codec) or is_adding(codec)
  stats = jax.eval_shape(codec.stats, like)
  return Fraction(2 * (workers - 1), workers) * stats.dtype.itemsize * stats.size
