"""The abstract global state of an optimizer for N workers, and checks of states."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath, keystr, tree_map_with_path

from gradcomp._src import checks
from gradcomp._src.core.compression import stacked_for
from gradcomp._src.core.specs import state_specs
from gradcomp._src.core.state import collects, is_state, states_in
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.mesh import axes, study, types
from gradcomp._src.mesh.shard_maps import specs_like
from gradcomp._src.mesh.trees import trainable
from gradcomp._src.report.tracing import first_plans

number_of_workers = checks.integer("a number of workers, 1 or more", 1).check


def state_shapes(
  optimizer: optax.GradientTransformation,
  params: Any,
  *,
  axis_name: axes.AxisName,
  workers: int,
  param_specs: Any = None,
  platform: str | None = None,
) -> Any:
  """Returns the shapes of an optimizer's global state over N workers.

  Nothing is computed, and no device is needed. Restore a checkpoint of another number
  of workers, or of another platform, by this tree of ``jax.ShapeDtypeStruct``, and give
  it to :func:`gradcomp.reshard_state`.

  Args:
    optimizer, params, axis_name: as for :func:`gradcomp.init_state`; shapes will do.
    workers: the number of workers N.
    param_specs: those given to :func:`gradcomp.init_state`, if it makes the state.
    platform: that of the workers, as for :func:`gradcomp.explain`.

  Raises:
    ValueError: ``workers`` is no number of workers, ``platform`` is no platform, or
      ``axis_name`` names other axes than those of a transformation.

  Example:
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
    >>> state_shapes(tx, jnp.ones((8, 64)), axis_name="data", workers=6).residual.shape
    (48, 64)
  """
  given: Any = {"axis_name": axis_name, "param_specs": param_specs, "mesh": None}
  given["workers"] = number_of_workers("workers", workers)
  with study.planned_for(platform):
    return first_state_of(optimizer, params, **given)[0]


def first_state_of(
  optimizer: optax.GradientTransformation,
  params: Any,
  *,
  workers: int,
  axis_name: axes.AxisName,
  param_specs: Any,
  mesh: Mesh | None,
) -> tuple[Any, Any, list[MessagePlan | None], dict[str, int]]:
  """Returns the shapes, specs and plans of a first state over N abstract workers."""
  # Beside the sizes of the mesh, which may have other axes that shard the parameters.
  # The plan of a state is None if no trace shows it.
  names = axes.axis_names(axis_name)
  params = trainable(params)
  around: Any = types.mesh_of(params) if mesh is None or mesh.empty else mesh
  sizes = dict(around.shape)
  if math.prod(sizes.get(name, 0) for name in names) != workers:
    # What a worker keeps depends on how many there are, and not on the axes.
    sizes |= dict.fromkeys(names, 1) | {names[0]: workers}
  kinds = dict.fromkeys(sizes, AxisType.Auto)
  kinds |= zip(around.axis_names, around.axis_types, strict=True)
  abstract = axes.abstract_mesh(sizes, tuple(kinds.values()))
  if param_specs is None:  # no map makes all axes manual
    restricted = lambda x: axes.restrict_spec(types.typed_spec(x), sizes)
    specs = jax.tree.map(restricted, params)
  else:
    specs = param_specs = specs_like(params, param_specs, axis_name)

  def like(spec: P, x: Any) -> jax.ShapeDtypeStruct:
    place = NamedSharding(abstract, spec)
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=place)

  found: list[Any] = []

  def look(params: Any) -> list[jax.Array]:
    state = optimizer.init(params)
    found[:] = [jax.tree.map(jax.typeof, state)]
    return [node.count for node in states_in(state)]

  if param_specs is not None:
    look = jax.shard_map(look, mesh=abstract, in_specs=(param_specs,), out_specs=P())
  typed = jax.tree.map(like, specs, params, is_leaf=axes.is_spec)
  # The mesh of jax.set_mesh has other workers.
  with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(abstract):
    plans = first_plans(look, typed)
  for given in (x.axis_name for x in plans if x is not None):
    if given is not None and axes.axis_names(given) != names:
      raise ValueError(
        f"`axis_name` must be that of the transformations in `optimizer`, "
        f"{given!r}, got {axes.as_axis_name(names)!r}."
      )
  specs = state_specs(found[0], axis_name=axis_name, param_specs=param_specs)

  def whole(path: KeyPath, part: Any, spec: P) -> Any:
    if axes.axes_in(spec) and not part.ndim:
      raise ValueError(
        "`params` must not be scalars where workers keep arrays of their shapes, "
        f"because no map can stack these, got one at {keystr(path)}; give it the shape "
        "(1,), or put optax.MultiSteps after the exchange."
      )
    cut = axes.names_by_axis(spec, part.ndim)
    times = [math.prod(sizes[name] for name in names) for names in cut]
    shape = tuple(a * b for a, b in zip(part.shape, times, strict=True))
    return jax.ShapeDtypeStruct(shape, part.dtype)

  if param_specs is None:
    # Arrays of init outside of a map are whole already, but not the gradients that a
    # MultiSteps around an exchange has collected.
    grads = lambda x, specs: tree_map_with_path(whole, x.acc_grads, specs.acc_grads)
    stacked = lambda x, y: x._replace(acc_grads=grads(x, y)) if collects(x) else x
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found[0])
    shapes = jax.tree.map(stacked, shapes, specs, is_leaf=collects)
  else:
    shapes = tree_map_with_path(whole, found[0], specs)
  typed = jax.tree.map(_with_typed_axes, found[0], specs)
  return shapes, typed, plans, sizes


def _with_typed_axes(part: ShapedArray, spec: P) -> P:
  """Returns a map's spec with the axes that shard the part by its type."""
  names_of = lambda x: axes.names_by_axis(x, part.ndim)
  pairs = zip(names_of(spec), names_of(part.sharding.spec), strict=True)
  known = axes.axes_in(spec)
  return axes.spec_of([(*a, *(x for x in b if x not in known)) for a, b in pairs])


def check_fits(opt_state: Any, shapes: Any, workers: int) -> None:
  """Raises ValueError for a state in other shapes than ``init`` gives N workers."""
  shapes = _as_forgetful(shapes, opt_state)
  expected = dict(jax.tree_util.tree_leaves_with_path(shapes))
  found = dict(jax.tree_util.tree_leaves_with_path(opt_state))
  wrong = [f"{keystr(path)} is missing" for path in expected if path not in found]
  wrong += [f"{keystr(path)} is too much" for path in found if path not in expected]
  text = lambda x: f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}"
  for path, like in expected.items():
    x = found.get(path, like)
    if (np.shape(x), getattr(x, "dtype", like.dtype)) != (like.shape, like.dtype):
      wrong.append(f"{keystr(path)} must be {text(like)}, got {text(x)}")
      count = stacked_for(np.shape(x), like.shape, workers)
      if count is not None and not like.shape[0] % workers:
        wrong[-1] += f", as if made for {count} worker{'s' if count > 1 else ''}"
  trees: list[Any] = [jax.tree.structure(x) for x in (opt_state, shapes)]
  if not wrong and trees[0] != trees[1]:
    wrong = [f"{trees[0]} must be {trees[1]}"]
  if wrong:
    more = f"; and {len(wrong) - 3} more" if wrong[3:] else ""
    raise ValueError(
      f"`opt_state` must be the global state of {workers} workers with this optimizer "
      f"and these parameters: {'; '.join(wrong[:3])}{more}. Pass old_workers=, "
      "old_platform=, optimizer= and params= as they were when the state was made; "
      "restore what Orbax has saved as gradcomp.checkpoint.state_shapes says."
    )


def _as_forgetful(shapes: Any, opt_state: Any) -> Any:
  """Removes owner residuals and own memories that a state lacks without residuals."""
  states = iter(states_in(opt_state))

  def forgotten(node: Any) -> Any:
    state = next(states, None) if is_state(node) else None
    if state is None or state.residual is not None:
      return node
    memory = state.memory and node.memory
    if state.memory and memory and not state.memory.own:
      memory = memory._replace(own=state.memory.own)
    owned = None if state.server_residual is None else node.server_residual
    return node._replace(server_residual=owned, memory=memory)

  return jax.tree.map(forgotten, shapes, is_leaf=is_state)
