"""``hierarchical``: adds inside groups first, and sends the sums between groups."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

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
  join,
  scatter,
  scatter_within,
  shares,
  split,
)
from gradcomp._src.exchange.contribution import Contribution, Total
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.exchange.protocol import Work
from gradcomp._src.exchange.two_shot import owned_loss, owned_total, place
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

  def run(self, own: Contribution, workers: Workers) -> Total:
    groups, size = self.shape(workers)
    first = _reduce_inside(own, workers, groups, size)
    second = _reduce_between(own, first, workers, groups, size)
    message = join([x.rows for x in second], 1)[0]
    gathered = gather_groups(own.layout, message, workers, self.group_size)
    rows = split(gathered, [x.rows.shape for x in second])
    lost = [
      _lost(*pair, workers, groups, size) for pair in zip(first, second, strict=True)
    ]
    return owned_total(own, rows, second, lost, workers)._replace(encoded=False)

  def work(self, sizes: tuple[int, ...], *, plain: bool) -> Work:
    count = math.prod(sizes)
    size = sizes[-1] if self.group_size is None else self.group_size
    return Work(
      encoded=Fraction(1, size) + Fraction(1, count),
      decoded=Fraction(1),
      added=Fraction(1, size),
      summed=Fraction(size - 1, size),
    )

  def shape(self, workers: Workers) -> tuple[int, int]:
    """Returns the number of groups H, and of workers in a group C.

    Raises:
      ValueError: C does not divide the number of workers, or there are not two axes.
    """
    if self.group_size is None:
      if len(axis_names(workers.axis_name)) != 2:
        raise ValueError(
          '`axis_name` must be two axes (between, inside) for exchange="hierarchical" '
          f"without a group_size, got {workers.axis_name!r}."
        )
      outer, inner = axis_names(workers.axis_name)
      return require_size(outer), require_size(inner)
    if workers.size % self.group_size:
      raise ValueError(
        f"`group_size` must divide the {workers.size} workers of "
        f"{workers.axis_name!r}, got {self.group_size}."
      )
    return workers.size // self.group_size, self.group_size


def _reduce_inside(
  own: Contribution, workers: Workers, groups: int, size: int
) -> list[Sent]:
  """Adds, over this worker's group, the rows of the H shares of its place."""
  parts = [
    shares(x, workers).reshape(groups, size, -1, *x.shape[1:]).swapaxes(0, 1)
    for x in own.addends
  ]
  lines = [_words(x.reshape(size, -1, *x.shape[3:])) for x in parts]
  received = regroup(join(lines, size), workers, groups, size, inside=True)
  number = jax.lax.axis_index(workers.axis_name)
  sent = []
  for i, (total, words) in enumerate(
    zip(own.sums, split(received, [x.shape[1:] for x in lines]), strict=True)
  ):
    addends = jax.lax.bitcast_convert_type(words, parts[i].dtype)
    partial = total.like_one(total.add_all(addends, keep=own.keep), size)
    context = own.of_partial(i, number % size, number // size)
    sent.append(total.send(partial, context, keep=own.keep))
  return sent


def _reduce_between(
  own: Contribution, inside: Sequence[Sent], workers: Workers, groups: int, size: int
) -> list[Sent]:
  """Adds the sums of all groups, for the rows of the share that this worker owns."""
  lines = [x.rows.reshape(groups, -1, x.rows.shape[1]) for x in inside]
  received = regroup(join(lines, groups), workers, groups, size, inside=False)
  sent = []
  for i, (total, rows) in enumerate(
    zip(own.sums, split(received, [x.shape[1:] for x in lines]), strict=True)
  ):
    partial = total.fold(rows, workers.scale * inside[i].scale, keep=own.keep)
    finished = total.finish(
      partial,
      own.of_whole(i),
      own.residuals[i],
      workers.size,
      keep=own.keep,
    )
    sent.append(finished)
  return sent


def _lost(
  inside: Sent, between: Sent, workers: Workers, groups: int, size: int
) -> jax.Array | None:
  """Returns the rounding errors of this worker's sums, ``float32[rows, *tile_shape]``.

  These are the sums of its group, and the sum of its share.
  """
  if inside.lost is None:
    return None
  lost = inside.lost.reshape(groups, -1, *inside.lost.shape[1:])
  of_group = place(lost, workers, size)
  of_share = owned_loss(between, workers)
  return of_group if of_share is None else of_group + of_share


def _words(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, jnp.uint32)


def regroup(
  lines: jax.Array, workers: Workers, groups: int, size: int, *, inside: bool
) -> jax.Array:
  """Sends lines inside groups, or between groups to the workers of the same place."""
  if isinstance(workers.axis_name, tuple):
    return scatter(lines, workers.axis_name[1 if inside else 0])
  if inside:
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
  else:
    members = [range(c, groups * size, size) for c in range(size)]
  return scatter_within(lines, workers.axis_name, members)


def gather_groups(
  layout: Layout, message: jax.Array, workers: Workers, group_size: int | None
) -> jax.Array:
  """Gathers each worker's message at every worker: ``[M]`` to ``[N, M]``."""
  name = final_stage(layout.elements, workers)
  if group_size is not None:
    return gather(message, workers.axis_name, name)
  # First between groups, then inside: each message goes to another group once.
  outer, inner = axis_names(workers.axis_name)
  between = gather(message, outer, STAGE)
  inside = gather(between, inner, name)  # [C, H, M]
  return inside.swapaxes(0, 1).reshape(workers.size, -1)
