"""Exchanges whose sums are numbers of the codec's own format (Han et al. 2021).

What crosses the wire is codes, from the first to the last stage; see ``AddingCodec``.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp import _axes
from gradcomp.codecs import Codec
from gradcomp.exchange._all_gather import all_gather
from gradcomp.exchange._collectives import (
  Workers,
  join,
  pass_on,
  scatter,
  shares,
  split,
  stacked,
)
from gradcomp.exchange._fold import Sum, compensates, fold, plus, start, sum_rows
from gradcomp.exchange._hierarchical import gather_groups, group_shape, place, regroup
from gradcomp.layout import Layout, RowDecoder, row_cutter

# What a worker lost: of all rows of each codec, float32[rows, tile_size], in scaled
# numbers; None where nobody asks.
Lost = list[jax.Array] | None


def sums_in_format(
  exchange: str,
  layout: Layout,
  matrices: Sequence[jax.Array],
  workers: Workers,
  group_size: int | None,
  *,
  keep: bool,
) -> tuple[list[RowDecoder], list[RowDecoder] | None]:
  """The sums of all workers' rows, each partial sum rounded to the codec's format.

  Every worker holds the same sums. Each addition is done, and its loss kept, by one
  worker; in ``all_gather``, where all do all, by the one whose row it adds.

  Args:
    exchange: which.
    layout: the plan that the matrices follow.
    matrices: ``uint32[rows, row_words]`` for each codec.
    workers: who exchanges.
    group_size: workers in a group, for ``hierarchical`` over one axis.
    keep: whether to return what is lost.

  Returns:
    For each codec, from rows to their sums and to what this worker lost of them, both
    in scaled numbers.

  References:
    Han et al., 2021, sections 4.2 and 5.1
  """
  if exchange == "all_gather":
    return _gathered(layout, matrices, workers, keep)
  if exchange == "ring":
    rows, lost = _ring(layout, matrices, workers, keep)
  elif exchange == "two_shot":
    rows, lost = _two_shot(layout, matrices, workers, keep)
  else:
    rows, lost = _hierarchical(layout, matrices, workers, group_size, keep)
  decoders = [_decoder(codec, x) for codec, x in zip(layout.codecs, rows, strict=True)]
  return decoders, None if lost is None else [row_cutter(x) for x in lost]


def _decoder(codec: Codec, rows: jax.Array) -> RowDecoder:
  return lambda first, stop: codec.decode_rows(rows[first:stop])


def _gathered(
  layout: Layout, matrices: Sequence[jax.Array], workers: Workers, keep: bool
) -> tuple[list[RowDecoder], list[RowDecoder] | None]:
  own = lax.axis_index(workers.axis_name)

  def total(codec: Codec, rows: jax.Array) -> RowDecoder:
    return lambda first, stop: fold(codec, rows[:, first:stop], keep=False).total

  def lost(codec: Codec, rows: jax.Array) -> RowDecoder:
    def decode(first: int, stop: int) -> jax.Array:
      kept = fold(codec, rows[:, first:stop], keep=True, counts=lambda k: k == own)
      assert kept.lost is not None
      return kept.lost

    return decode

  gathered = all_gather(layout, matrices, workers)
  pairs = list(zip(layout.codecs, gathered, strict=True))
  sums = [total(*pair) for pair in pairs]
  return sums, [lost(*pair) for pair in pairs] if keep else None


def _reduce(
  codecs: Sequence[Codec],
  lines: Sequence[jax.Array],
  exchange: Callable[[jax.Array], jax.Array],
  keep: bool,
) -> tuple[list[jax.Array], Lost]:
  """Sends a line to each of K workers, and adds those that come from them.

  Args:
    codecs: of the rows.
    lines: ``uint32[K, rows, words]`` for each codec.
    exchange: of ``[K, M]``.
    keep: whether to return what is lost.

  Returns:
    For each codec the rows of the sums, and what was lost of them.
  """
  received = exchange(join(lines, lines[0].shape[0]))
  owned = split(received, [line.shape[1:] for line in lines])
  words, lost = [], []
  for codec, rows in zip(codecs, owned, strict=True):
    encoded, error = sum_rows(codec, fold(codec, rows, keep=keep))
    words.append(encoded)
    lost.append(error)
  return words, [_flat(x) for x in lost if x is not None] if keep else None


def _flat(tiles: jax.Array) -> jax.Array:
  return tiles.reshape(tiles.shape[0], -1)


def _two_shot(
  layout: Layout, matrices: Sequence[jax.Array], workers: Workers, keep: bool
) -> tuple[list[jax.Array], Lost]:
  lines = [shares(matrix, workers) for matrix in matrices]
  words, lost = _reduce(
    layout.codecs, lines, lambda x: scatter(x, workers.axis_name), keep
  )
  rows = [stacked(x) for x in all_gather(layout, words, workers)]
  if lost is not None:
    lost = [place(x[None], workers, workers.size) for x in lost]
  return rows, lost


def _hierarchical(
  layout: Layout,
  matrices: Sequence[jax.Array],
  workers: Workers,
  group_size: int | None,
  keep: bool,
) -> tuple[list[jax.Array], Lost]:
  """Sums of groups at the owners of ``(*, c)``, then sums of those at each share's."""
  groups, size = group_shape(workers, group_size)
  parts = [shares(matrix, workers) for matrix in matrices]
  lines = [
    x.reshape(groups, size, *x.shape[1:]).swapaxes(0, 1).reshape(size, -1, x.shape[2])
    for x in parts
  ]
  inside, lost_inside = _reduce(
    layout.codecs,
    lines,
    lambda x: regroup(x, workers, groups, size, inside=True),
    keep,
  )
  between, lost_between = _reduce(
    layout.codecs,
    [x.reshape(groups, -1, x.shape[1]) for x in inside],
    lambda x: regroup(x, workers, groups, size, inside=False),
    keep,
  )
  gathered = gather_groups(layout, join(between, 1)[0], workers, group_size)
  rows = [stacked(x) for x in split(gathered, [x.shape for x in between])]
  if lost_inside is None or lost_between is None:
    return rows, None
  lost = []
  for first, second in zip(lost_inside, lost_between, strict=True):
    of_groups = place(first.reshape(groups, -1, first.shape[1]), workers, size)
    lost.append(of_groups + place(second[None], workers, workers.size))
  return rows, lost


def _ring(
  layout: Layout, matrices: Sequence[jax.Array], workers: Workers, keep: bool
) -> tuple[list[jax.Array], Lost]:
  """Sums go around, each worker adds its own; Kahan's compensations go with them."""
  n = workers.size
  parts = [shares(matrix, workers) for matrix in matrices]
  index = lax.axis_index(workers.axis_name)
  kahan = [compensates(codec) for codec in layout.codecs]

  def own(share: jax.Array) -> list[jax.Array]:
    return [lax.dynamic_index_in_dim(x, share, keepdims=False) for x in parts]

  def hop(k: jax.Array, carry: tuple) -> tuple:
    words, extra, lost = carry
    sent = [*words, *extra]
    received = pass_on(join(sent, 1), workers.axis_name, n)
    rows = [x[0] for x in split(received, [x.shape for x in sent])]
    compensations = iter(rows[len(words) :])
    share = (index - 2 - k) % n
    new_words, new_extra, new_lost = [], [], []
    for i, (codec, mine) in enumerate(zip(layout.codecs, own(share), strict=True)):
      total = codec.decode_rows(rows[i])
      so_far = start(codec, total, keep=keep)
      if kahan[i]:
        so_far = so_far._replace(compensation=codec.decode_rows(next(compensations)))
      so_far = plus(codec, so_far, codec.decode_rows(mine))
      encoded, error = sum_rows(codec, so_far)
      new_words.append(encoded)
      if kahan[i]:
        assert so_far.compensation is not None
        new_extra.append(sum_rows(codec, Sum(so_far.compensation))[0])
      if error is not None:
        error = lax.dynamic_update_index_in_dim(lost[i], _flat(error), share, 0)
        new_lost.append(error)
    return new_words, new_extra, new_lost

  words = own((index - 1) % n)
  extra = [jnp.zeros_like(x) for x, more in zip(words, kahan, strict=True) if more]
  # Like what is decoded, which may differ over other axes, too.
  lost = [
    jnp.zeros_like(codec.decode_rows(x).reshape(*x.shape[:2], codec.tile_size))
    for codec, x in zip(layout.codecs, parts, strict=True)
    if keep
  ]
  zeros = _axes.mark_varying((extra, lost), workers.axis_name)
  words, _, lost = lax.fori_loop(0, n - 1, hop, (words, *zeros))
  rows = [stacked(x) for x in all_gather(layout, words, workers)]
  return rows, [stacked(x) for x in lost] if keep else None
