"""Feedback adds what was not sent to what comes next, with or without momentum."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gradcomp import _axes, _whole, explicit
from gradcomp._axes import AxisName
from gradcomp.codecs import Codec, working_dtype
from gradcomp.kernels.fixed_point import scaled

Own = dict[str, Any]  # arrays by the axes that stack them, joined by commas


class OwnShapes(Protocol):
  """A function that returns the shapes of what a worker keeps besides its residuals."""

  def __call__(
    self,
    leaves: Sequence[jax.ShapeDtypeStruct],
    others: Sequence[tuple[str, ...]],
    workers: int | None,
  ) -> dict[str, Any]: ...


def zero_state(
  params: Any, axis_name: AxisName | None, trees: int, own_shapes: OwnShapes
) -> tuple[list[Any], Own]:
  """Makes the zeros of all that differs between workers.

  Inside the map, or without any, they are the worker's own, shaped like the leaf.
  Outside it, under a mesh that has the axis, they are the global arrays: the workers'
  stacked on their first axis, and sharded over it.

  Args:
    params: the leaves.
    axis_name: the axes of the workers.
    trees: the number of trees like the leaves, float32 and at least 1-d.
    own_shapes: returns trees of ``jax.ShapeDtypeStruct`` by the axes that stack them.

  Returns:
    The trees like the leaves, and the other arrays by the axes that stack them.
  """
  leaves, treedef = jax.tree.flatten(params)
  names = () if axis_name is None else _axes.names(axis_name)
  bound = _axes.bound_size(names) if names else None
  on_mesh = _axes.mesh_size(names) if names and bound is None else None
  mesh = jax.sharding.get_abstract_mesh() if on_mesh else explicit.mesh_of(leaves)
  specs = [
    explicit.placed_spec(leaf) if on_mesh else explicit.typed_spec(leaf)
    for leaf in leaves
  ]
  others = [explicit.other_axes(leaf, axis_name) for leaf in leaves]
  # The second stage is planned from what update will see. That is a part of a leaf if
  # types say so, but the whole of one that Auto axes cut.
  seen = [_part(leaf, explicit.typed_spec(leaf), mesh) for leaf in leaves]
  owned = own_shapes(seen, others, bound or on_mesh)
  parts = [_part(leaf, spec, mesh) for leaf, spec in zip(leaves, specs, strict=True)]

  def local() -> tuple[list[list[jax.Array]], Own]:
    like = [
      [
        _zeros(jax.ShapeDtypeStruct(part.shape or (1,), jnp.float32), (*names, *axes))
        for part, axes in zip(parts, others, strict=True)
      ]
      for _ in range(trees)
    ]
    return like, {
      axes: jax.tree.map(functools.partial(_zeros, axes=axes.split(",")), shapes)
      for axes, shapes in owned.items()
    }

  cut = frozenset().union(*map(explicit.sharded, specs))
  if not on_mesh and not cut:
    like, own = local()
    return [jax.tree.unflatten(treedef, tree) for tree in like], own
  if on_mesh:
    specs = [explicit.stacked(names, spec) for spec in specs]
  inside = frozenset(mesh.axis_names) if on_mesh else cut
  own_specs = {axes: explicit.stacked_over(axes.split(","), inside) for axes in owned}
  mapped = jax.shard_map(
    local,
    in_specs=(),
    out_specs=([specs] * trees, own_specs),
    axis_names=set(inside),
    check_vma=not on_mesh,
  )
  like, own = jax.jit(mapped)()
  return [jax.tree.unflatten(treedef, tree) for tree in like], own


def _part(leaf: Any, spec: PartitionSpec, mesh: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape of one device's part of a leaf."""
  shape = getattr(leaf, "shape", ())
  if explicit.sharded(spec):
    shape = NamedSharding(mesh, spec).shard_shape(shape)
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def _zeros(like: jax.ShapeDtypeStruct, axes: Sequence[str]) -> jax.Array:
  """Returns zeros, typed as different over those of the axes that maps have bound."""
  bound = tuple(name for name in axes if name and _axes.bound_size(name) is not None)
  zeros = jnp.zeros(like.shape, like.dtype)
  return _axes.mark_varying(zeros, bound) if bound else zeros


class Momentum(NamedTuple):
  """The momentum that each worker has of its own gradients, before the exchange."""

  decay: float
  nesterov: bool

  def sent(self, updates: Any, momentum: Any) -> Any:
    """Returns what a step shall send: ``u'``, or ``m u' + g`` after Nesterov.

    The new momentum is ``u' = m u + g``. All are float32.
    """
    with jax.named_scope("gradcomp_correct"):
      accumulated = _add(updates, momentum, self.decay)
      if self.nesterov:
        return _add(updates, accumulated, self.decay)
      return accumulated

  def accumulated(self, updates: Any, momentum: Any) -> Any:
    """Returns the new momentum ``u'``, in the shapes of the old.

    The barrier has it computed again, from the same numbers. It would otherwise take a
    gradient's memory from the encoding to the end of the exchange.
    """
    with jax.named_scope("gradcomp_correct"):
      updates, momentum = jax.lax.optimization_barrier((updates, momentum))
      accumulated = _add(updates, momentum, self.decay)
    return jax.tree.map(lambda x, old: x.reshape(old.shape), accumulated, momentum)


def _add(updates: Any, tree: Any, factor: float) -> Any:
  """Returns ``factor * tree + updates``, float32.

  Product and sum are each rounded, so that all modes have the same bits.
  """
  return jax.tree.map(
    lambda g, x: scaled(x.reshape(g.shape), factor) + g.astype(jnp.float32),
    updates,
    tree,
  )


def correct(updates: Any, residual: Any, codec: Codec) -> Any:
  """Returns the gradient plus the residual, or the gradient if there is none.

  Both are in the dtype that an exchange with the codec adds.
  """

  def add(g: jax.Array, residual: jax.Array | None = None) -> jax.Array:
    wide = g.astype(working_dtype(codec, g.dtype))
    if residual is None:
      return wide
    return residual.reshape(g.shape).astype(wide.dtype) + wide

  with jax.named_scope("gradcomp_correct"):
    return jax.tree.map(add, updates, *([] if residual is None else [residual]))


def check_own(
  name: str, tree: Any, updates: Any, axis_name: AxisName | None, workers: int
) -> None:
  """Raises ValueError for a worker's own tree that is not like its gradient.

  Args:
    name: the field of the state.
    tree: its value, or None.
    updates: the gradients.
    axis_name: the axes to average over.
    workers: N.
  """

  def check(path: Any, update: jax.Array, leaf: jax.Array) -> None:
    shape = update.shape or (1,)
    if leaf.shape != shape:
      raise ValueError(
        f"`state.{name}`{jax.tree_util.keystr(path)} must have the gradient's shape "
        f"{shape} here, got {leaf.shape}{_made_for(leaf.shape, shape, workers)}; "
        "inside a map, pass the state through with gradcomp.state_specs, and make it "
        "by optimizer.init inside the map or under jax.set_mesh(mesh)."
        f"{_parts(shape, leaf.shape, axis_name)}"
      )

  if tree is not None:
    jax.tree_util.tree_map_with_path(check, updates, tree)


def _parts(
  part: tuple[int, ...], whole: tuple[int, ...], axis_name: AxisName | None
) -> str:
  """Returns what to do if a gradient has the shape of a part of its residual."""
  if len(part) != len(whole) or axis_name is None:
    return ""
  longer = [(a, b) for a, b in zip(part, whole, strict=True) if a != b]
  if len(longer) != 1 or not longer[0][0] or longer[0][1] % longer[0][0]:
    return ""
  return (
    f" If the gradient is that of a part of the parameter, cut over {axis_name!r}, "
    f"{_whole.CURE}. If it is cut over another axis, make the state by "
    "gradcomp.init_state."
  )


def _made_for(got: tuple[int, ...], expected: tuple[int, ...], workers: int) -> str:
  """Returns for how many workers residuals were stacked, if their part tells it."""
  if got[1:] != expected[1:] or not expected[0] or (workers * got[0]) % expected[0]:
    return ""
  count = workers * got[0] // expected[0]
  several = "s" if count > 1 else ""
  return f": as if made for {count} worker{several}, not for {workers}"


def remainder(unsent: jax.Array, mean: jax.Array, old: jax.Array) -> jax.Array:
  """Returns the new residual: what was not sent, or the old one if that is not finite.

  The old one also stays where the mean is not finite. So a gradient that is not finite,
  and its whole bucket with it, is never kept. And of that bucket no worker counts as
  sent what nobody can use.
  """
  with jax.named_scope("gradcomp_residual"):
    finite = jnp.isfinite(unsent) & jnp.isfinite(mean)
    new = unsent.reshape(old.shape).astype(old.dtype)
    return jnp.where(finite.reshape(old.shape), new, old)


def keep_momentum(
  momentum: jax.Array,
  old: jax.Array,
  mean: jax.Array,
  unsent: jax.Array,
  *,
  chosen: jax.Array | None,
) -> jax.Array:
  """Returns the new momentum, which is zero where a sparse codec sent something.

  So what was sent is not sent again as momentum of what is old. The old momentum stays
  where something is not finite.

  Args:
    momentum: the momentum with this step's gradient.
    old: the momentum without it.
    mean: the mean of all workers.
    unsent: what this worker did not send.
    chosen: the positions in the flat leaf where a sparse codec sent something, or at
      least the leaf's size; None if the codec sends all elements.
  """

  def finite(mean: jax.Array, unsent: jax.Array) -> jax.Array:
    # A codec that sends all elements makes the mean NaN wherever one is not finite. To
    # look at what was not sent, too, XLA would have to copy the residual first.
    both = jnp.isfinite(mean)
    return both if chosen is None else both & jnp.isfinite(unsent)

  with jax.named_scope("gradcomp_residual"):
    kept = jnp.where(finite(mean, unsent).reshape(old.shape), momentum, old)
    if chosen is None:
      return kept
    # Zeros are written one by one into the old momentum's memory, without a mask. A
    # flat view of it would be a copy.
    mean, unsent = (x.reshape(-1).at[chosen].get(mode="clip") for x in (mean, unsent))
    place = jnp.where(finite(mean, unsent), chosen, old.size)
    return kept.at[_index(place, old.shape)].set(0.0, mode="drop")


def _index(place: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
  """Returns the index of positions in a flat array; of its size, one out of bounds."""
  index = []
  for size in reversed(shape[1:]):
    index.append(place % size)
    place = place // size
  return (place, *reversed(index))
