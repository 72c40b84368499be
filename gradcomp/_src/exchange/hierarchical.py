"""``hierarchical``: adds inside groups first, and sends the sums between groups."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.bibliography import HAN_2021, Citation
from gradcomp._src.checks import flag, static_integer
from gradcomp._src.codecs.sums.sum import Sent, Way
from gradcomp._src.exchange.collectives import (
  STAGE,
  Workers,
  final_stage,
  gather,
  scatter,
  scatter_within,
)
from gradcomp._src.exchange.protocol import Outgoing, Received, Work
from gradcomp._src.exchange.shares import (
  finish_shares,
  join,
  owned_loss,
  owned_total,
  place,
  shares,
  split,
)
from gradcomp._src.mesh.axes import AxisName, axis_names, require_size

_GROUP_RULE = "a number of workers, 1 or more"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hierarchical:
  r"""Adds inside groups first, and sends the sums, encoded, between groups.

  There are H groups of C workers. Worker (h, c) has place c in group h, and owns one
  share.

  1. Inside its group, worker (h, c) adds the shares that the workers ``(*, c)`` own. It
     adds float32 tiles, or numbers of a codec that adds in its own format, in the order
     of the workers. This is a reduce-scatter made of an all_to_all, because no backend
     documents the order in which its own reduce-scatter adds.
  2. The worker encodes these sums of its group, and sends each to the owner of the
     share, one of the workers ``(*, c)``. The owner adds the received sums.
  3. The owners encode the means and send them to all.

  The worker that encodes a sum of its group keeps the rounding error in its residual.
  The groups round these sums by random bits that they share, as workers do in other
  exchanges, and owners round means to nearest: see :class:`TwoShot`.

  Attributes:
    group_size: the number of consecutive workers of one axis in a group. With None
      there are two axes, ``("host", "chip")``, and a group is the workers along the
      second one.
    feedback: the same as in :class:`TwoShot`.

  References:
    Han et al., `Auto-Precision Scaling for Distributed Deep Learning
    <https://arxiv.org/abs/1911.08907>`_, 2021, section 4.2
  """

  group_size: int | None = None
  feedback: bool = True

  citations: ClassVar[tuple[Citation, ...]] = (
    Citation(
      HAN_2021,
      "Groups add in float32, but where the codec adds in its own format. Owners keep "
      "what encoding means loses, unless feedback=False.",
    ),
  )
  name: ClassVar[str] = "hierarchical"
  way: ClassVar[Way] = "grouped"
  owners: ClassVar[bool] = True
  of_leaves: ClassVar[bool] = False
  sends: ClassVar[bool] = True

  def __post_init__(self) -> None:
    flag("feedback", self.feedback)
    if self.group_size is not None:
      size = static_integer("group_size", _GROUP_RULE, self.group_size, least=1)
      object.__setattr__(self, "group_size", size)

  @property
  def keeps(self) -> bool:
    return self.feedback

  def check_axes(self, axis_name: AxisName | None) -> None:
    """Raises ValueError unless there are two axes, or one that is split into groups."""
    count = 1 if self.group_size else 2
    if axis_name is not None and len(axis_names(axis_name)) != count:
      raise ValueError(
        '`axis_name` must be two axes (between, inside) for exchange="hierarchical", '
        f"or one axis with Hierarchical(group_size=), got {axis_name!r} and "
        f"group_size={self.group_size}."
      )

  def run(self, own: Outgoing, workers: Workers) -> Received:
    groups = self.groups(workers)
    inside = _reduce_inside(own, groups)
    lines = [x.rows.reshape(groups.number, -1, x.rows.shape[1]) for x in inside]
    rows = groups.exchange(lines, inside=False)
    scales = [workers.scale * x.scale for x in inside]
    between = finish_shares(own, rows, scales, workers)
    message = join([x.rows for x in between], 1)[0]
    gathered = groups.gather(message, final_stage(own.layout.elements, workers))
    shapes = [x.rows.shape for x in between]
    lost = [_lost(*pair, groups) for pair in zip(inside, between, strict=True)]
    return owned_total(own, between, lost, split(gathered, shapes), workers)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    count = math.prod(sizes)
    size = sizes[-1] if self.group_size is None else self.group_size
    return Work(
      encoded=Fraction(1, size) + Fraction(1, count),
      decoded=Fraction(1),
      added=Fraction(1, size),
      summed=Fraction(size - 1, size),
    )

  def groups(self, workers: Workers) -> "Groups":
    """Returns the groups; ValueError if the workers cannot be split into them."""
    if self.group_size is None:
      if len(axis_names(workers.axis_name)) != 2:
        raise ValueError(
          '`axis_name` must be two axes (between, inside) for exchange="hierarchical" '
          f"without a group_size, got {workers.axis_name!r}."
        )
      outer, inner = axis_names(workers.axis_name)
      return Groups(workers, require_size(outer), require_size(inner))
    if workers.size % self.group_size:
      raise ValueError(
        f"`group_size` must divide the {workers.size} workers of "
        f"{workers.axis_name!r}, got {self.group_size}."
      )
    return Groups(workers, workers.size // self.group_size, self.group_size)


class Groups(NamedTuple):
  """H groups (``number``) of C workers (``size``), by two axes or along one."""

  workers: Workers
  number: int
  size: int

  def exchange(self, parts: Sequence[jax.Array], *, inside: bool) -> list[jax.Array]:
    """Sends ``[K, ...]`` inside groups, or to the workers of the same place in others.

    K is C or H. The results are like ``parts``, a line from each worker.
    """
    axes, count, size = self.workers.axis_name, self.number, self.size
    lines = join(parts, size if inside else count)
    if isinstance(axes, tuple):
      received = scatter(lines, axes[1 if inside else 0])
    elif inside:
      members = [range(g * size, (g + 1) * size) for g in range(count)]
      received = scatter_within(lines, axes, members)
    else:
      members = [range(c, count * size, size) for c in range(size)]
      received = scatter_within(lines, axes, members)
    return split(received, [x.shape[1:] for x in parts])

  def gather(self, message: jax.Array, name: str) -> jax.Array:
    """Gathers each worker's message at every worker: ``[M]`` to ``[N, M]``."""
    axes = self.workers.axis_name
    if not isinstance(axes, tuple):
      return gather(message, axes, name)
    # First between groups, then inside: each message goes to another group once.
    between = gather(message, axes[0], STAGE)
    inside = gather(between, axes[1], name)  # [C, H, M]
    return inside.swapaxes(0, 1).reshape(self.workers.size, -1)


def _reduce_inside(own: Outgoing, groups: Groups) -> list[Sent]:
  """Adds, over this worker's group, the rows of the H shares of its place."""
  workers, count, size = groups
  words = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32)
  lines = []
  for x in own.parts:
    part = shares(x, workers).reshape(count, size, -1, *x.shape[1:]).swapaxes(0, 1)
    lines.append(words(part.reshape(size, -1, *x.shape[1:])))
  received = groups.exchange(lines, inside=True)
  number = jax.lax.axis_index(workers.axis_name)
  sent = []
  for i, (total, rows) in enumerate(zip(own.layout.sums, received, strict=True)):
    addends = jax.lax.bitcast_convert_type(rows, own.parts[i].dtype)
    partial = total.like_one(total.add_all(addends, keep=own.keep), size)
    context = own.stages[i].partial(number % size, number // size)
    sent.append(total.send(partial, context, keep=own.keep))
  return sent


def _lost(inside: Sent, between: Sent, groups: Groups) -> jax.Array | None:
  """Returns the rounding errors of this worker's sums, ``float32[rows, *tile_shape]``.

  These are the sums of its group, and the sum of its share.
  """
  if inside.lost is None:
    return None
  lost = inside.lost.reshape(groups.number, -1, *inside.lost.shape[1:])
  of_group = place(lost, groups.workers, groups.size)
  of_share = owned_loss(between, groups.workers)
  return of_group if of_share is None else of_group + of_share
