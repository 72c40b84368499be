"""The work and the collectives of a step, from shapes, without a trace."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.sums.records import NOTHING
from gradcomp._src.codecs.sums.sum import Partial, Sum
from gradcomp._src.exchange import collectives, hierarchical, lines
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.exchange.protocol import Message, Work
from gradcomp._src.report import reader
from gradcomp._src.report.collectives import Collective, connected, plain_bytes

_Shape = jax.ShapeDtypeStruct


class Coded(NamedTuple):
  """The work on a leaf, as a LeafPlan has it."""

  codec: Codec
  elements: int
  work: Work
  keeps: bool  # whether workers keep a residual


class Sent(NamedTuple):
  """A step of one worker: its leaves and collectives, and the bytes that fit codecs."""

  leaves: Sequence[Coded] = ()
  collectives: Sequence[Collective] = ()
  fitting: Fraction = Fraction(0)  # only in some steps

  @property
  def bytes_sent(self) -> int:
    """The bytes that the worker sends in a step, at most, rounded up."""
    each = (x.times * x.exact_bytes_sent for x in self.collectives)
    return math.ceil(sum(each, self.fitting))


def sent_by(plan: MessagePlan, sizes: tuple[int, ...]) -> Sent:
  """Returns a worker's step over axes of these sizes, as :func:`explain` traces it."""
  leaves: list[Coded] = []
  found: list[Collective] = []
  for number, message in reversed(list(enumerate(plan.messages))):
    work = message.exchange.work(sizes, plain=message.layout.plain)
    for i in message.leaves:
      leaves.append(Coded(plan.codecs[i], plan.leaves[i].size, work, plan.feedback))
    if message.exchange.sends and message.layout.elements:
      every = _collectives(message, sizes)
      found += [dataclasses.replace(x, message=number) for x in every]
  # Workers add up the counts of each codec that is fitted, once for all its leaves.
  fits = {x: x.fits for x in plan.codecs if plan.sends}
  tile = lambda codec: _Shape((codec.tile_size,), jnp.float32)
  counts = [jax.eval_shape(y.count, tile(x)).size for x, y in fits.items() if y]
  return Sent(leaves, found, plain_bytes(sum(counts), plan.workers))


def _one(kind: str, n: int, span: int, *operands: _Shape, times: int = 1) -> Collective:
  """Returns a collective of n workers, of operands of integers or floats."""
  at: Any = reader.Place(times=times)._asdict() | {"operands": reader.spelled(operands)}
  return Collective(kind=kind, workers=n, span=span, **at)


def _collectives(message: Message, sizes: tuple[int, ...]) -> Iterator[Collective]:
  """Yields the collectives of a message, as the stages of its exchange call them."""
  layout, exchange, n = message.layout, message.exchange, math.prod(sizes)
  codecs, sums, rows, way = layout.codecs, layout.sums, layout.rows, exchange.way
  share = [-(-x // n) for x in rows]
  words = [x.row_words for x in codecs]
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
    added = map(terms, sums, map(_matrix, rows, codecs))
    yield _one("all-reduce", n, n, *(layout.like if layout.plain else added))
  elif way == "passed":
    riding = [a + x.rider_words for a, x in zip(words, sums, strict=True)]
    if n > 1:
      yield _one("collective-permute", n, n, _line(share, riding), times=n - 1)
    yield _one("all-gather", n, n, _line(share, words))
  elif way == "owned":
    yield from _scattered(n, n, _line(share, words))
    yield _one("all-gather", n, n, _owned(sums, codecs, share, n))
  else:
    groups, size = sizes
    wide = [x.row_words if x.facts.of_rows else x.tile_size for x in codecs]
    pieces = hierarchical.pieces_of(layout.elements, max(share))
    for k in range(pieces):
      cut = [groups * (x * (k + 1) // pieces - x * k // pieces) for x in share]
      yield from _scattered(size, size, _line(cut, wide))
    yield from _scattered(groups, n, _line(share, words))
    line = _owned(sums, codecs, share, n)
    yield _one("all-gather", groups, n, line)
    yield _one("all-gather", size, size, _Shape((groups, *line.shape), jnp.uint32))


def _owned(
  sums: Sequence[Sum], codecs: Sequence[Codec], share: Sequence[int], workers: int
) -> _Shape:
  """Returns the line of an owner's sums."""

  def rows_of(total: Sum, given: _Shape) -> _Shape:
    if not total.facts.exact:  # they are encoded again, to rows like these
      return given
    rest = NOTHING, workers
    finish = lambda x: total.finish(Partial(total.unpacked(x)), *rest, keep=False).rows
    return jax.eval_shape(finish, given)

  sent = map(rows_of, sums, map(_matrix, share, codecs))
  return _line([x.size for x in sent], [1] * len(sums))


_matrix = lambda rows, codec: _Shape((rows, codec.row_words), jnp.uint32)


def _line(rows: Sequence[int], words: Sequence[int]) -> _Shape:
  """Returns the line that holds rows of words, by their numbers for each codec."""
  return _Shape(lines.form(sum(map(int.__mul__, rows, words))), jnp.uint32)


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
