"""Makes and reads what each worker keeps of its own steps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradcomp.kernels.fixed_point import sign_bit, signed
from gradcomp.state import OwnSteps
from gradcomp.workers import (
  UnboundAxisError,
  bound_size,
  mark_varying,
  mesh_size,
  stack_spec,
)


def wide(x: jax.Array) -> jax.Array:
  """Returns an array in float32 or wider."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def first_own(
  params: Any, names: tuple[str, ...], init: Callable[[Any], Any]
) -> OwnSteps:
  """Makes what workers keep before the first step, in a map or for all of a mesh.

  Args:
    params: the parameters, whole along the axes.
    names: the axes of the workers.
    init: of the optimizer of each worker.

  Raises:
    UnboundAxisError: no map binds the axes, and the mesh does not have them.
  """

  def make(params: Any) -> Any:
    moved = jax.tree.map(lambda x: jnp.zeros_like(wide(x)), params)
    return jax.tree.map(_at_least_1d, (moved, init(params)))

  if bound_size(names) is not None:
    # What is in the optimizer shall see types as update will have them.
    own = make(mark_varying(params, names))
    return OwnSteps({names: mark_varying(own, names)})
  if mesh_size(names) is None:
    raise UnboundAxisError(
      f"`axis_name` must be an axis that init can count, and {names} is not bound "
      "here, so that nobody knows how many workers have parameters of their own; call "
      "optimizer.init under jax.set_mesh(mesh), or inside the map.",
      names,
    )
  mapped = jax.shard_map(
    make,
    in_specs=PartitionSpec(),
    out_specs=stack_spec(names, PartitionSpec()),
    axis_names=set(names),
    check_vma=False,
  )
  return OwnSteps({names: jax.jit(mapped)(params)})


def shaped_like(tree: Any, like: Any) -> Any:
  """Returns what a worker keeps in the shapes that it had, also scalars."""
  return jax.tree.map(lambda x, y: jnp.reshape(x, y.shape), tree, like)


def stored(tree: Any) -> Any:
  """Returns what a worker keeps with at least one axis, so that a map can stack it."""
  return jax.tree.map(_at_least_1d, tree)


def own_params(params: Any, moved: Any) -> Any:
  """Returns a worker's own parameters.

  Raises:
    ValueError: ``moved`` has other shapes, like those of all workers together.
  """

  def add(path: Any, x: jax.Array, step: jax.Array) -> jax.Array:
    if step.shape != (x.shape or (1,)):
      raise ValueError(
        f"`opt_state` must be that of one worker, whose own steps of "
        f"{jax.tree_util.keystr(path)} have the shape {x.shape or (1,)}, got "
        f"{step.shape}; call this inside the map, or in a loss that is given to "
        "gradcomp.value_and_grad, and make the state by optimizer.init inside the map "
        "or under jax.set_mesh(mesh)."
      )
    return (wide(x) + step.reshape(x.shape)).astype(x.dtype)

  return jax.tree_util.tree_map_with_path(add, params, moved)


def rounded_product(x: jax.Array) -> jax.Array:
  """Returns an array as it is, but no compiler contracts what made it with a sum.

  Else the product of a learning rate would be rounded in some programs alone.
  """
  if x.dtype != jnp.float32:
    return x
  return signed(jnp.abs(x), sign_bit(x))


def _at_least_1d(x: Any) -> jax.Array:
  x = jnp.asarray(x)
  return x.reshape(x.shape or (1,))
