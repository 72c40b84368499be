"""The work and the collectives of a step, from shapes, without a trace."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.sums.records import NOTHING
from gradcomp._src.codecs.sums.sum import Partial
from gradcomp._src.cost.exchange import Leaves
from gradcomp._src.exchange import collectives, hierarchical
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.exchange.protocol import Message
from gradcomp._src.report import reader
from gradcomp._src.report.collectives import Collective, connected, plain_bytes

_Shape = jax.ShapeDtypeStruct


def sent_by(
  plan: MessagePlan, sizes: tuple[int, ...]
) -> tuple[Leaves, list[Collective], Fraction]:
  """Returns a step's leaves and collectives, and the bytes that fit codecs in some."""
  leaves, found = [], list[Collective]()
  for number, message in reversed(list(enumerate(plan.messages))):
    work = message.exchange.work(sizes, plain=message.layout.plain)
    for i in message.leaves:
      leaves.append((plan.codecs[i], plan.leaves[i].size, work, plan.feedback))
    if message.exchange.sends and message.layout.elements:
      every = _collectives(message, sizes)
      found += [dataclasses.replace(x, message=number) for x in every]
  # Workers add up the counts of each codec that is fitted, once for all its leaves.
  fits = {x: x.fits for x in plan.codecs if plan.sends}
  tile = lambda codec: _Shape((codec.tile_size,), jnp.float32)
  counts = [jax.eval_shape(y.count, tile(x)).size for x, y in fits.items() if y]
  return leaves, found, plain_bytes(sum(counts), plan.workers)


def _collectives(message: Message, sizes: tuple[int, ...]) -> Iterator[Collective]:
  """Yields the collectives of a message, as the stages of its exchange call them."""
  layout, exchange, n = message.layout, message.exchange, math.prod(sizes)
  codecs, sums, rows, way = layout.codecs, layout.sums, layout.rows, exchange.way
  share = [-(-x // n) for x in rows]
  words = [x.row_words for x in codecs]
  matrix = lambda rows, words: _Shape((rows, words), jnp.uint32)
  # Statistics of leaves that workers take the maximum of, in one array.
  pairs = [(layout.codec_of(i), x.shape) for i, x in enumerate(layout.like)]
  each = {x: jax.eval_shape(x[0].agree, _Shape(x[1], jnp.float32)) for x in {*pairs}}
  if agreed := [each[x] for x in pairs if each[x] is not None]:
    size = sum(x.size for x in agreed)
    yield _one("all-reduce", n, n, _Shape((size,), jnp.result_type(*agreed)))
  if way == "gathered":
    yield _one("all-gather", n, n, _line(rows, words))
  elif way == "reduced":
    terms = lambda total, x: jax.eval_shape(lambda rows: total.terms(rows, n), x)
    added = map(terms, sums, map(matrix, rows, words))
    yield _one("all-reduce", n, n, *(layout.like if layout.plain else added))
  elif way == "passed":
    riding = [a + x.rider_words for a, x in zip(words, sums, strict=True)]
    if n > 1:
      yield _one("collective-permute", n, n, _line(share, riding), times=n - 1)
    yield _one("all-gather", n, n, _line(share, words))
  else:
    groups = n
    if way == "grouped":
      groups, size = sizes
      wide = [x.row_words if x.facts.of_rows else x.tile_size for x in codecs]
      pieces = hierarchical.pieces_of(layout.elements, max(share))
      for k in range(pieces):
        cut = [groups * (x * (k + 1) // pieces - x * k // pieces) for x in share]
        yield from _scattered(size, size, _line(cut, wide))
    yield from _scattered(groups, n, _line(share, words))
    owned = []
    for total, given in zip(sums, map(matrix, share, words), strict=True):
      if total.facts.exact:  # others are encoded again, to rows like these
        finish = lambda x, own=total: own.finish(
          Partial(own.unpacked(x)), NOTHING, n, keep=False
        )
        given = jax.eval_shape(finish, given).rows
      owned.append(given.size)
    line = _line(owned, [1] * len(owned))
    yield _one("all-gather", groups, n, line)
    if way == "grouped":
      yield _one("all-gather", size, size, _Shape((groups, *line.shape), jnp.uint32))


def _scattered(workers: int, span: int, line: _Shape) -> Iterator[Collective]:
  """Yields the collectives that send a line to each worker, see `scatter`."""
  if workers <= 2 or not collectives.over_gloo():
    yield _one("all-to-all", workers, span, _Shape((workers, *line.shape), jnp.uint32))
    return
  parts, schedule = collectives.rounds(workers)
  piece = _Shape((-(-line.shape[0] // parts), *line.shape[1:]), jnp.uint32)
  for to, _ in schedule:
    cycle = max(map(len, connected(list(enumerate(to)))))
    yield _one("collective-permute", cycle, span, piece)


def _line(rows: Sequence[int], words: Sequence[int]) -> _Shape:
  """Returns the line that holds rows of words, by their numbers for each codec."""
  return _Shape(collectives.form(sum(map(int.__mul__, rows, words))), jnp.uint32)


def _one(kind: str, n: int, span: int, *operands: _Shape, times: int = 1) -> Collective:
  """Returns a collective of n workers, of operands of integers or floats."""
  at: Any = reader.Place(times=times)._asdict() | {"operands": reader.spelled(operands)}
  return Collective(kind=kind, workers=n, span=span, **at)
