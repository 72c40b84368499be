"""``hierarchical``: full precision inside a group, compressed between groups."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp import _axes
from gradcomp.exchange._collectives import (
  STAGE,
  Workers,
  final_stage,
  gather,
  join,
  scatter,
  scatter_within,
  shares,
  split,
  stacked,
)
from gradcomp.exchange._two_shot import encode_with_residual
from gradcomp.kernels import fold_key
from gradcomp.layout import Layout, mean_of_rows


def group_shape(workers: Workers, group_size: int | None) -> tuple[int, int]:
  """The number of groups H and of workers in a group C; ValueError if they do not fit.

  Groups are the second of two axes, or ``group_size`` consecutive workers of one.
  """
  if group_size is None:
    if len(_axes.names(workers.axis_name)) != 2:
      raise ValueError(
        '`axis_name` must be two axes (between, inside) for exchange="hierarchical" '
        f"without group_size=, got {workers.axis_name!r}."
      )
    outer, inner = _axes.names(workers.axis_name)
    return _axes.require_size(outer), _axes.require_size(inner)
  if workers.size % group_size:
    raise ValueError(
      f"`group_size` must divide the {workers.size} workers of {workers.axis_name!r}, "
      f"got {group_size}."
    )
  return workers.size // group_size, group_size


def hierarchical(
  layout: Layout,
  tiles: Sequence[jax.Array],
  workers: Workers,
  group_size: int | None,
  keys: jax.Array | None,
  residuals: Sequence[jax.Array | None],
  memory: jax.Array | None,
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array | None]]:
  r"""Sums of groups in float32, then two_shot between groups, then all_gather.

  Worker (h, c) of H groups of C first adds, in the order of the workers, the rows of
  the shares ``(*, c)`` over its group: a reduce-scatter as an all_to_all, because no
  backend says in which order its own one adds. It sends those sums, encoded, to the
  workers ``(*, c)`` of the other groups, where each owns one share, and the owners'
  encoded means go to all.

  What worker (h, c) loses, it loses of the sum of its group.

  Args:
    layout: the plan that the tiles follow.
    tiles: ``float32[rows, tile_size]`` for each codec.
    workers: who exchanges.
    group_size: workers in a group of one axis; None if the second of two axes is it.
    keys: ``uint32[codecs, 2]``; ``fold_in(key, 0)`` rounds the sums of groups and
      ``fold_in(key, 1)`` the means; or None.
    residuals: ``float32[share, tile_size]`` for each codec, or None.
    memory: of the codec that has one.

  Returns:
    For each codec the encoded means ``uint32[rows, words]``, rows padded to a multiple
    of N, the same on every worker; what this worker's first encoding lost,
    ``float32[rows, tile_size]``; and the new residuals of the second.

  References:
    Han et al., 2021, section 4.2
  """
  groups, size = group_shape(workers, group_size)
  parts = [shares(rows, workers) for rows in tiles]  # [H * C, share, width]
  shapes = [(groups, *part.shape[1:]) for part in parts]
  lines = join(parts, workers.size).reshape(groups, size, -1).swapaxes(0, 1)
  received = regroup(lines.reshape(size, -1), workers, groups, size, inside=True)
  total = received[0]
  for line in received[1:]:
    total = total + line
  sums = [
    stacked(x)
    for x in split(total.reshape(groups, -1), [shape[1:] for shape in shapes])
  ]

  sent, lost = [], []
  for i, (codec, x) in enumerate(zip(layout.codecs, sums, strict=True)):
    with jax.named_scope("gradcomp_encode"):
      sent.append(codec.encode_rows(x, key=_fold(keys, i, 0), stats=memory))
      lost.append(x - codec.decode_rows(sent[i]).reshape(x.shape))
  received = regroup(join(sent, groups), workers, groups, size, inside=False)
  owned = split(received, [(x.shape[0] // groups, x.shape[1]) for x in sent])
  means, kept = [], []
  for i, (codec, rows) in enumerate(zip(layout.codecs, owned, strict=True)):
    mean = mean_of_rows(codec, rows, workers.scale)
    words, residual = encode_with_residual(
      codec, mean, _fold(keys, i, 1), residuals[i], memory
    )
    means.append(words)
    kept.append(residual)
  gathered = gather_groups(layout, join(means, 1)[0], workers, group_size)
  result = split(gathered, [x.shape for x in means])
  return (
    [stacked(x) for x in result],
    [
      place(x.reshape(shape), workers, size)
      for x, shape in zip(lost, shapes, strict=True)
    ],
    kept,
  )


def regroup(
  lines: jax.Array, workers: Workers, groups: int, size: int, *, inside: bool
) -> jax.Array:
  """Inside groups, or between workers of the same place in different groups."""
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
  """``[N, M]``: first between groups, where each line crosses once, then inside."""
  name = final_stage(layout.elements, workers)
  if group_size is not None:
    return gather(message, workers.axis_name, name)
  outer, inner = _axes.names(workers.axis_name)
  between = gather(message, outer, STAGE)
  inside = gather(between, inner, name)  # [C, H, M]
  return inside.swapaxes(0, 1).reshape(workers.size, -1)


def place(lost: jax.Array, workers: Workers, size: int) -> jax.Array:
  """The errors of shares ``(*, c)`` among all rows, which lost nothing here.

  Args:
    lost: ``float32[groups, share, width]``.
    workers: who exchanges; this one has place c in its group.
    size: workers in a group.

  Returns:
    ``float32[groups * size * share, width]``.
  """
  groups, share, width = lost.shape
  own = lax.axis_index(workers.axis_name) % size
  mine = (jnp.arange(size) == own)[None, :, None, None]
  placed = jnp.where(mine, lost[:, None], 0.0)
  return placed.reshape(groups * size * share, width)


def _fold(keys: jax.Array | None, i: int, number: int) -> jax.Array | None:
  return None if keys is None else fold_key(keys[i], number)
