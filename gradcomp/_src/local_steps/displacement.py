"""Each worker's displacement from the shared parameters, and its inner state."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from gradcomp._src.core.state import OwnSteps, is_own_steps
from gradcomp._src.kernels.common.fixed_point import sign_bit, signed
from gradcomp._src.mesh.axes import UnboundAxisError, bound_size, mesh_size
from gradcomp._src.mesh.specs import stack_spec
from gradcomp._src.mesh.types import is_explicit, mark_varying


def wide(x: jax.Array) -> jax.Array:
  """Returns an array in float32 or wider."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def first_own(
  params: Any, names: tuple[str, ...], init: Callable[[Any], Any]
) -> OwnSteps:
  """Creates displacements of zero and first inner states, in a map or for a whole mesh.

  UnboundAxisError if no map binds ``names``, and the mesh does not have them.
  """

  def make(params: Any) -> Any:
    moved = jax.tree.map(lambda x: jnp.zeros_like(wide(x)), params)
    return jax.tree.map(_at_least_1d, (moved, init(params)))

  if bound_size(names) is not None:
    # The inner optimizer gets the types of arrays that update will give it.
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
  """Restores the shapes of a worker's arrays, scalars included."""
  return jax.tree.map(lambda x, y: jnp.reshape(x, y.shape), tree, like)


def stored(tree: Any) -> Any:
  """Gives each scalar of a worker one axis, so that a map can stack it."""
  return jax.tree.map(_at_least_1d, tree)


def numbers_of_all(opt_state: Any, mesh: Mesh | AbstractMesh) -> Any:
  """Broadcasts numbers of ``inner`` that a user has set by hand to all workers.

  The state has each number of ``inner`` once a worker. But users set a learning rate of
  :func:`optax.inject_hyperparams` to one number.
  """

  def of_all(node: Any) -> Any:
    if not is_own_steps(node):
      return node
    ((names, (moved, inner_state)),) = node.by_axes.items()

    def stacked(x: Any) -> Any:
      if jnp.shape(x):
        return x
      x = jnp.broadcast_to(x, math.prod(mesh.shape[name] for name in names))
      sharding = NamedSharding(mesh, PartitionSpec(names))
      return jax.reshard(x, sharding) if is_explicit(mesh, names) else x

    return OwnSteps({names: (moved, jax.tree.map(stacked, inner_state))})

  return jax.tree.map(of_all, opt_state, is_leaf=is_own_steps)


def own_params(params: Any, moved: Any) -> Any:
  """Adds a worker's displacement to the parameters; ValueError for other shapes."""

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
  """Returns a product unchanged, protected from contraction with a sum to an FMA."""
  if x.dtype != jnp.float32:
    return x
  # Contracted, the product of a learning rate would be rounded in some programs only.
  return signed(jnp.abs(x), sign_bit(x))


def _at_least_1d(x: Any) -> jax.Array:
  x = jnp.asarray(x)
  return x.reshape(x.shape or (1,))
