"""Computes the abstract global state of an optimizer for any number of workers."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import ShapedArray
from jax.sharding import (
  AbstractMesh,
  Mesh,
  NamedSharding,
  PartitionSpec,
  use_abstract_mesh,
)
from jax.tree_util import KeyPath, keystr

from gradcomp._src.checkpoint.specs import state_specs
from gradcomp._src.checks import static_integer
from gradcomp._src.core.state import collects, states_in
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.mesh.axes import AxisName, abstract_mesh, axis_names
from gradcomp._src.mesh.specs import (
  is_spec,
  names_by_axis,
  restrict_spec,
  sharded_axes,
  spec_of,
)
from gradcomp._src.mesh.types import mesh_of, typed_spec
from gradcomp._src.report.tracing import first_plans

WORKERS_RULE = "a number of workers, 1 or more"


class FirstState(NamedTuple):
  """The shapes, specs and plans of the global state before the first step."""

  shapes: Any  # of each global array, in the structure of the state
  specs: Any  # the ``PartitionSpec`` of each
  plans: list[MessagePlan | None]  # of each CompressState; None if no trace shows it
  sizes: dict[str, int]  # of the axes of the mesh


def state_shapes(
  optimizer: optax.GradientTransformation,
  params: Any,
  *,
  axis_name: AxisName,
  workers: int,
  param_specs: Any = None,
) -> Any:
  """Returns the shapes of an optimizer's global state over N workers.

  Nothing is computed, and no device is needed. Restore a checkpoint of another number
  of workers by these shapes, and give it to :func:`reshard_state`.

  Args:
    optimizer: an optax transformation with gradcomp's in it.
    params: the parameters, or their ``jax.ShapeDtypeStruct``, whole.
    axis_name: the axis, or the tuple of axes, given to the gradcomp transformation.
    workers: the number of workers N.
    param_specs: the specs of the parameters, as for :func:`init_state`, if the state is
      made by that.

  Returns:
    A tree of ``jax.ShapeDtypeStruct``, in the structure of the state.

  Raises:
    ValueError: ``workers`` is no number of workers, or ``axis_name`` names other axes
      than those of a transformation.

  Example:
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
    >>> state_shapes(tx, jnp.ones((8, 64)), axis_name="data", workers=6).residual.shape
    (48, 64)
  """
  first = first_state_of(
    optimizer,
    params,
    workers=number_of_workers("workers", workers),
    axis_name=axis_name,
    param_specs=param_specs,
    mesh=None,
  )
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first.shapes)


def number_of_workers(name: str, value: Any) -> int:
  """Returns a number of workers; ValueError otherwise."""
  return static_integer(name, WORKERS_RULE, value, least=1)


def first_state_of(
  optimizer: optax.GradientTransformation,
  params: Any,
  *,
  workers: int,
  axis_name: AxisName,
  param_specs: Any,
  mesh: Mesh | None,
) -> FirstState:
  """Traces ``optimizer.init`` in a map over N abstract workers, and reads the state.

  ``param_specs`` are those of a map that makes all axes manual, or None. ``mesh`` may
  have other axes that shard the parameters; by default it is the mesh in their types.
  """
  names = axis_names(axis_name)
  around = mesh_of(params) if mesh is None or mesh.empty else mesh
  abstract = _with_workers(around, names, workers)
  sizes = dict(abstract.shape)
  specs = jax.tree.map(lambda x: restrict_spec(typed_spec(x), sizes), params)
  if param_specs is not None:
    specs = param_specs
  like = jax.tree.map(
    lambda spec, x: jax.ShapeDtypeStruct(
      jnp.shape(x), jnp.result_type(x), sharding=NamedSharding(abstract, spec)
    ),
    specs,
    params,
    is_leaf=is_spec,
  )
  found: list[Any] = []

  def look(params: Any) -> list[jax.Array]:
    state = optimizer.init(params)
    found[:] = [jax.tree.map(jax.typeof, state)]
    return [node.count for node in states_in(state)]

  if param_specs is not None:
    look = jax.shard_map(
      look, mesh=abstract, in_specs=(param_specs,), out_specs=PartitionSpec()
    )
  # The mesh of jax.set_mesh has other workers.
  with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(abstract):
    plans = first_plans(look, like)
  _check_axes(plans, names)
  specs = state_specs(found[0], axis_name=axis_name, param_specs=param_specs)
  whole = functools.partial(_whole, sizes)
  if param_specs is None:
    # Arrays of init outside of a map are whole already, except those of optax.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found[0])
    shapes = _with_collected(shapes, specs, whole)
  else:
    shapes = jax.tree_util.tree_map_with_path(whole, found[0], specs)
  return FirstState(
    shapes, jax.tree.map(_with_typed_axes, found[0], specs), plans, sizes
  )


def _with_collected(shapes: Any, specs: Any, whole: Callable[..., Any]) -> Any:
  """Stacks the gradients that a MultiSteps around an exchange has collected."""

  def stacked(node: Any, specs: Any) -> Any:
    if not collects(node):
      return node
    return node._replace(
      acc_grads=jax.tree_util.tree_map_with_path(whole, node.acc_grads, specs.acc_grads)
    )

  return jax.tree.map(stacked, shapes, specs, is_leaf=collects)


def _whole(
  sizes: dict[str, int], path: KeyPath, part: Any, spec: PartitionSpec
) -> jax.ShapeDtypeStruct:
  """Returns the global shape of shards under a map's spec; ValueError for scalars."""
  if sharded_axes(spec) and not part.ndim:
    raise ValueError(
      "`params` must not be scalars where workers keep arrays of their shapes, for no "
      f"map can stack these, got one at {keystr(path)}; give it the shape (1,), or put "
      "optax.MultiSteps behind the exchange."
    )
  cut = names_by_axis(spec, part.ndim)
  times = [math.prod(sizes[name] for name in names) for names in cut]
  shape = tuple(a * b for a, b in zip(part.shape, times, strict=True))
  return jax.ShapeDtypeStruct(shape, part.dtype)


def _with_typed_axes(part: ShapedArray, spec: PartitionSpec) -> PartitionSpec:
  """Returns a map's spec with the axes that shard the part by its type."""
  outer = names_by_axis(spec, part.ndim)
  inner = names_by_axis(part.sharding.spec, part.ndim)
  known = sharded_axes(spec)
  more = [[name for name in names if name not in known] for names in inner]
  return spec_of([(*a, *b) for a, b in zip(outer, more, strict=True)])


def _with_workers(
  mesh: Mesh | AbstractMesh, names: tuple[str, ...], workers: int
) -> AbstractMesh:
  """Returns a mesh like this one with N workers on these axes."""
  alone = dict(zip(names, (workers,) + (1,) * (len(names) - 1), strict=True))
  if mesh.empty:
    return abstract_mesh(alone)
  known = dict(mesh.shape)
  if math.prod(known.get(name, 0) for name in names) != workers:
    # What a worker keeps depends on how many there are, and not on the axes.
    known |= alone
  kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  auto = jax.sharding.AxisType.Auto
  return abstract_mesh(known, tuple(kinds.get(name, auto) for name in known))


def _check_axes(plans: list[MessagePlan | None], names: tuple[str, ...]) -> None:
  """Raises ValueError for a transformation over other axes than these."""
  for plan in plans:
    if plan is not None and plan.axis_name is not None:
      if axis_names(plan.axis_name) != names:
        raise ValueError(
          f"`axis_name` must be that of the transformations in `optimizer`, "
          f"{plan.axis_name!r}, got {names if len(names) > 1 else names[0]!r}."
        )
