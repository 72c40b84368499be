"""Which exchange: what can be asked for, and what "auto" takes."""

from typing import Literal, NamedTuple, get_args

from gradcomp._axes import AxisName
from gradcomp._checks import static_integer
from gradcomp.codecs import (
  Codec,
  Dense,
  LinearCodec,
  SelectingCodec,
  SparseCodec,
  is_shared,
)
from gradcomp.exchange._sums import packed_shape, sum_dtype
from gradcomp.layout import Layout

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
    if workers == 1 or _integers_send_less(layout, workers):
      return Choice("psum", "sums of codes are exact, and integers send less")
    return Choice("two_shot", "sums of codes are exact, and packed they send less")
  if any(isinstance(codec, LinearCodec) for codec in layout.codecs):
    return Choice("psum", "all workers send the same elements, whose values are added")
  if any(isinstance(codec, SparseCodec) for codec in layout.codecs):
    if workers * layout.nbytes < 8 * layout.elements:
      return Choice("all_gather", "it adds up what all workers chose, in one encoding")
  return reencoding(layout, workers)


def reencoding(layout: Layout, workers: int) -> Choice:
  """Rules 3 and 4."""
  if workers <= 2:
    return Choice("all_gather", "up to two workers it sends no more, and encodes once")
  if workers * layout.nbytes <= _TINY_MESSAGE:
    return Choice("all_gather", "the message is tiny, and a second stage takes longer")
  return Choice("two_shot", "it sends 2/N of all_gather's bytes")


def _integers_send_less(layout: Layout, workers: int) -> bool:
  """Whether an all-reduce of integers sends no more than packed codes and sums.

  Either sends ``(N-1)/N`` of what is counted here, and the statistics.
  """
  integers = packed = 0
  for codec, rows in zip(layout.codecs, layout.rows, strict=True):
    if is_shared(codec):
      share = -(-rows // workers)
      sums, words = packed_shape(codec, workers, share)
      width = sum_dtype(codec, workers).itemsize
      integers += 2 * rows * codec.tile_size * width
      packed += 4 * workers * (share * codec.row_words + sums * words)
  return integers <= packed
