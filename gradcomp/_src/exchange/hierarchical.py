"""``hierarchical``: adds inside groups first, and sends the sums between groups."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src import checks
from gradcomp._src.codecs.sums.sum import Partial, Sent, Way
from gradcomp._src.exchange import collectives, protocol
from gradcomp._src.exchange.protocol import Exchange, Received, Sending, Stage, Work
from gradcomp._src.mesh.axes import AxisName, axis_names, require_size
from gradcomp._src.mesh.study import PARTS, note

_GROUP = checks.integer("a number of workers, 1 or more", 1)

# The most messages of rows inside a group, and the fewest elements of each: less needs
# little memory, and each message takes a latency.
_MOST_PIECES, _PIECE_ELEMENTS = 8, 2**20

# The encoded sums of a worker: of its group, and of the share that it owns.
_Sums = tuple[Sequence[Sent], Sequence[Sent]]


def pieces_of(elements: int, share: int) -> int:
  """Returns the number of messages that a group sends one after the other."""
  # Else a worker would hold all lines that it sends and all that it receives, which
  # take a gradient each. It adds a piece of each share before it sends the next one.
  return max(1, min(_MOST_PIECES, elements // _PIECE_ELEMENTS, share))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hierarchical(Exchange, checks.Checked):
  """Adds inside groups first, and sends the sums, encoded, between groups.

  There are H groups of C workers. Worker (h, c) has place c in group h, and owns one
  share.

  1. Inside its group, worker (h, c) adds the shares that the workers ``(*, c)`` own, as
     float32 tiles, or as numbers of a codec that adds in its own format, in the order
     of the workers. An all_to_all sends them, because no backend documents the order in
     which its own reduce-scatter adds.
  2. The worker encodes these sums of its group, by random bits that the groups share,
     and sends each to its owner, one of the workers ``(*, c)``. Its residual keeps the
     rounding error. The owner adds the received sums.
  3. The owners encode the means and send them to all, as in :class:`TwoShot`.

  Attributes:
    group_size: the number of consecutive workers of one axis in a group, 1 or more.
      With None there are two axes, ``("host", "chip")``, with groups along the second.
    feedback: the same as in :class:`TwoShot`.

  References:
    Han et al., `APS <https://arxiv.org/abs/1911.08907>`_, 2021, section 4.2
  """

  group_size: int | None = checks.field(None, checks.optional(_GROUP))
  feedback: bool = checks.field(True, checks.FLAG)

  papers: ClassVar[tuple[str, ...]] = ("han2021aps",)
  name: ClassVar[str] = "hierarchical"
  way: ClassVar[Way] = "grouped"
  owners: ClassVar[bool] = True
  of_leaves: ClassVar[bool] = False

  def check_axes(self, axis_name: AxisName | None) -> None:
    """Raises ValueError unless there are two axes, or one that is split into groups."""
    count = 1 if self.group_size else 2
    if axis_name is not None and len(axis_names(axis_name)) != count:
      raise ValueError(
        '`axis_name` must be two axes (between, inside) for exchange="hierarchical", '
        f"or one axis with Hierarchical(group_size=), got {axis_name!r} and "
        f"group_size={self.group_size}."
      )

  @property
  def stages(self) -> tuple[Stage, ...]:
    """The additions inside groups and between them, and the sends of sums to all."""
    stages = self._add_inside, self._add_between, self._gather
    return stages if self.group_size else (*stages, self._gather_inside)

  def groups(self, workers: collectives.Workers) -> tuple[int, int]:
    """Returns the counts of groups and of workers in each; ValueError for no groups."""
    self.check_axes(workers.axis_name)
    if self.group_size is None:
      number, size = map(require_size, axis_names(workers.axis_name))
      return number, size
    if workers.size % self.group_size:
      raise ValueError(
        f"`group_size` must divide the {workers.size} workers of "
        f"{workers.axis_name!r}, got {self.group_size}."
      )
    return workers.size // self.group_size, self.group_size

  def _exchange(self, own: Sending, message: jax.Array, *, inside: bool) -> jax.Array:
    """Sends a line each inside groups, or to the workers of one place."""
    axes, (number, size) = own.workers.axis_name, self.groups(own.workers)
    if isinstance(axes, tuple):
      return collectives.scatter(message, axes[1 if inside else 0])
    members = [range(c, number * size, size) for c in range(size)]
    if inside:
      members = [range(g * size, (g + 1) * size) for g in range(number)]
    return collectives.scatter_within(message, axes, members)

  def _add_inside(self, own: Sending, _: None) -> list[Sent]:
    """Adds, over this worker's group, the rows of the shares of its place."""
    workers, sums = own.workers, own.layout.sums
    number, size = self.groups(workers)
    share = [-(-rows // workers.size) for rows in own.layout.rows]
    pieces = pieces_of(own.layout.elements, max(share))
    added: list[list[Partial]] = []
    for k in range(pieces):
      ends = [(n * k // pieces, n * (k + 1) // pieces) for n in share]
      message = _lines(own, number, size, share, ends)
      pairs = list(zip(own.adjacent, ends, strict=True))
      shapes = [(number * (b - a), *rows[0].shape[1:]) for rows, (a, b) in pairs]
      note((PARTS, tuple(size * math.prod(shape) for shape in shapes)))
      message = self._exchange(own, message, inside=True)
      received = collectives.split(message, [(math.prod(shape),) for shape in shapes])
      added.append([])
      for i, (words, shape) in enumerate(zip(received, shapes, strict=True)):
        tiles = words.reshape(size, *shape)
        addends = lax.bitcast_convert_type(tiles, own.adjacent[i][0].dtype)
        added[-1].append(sums[i].add_all(addends, keep=own.keep))

    def joined(*parts: jax.Array) -> jax.Array:
      """Joins all pieces, of the share of each group one after the other."""
      each = [x.reshape(number, len(x) // number, *x.shape[1:]) for x in parts]
      return lax.collapse(jnp.concatenate(each, axis=1), 0, 2)

    worker, sent = lax.axis_index(workers.axis_name), []
    for i, (total, first) in enumerate(zip(sums, added[0], strict=True)):
      partial: Partial = first
      if pieces > 1:
        arrays = jax.tree.map(joined, *[x[i][:3] for x in added])
        partial = Partial(*arrays)._replace(scale=first.scale)
      partial = total.like_one(partial, size)
      context = own.of_sum(i, worker % size, worker // size)
      sent.append(total.send(partial, context, keep=own.keep))
    return sent

  def _add_between(self, own: Sending, inside: list[Sent]) -> _Sums:
    """Adds, at the owner of each share, the sums of all groups."""
    number, _ = self.groups(own.workers)
    parts = [x.rows.reshape(number, -1, x.rows.shape[1]) for x in inside]
    send = functools.partial(self._exchange, own, inside=False)
    scales = [own.workers.scale * x.scale for x in inside]
    rows = protocol.exchanged(parts, send)
    return inside, protocol.finish_shares(own, rows, scales)

  def _gather(self, own: Sending, sums: _Sums) -> Received | tuple[_Sums, jax.Array]:
    """Sends each worker's line to all, or along the first of two axes."""
    workers = own.workers
    rows = [x.rows[None] for x in sums[1]]
    line = collectives.join(collectives.in_turn(rows, own.before))[0]
    if self.group_size is None:
      outer, _ = axis_names(workers.axis_name)
      return sums, collectives.gather(line, outer, collectives.STAGE)
    name = collectives.final_stage(own.layout.completed, workers)
    return self._total(own, sums, collectives.gather(line, workers.axis_name, name))

  def _gather_inside(self, own: Sending, found: tuple[_Sums, jax.Array]) -> Received:
    sums, between = found
    _, inner = axis_names(own.workers.axis_name)
    name = collectives.final_stage(own.layout.completed, own.workers)
    inside = collectives.gather(between, inner, name, axis=1)  # [C, H, M, ...]
    # XLA:TPU makes one gather of the two, and only the next operation names it.
    with jax.named_scope(name):
      gathered = inside.swapaxes(0, 1).reshape(own.workers.size, *between.shape[1:])
    return self._total(own, sums, gathered)

  def _total(self, own: Sending, sums: _Sums, gathered: jax.Array) -> Received:
    """Returns the sums of all workers, by their words, ``[N, M, ...]``."""
    workers, (number, size) = own.workers, self.groups(own.workers)
    lost: list[jax.Array | None] = [None] * len(sums[1])
    for i, (inside, between) in enumerate(zip(*sums, strict=True)):
      if inside.lost is not None:
        errors = inside.lost.reshape(number, -1, *inside.lost.shape[1:])
        placed = collectives.place(errors, workers, size)
        if between.lost is not None:
          placed += collectives.place(between.lost[None], workers, workers.size)
        lost[i] = placed
    rows = collectives.split(gathered, [x.rows.shape for x in sums[1]])
    return protocol.owned_total(own, sums[1], lost, rows)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    count = math.prod(sizes)
    size = sizes[-1] if self.group_size is None else self.group_size
    part, whole = Fraction(1, size), Fraction(1)
    return Work(part + Fraction(1, count), whole, added=part, summed=whole - part)


def _lines(
  own: Sending,
  number: int,
  size: int,
  share: Sequence[int],
  ends: Sequence[tuple[int, int]],
) -> jax.Array:
  """Returns the words between ``ends`` of each share, a line for each place."""
  words_of = lambda x: lax.bitcast_convert_type(x, jnp.uint32)
  if all(len(rows) == 1 for rows in own.adjacent):
    # XLA cuts them where the rows are: a stack of lines would hold a gradient more.
    cut = []
    for (whole,), (start, stop) in zip(own.adjacent, ends, strict=True):
      every = collectives.shares(whole, own.workers)
      each = lax.slice_in_dim(every, start, stop, axis=1)
      places = each.reshape(number, size, *each.shape[1:]).swapaxes(0, 1)
      cut.append(lax.collapse(words_of(places), 1))
    return collectives.join(cut)
  # XLA takes a line that is joined by itself as it is. Of lines that are cut from one
  # array of all leaves it would hold that array, too.
  lines = []
  for place in range(size):
    parts = []
    for rows, length, (start, stop) in zip(own.adjacent, share, ends, strict=True):
      cut = [rows[0][:0]]  # of a short matrix a message may have no row
      for group in range(number):
        first = (group * size + place) * length
        cut += _rows_of(rows, first + start, first + stop)
      parts.append(jnp.concatenate([words_of(x).reshape(-1) for x in cut])[None])
    lines.append(collectives.join(parts)[0])
  return jnp.stack(lines)


def _rows_of(rows: Sequence[jax.Array], start: int, stop: int) -> list[jax.Array]:
  """Returns the rows ``[start, stop)`` of adjacent arrays, zeros after the last."""
  cut, first = [], 0
  for x in rows:
    a, b = max(start - first, 0), min(stop - first, len(x))
    if a < b:
      cut.append(lax.slice_in_dim(x, a, b))
    first += len(x)
  zeros = stop - max(start, first)
  if zeros > 0:
    cut.append(jnp.zeros((zeros, *rows[0].shape[1:]), rows[0].dtype))
  return cut
