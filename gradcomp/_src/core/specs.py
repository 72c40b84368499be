"""Specs of a state, and first states for maps that ``init`` cannot see."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcomp._src.checks import see
from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.core import state as states
from gradcomp._src.core.feedback import is_stored, shaped
from gradcomp._src.mesh import axes as mesh_axes
from gradcomp._src.mesh.axes import AxisName, axes_in, is_spec, stack_spec
from gradcomp._src.mesh.shard_maps import specs_like, specs_of
from gradcomp._src.mesh.study import is_study, studied_axes
from gradcomp._src.mesh.trees import trainable
from gradcomp._src.mesh.types import is_traced


def state_specs(  # noqa: C901 - a case for each type of state
  opt_state: Any, *, axis_name: AxisName, param_specs: Any = None
) -> Any:
  """Returns the ``PartitionSpec`` of every array of an optimizer state.

  Arrays that differ between workers are stacked on their first axis, ``P(axis_name)``:
  residuals, gradcomp's own momentum, the rows that a worker owns in
  :func:`gradcomp.parallel.zero`, and what ``optax.MultiSteps`` around the exchange has
  collected. All others, like an optimizer's momentum, are replicated: ``P()``.

  Args:
    opt_state: the state of any optax transformation that holds gradcomp's, or its
      ``jax.eval_shape``.
    axis_name: the axis, or the tuple of axes, given to the gradcomp transformation.
    param_specs: the specs of the parameters, or their shardings, a tree like them, for
      a map that makes other mesh axes manual, too. Trees like the parameters, such as
      momentum, get them; residuals get them after the data axis.

  Raises:
    ValueError: something differs between workers, without an axis;
      ``optax.apply_if_finite`` is around an exchange; or ``param_specs`` shards over
      ``axis_name``.
    TypeError: ``param_specs`` has a leaf that is no spec and no sharding.

  Example:
    >>> tx = optax.chain(gradcomp.qsgd(bits=4, feedback="error"), optax.sgd(0.1))
    >>> specs = state_specs(tx.init({"w": jnp.zeros(3)}), axis_name="data")
    >>> specs[0].residual["w"] == P("data"), specs[0].count == P()
    (True, True)
  """
  if param_specs is not None:
    param_specs = specs_of(param_specs, axis_name)
  inner = functools.partial(state_specs, axis_name=axis_name, param_specs=param_specs)
  alike = lambda spec, tree: jax.tree.map(lambda _: spec, tree)
  here = lambda axes: mesh_axes.axis_names(axis_name) if param_specs is None else axes
  is_hole = lambda node: isinstance(node, optax.MaskedNode)
  # In the place of one leaf, also of the specs of a part of the parameters.
  is_one = lambda node: is_hole(node) or is_stored(node) or is_spec(node)
  structure: Any = jax.tree.structure(param_specs, is_leaf=is_one)
  per_worker = lambda tree: placed(tree, functools.partial(stack_spec, axis_name))

  def specs(node: Any) -> Any:
    if isinstance(node, states.CompressState):
      return alike(P(), node)._replace(
        residual=per_worker(node.residual),
        server_residual=owned(node.server_residual),
        memory=node.memory and Memory(*map(owned, node.memory)),
        velocity=per_worker(node.velocity),
        estimate=placed(node.estimate),
      )
    if isinstance(node, states.OwnedRows):
      return states.OwnedRows(owned(node.arrays))
    if isinstance(node, states.LocalStepsState):
      fragments = inner(node.fragments, axis_name=inside(node.own))
      own: Any = own_steps(node.own)
      return alike(P(), node)._replace(own=own, fragments=fragments)
    if isinstance(node, states.OwnSteps):
      return own_steps(node)
    if isinstance(node, optax.MultiStepsState):
      return alike(P(), node)._replace(
        inner_opt_state=inner(node.inner_opt_state),
        acc_grads=per_worker(node.acc_grads),
      )
    if isinstance(node, optax.ApplyIfFiniteState):
      raise ValueError(
        "`opt_state` must not hold an exchange inside of optax.apply_if_finite, where "
        "workers that decide differently wait for each other; put "
        "gradcomp.skip_nonfinite(..., axis_name=) around the exchange, or "
        f"optax.apply_if_finite after it.{see('must-not-hold-an-exchange-inside-of')}"
      )
    return placed(node)

  def owned(arrays: Any) -> Any:
    """Returns the specs of arrays by the axes that stack them, without Auto axes."""
    return arrays and {
      axes: alike(mesh_axes.restrict_spec(P(axes), here(axes)), tree)
      for axes, tree in arrays.items()
    }

  def inside(node: states.OwnSteps) -> AxisName:
    """Returns the axes of local steps that are here, which may have more names."""
    (axes,) = node.by_axes
    return tuple(name for name in axes if name in here(axes)) or axis_name

  def own_steps(node: states.OwnSteps) -> states.OwnSteps:
    # An exchange inside of each worker, over other axes, stacks arrays over all axes.
    ((axes, own),) = node.by_axes.items()
    for path, leaf in jax.tree_util.tree_leaves_with_path(node.inner_state):
      if not jnp.shape(leaf):
        raise ValueError(
          f"`opt_state`.own.inner_state{jax.tree_util.keystr(path)} must have a number "
          f"for each worker, as local_steps keeps it, got one; set it to jnp.full(N, "
          "number), or take the step by gradcomp.make_train_step, which does so."
        )
    over = inside(node)
    known = lambda spec: axes_in(spec).issuperset(mesh_axes.axis_names(over))
    stacked = lambda spec: spec if known(spec) else stack_spec(over, spec)
    return states.OwnSteps({axes: jax.tree.map(stacked, inner(own), is_leaf=is_spec)})

  def placed(tree: Any, to: Callable[[P], P] = lambda spec: spec) -> Any:
    """Maps parameters' specs; holes of optax.masked and optax.partition stay."""
    if not like_params(tree):
      return alike(to(P()), tree)
    of_leaf = lambda x, spec: x if is_hole(x) else alike(to(spec), x)
    return jax.tree.map(of_leaf, tree, param_specs, is_leaf=is_one)

  def like_params(node: Any) -> bool:
    if param_specs is None or jax.tree.structure(node, is_leaf=is_one) != structure:
      return False
    # If the parameters are one bare array, numbers like a count of steps have their
    # structure, too.
    ndim = getattr(shaped(node), "ndim", 0)
    return not is_spec(param_specs) or ndim >= len(param_specs) > 0

  def is_leaf(node: Any) -> bool:
    if isinstance(node, optax.MultiStepsState | optax.ApplyIfFiniteState):
      return bool(states.states_in(node))
    local = states.LocalStepsState | states.OwnSteps
    ours = states.CompressState | states.OwnedRows | local
    return isinstance(node, ours) or like_params(node)

  return jax.tree.map(specs, opt_state, is_leaf=is_leaf)


def init_state(
  optimizer: optax.GradientTransformation,
  params: Any,
  *,
  axis_name: AxisName,
  param_specs: Any = None,
  mesh: Mesh | None = None,
  replicate: int | tuple[int, ...] | None = None,
) -> Any:
  """Returns the state of ``optimizer.init(params)`` for a map that it cannot see.

  Use it for a map that makes all mesh axes manual, and for gradients of
  :func:`gradcomp.value_and_grad` under Auto axes with ``param_specs``: each device has
  residuals of its own shard. Its specs are ``state_specs(...,
  param_specs=param_specs)``. If only the data axes are manual, ``optimizer.init`` does.
  With ``replicate`` every array is ``[N, ...]``, for ``jax.pmap``, with the bits of an
  ``init`` inside the map. For a trainer that makes the state itself, use
  :func:`gradcomp.wrappers.replicable`.

  Args:
    optimizer, params: an optax transformation with gradcomp's in it; whole parameters.
    axis_name: the axis, or the tuple of axes, given to the gradcomp transformation.
    param_specs: the specs of the parameters, or their shardings, a tree like them or
      one for all; by default those of ``params``, unless these are traced.
    mesh: the devices; by default the mesh of ``jax.set_mesh``.
    replicate: N, of all processes together; of several axes a tuple of their sizes.
      Each process gives ``jax.pmap`` the rows of its own workers.

  Raises:
    ValueError: there is no mesh, or it lacks the axis; ``param_specs`` shards a
      parameter over ``axis_name``, is not like the parameters, or is missing for traced
      ones; or ``replicate`` is no such number, or is given beside ``param_specs`` or
      ``mesh``.
    TypeError: ``param_specs`` has a leaf that is no spec and no sharding.

  Example:
    >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
    >>> params, specs = {"w": jnp.zeros((64, 64))}, {"w": P(None, "model")}
    >>> state = init_state(tx, params, axis_name="data", param_specs=specs, mesh=mesh)
    >>> state.residual["w"].sharding.spec == P("data", "model")
    True
    >>> init_state(tx, params, axis_name="data", replicate=8).residual["w"].shape
    (8, 64, 64)
  """
  if replicate is not None:
    for name, given in {"param_specs": param_specs, "mesh": mesh}.items():
      if given is not None:
        raise ValueError(
          f"`{name}` must be None with replicate=N, which is for jax.pmap, got "
          f"{given!r}; leave out one of them."
        )
    sizes = mesh_axes.sizes_by_axis("replicate", axis_name, replicate)
    return mesh_axes.on_each(lambda: optimizer.init(params), sizes, stacked=True)
  params = trainable(params)
  param_specs = specs_like(params, param_specs, axis_name, mesh)
  traced, meshes = is_traced(params), jax.sharding
  # Inside of jax.jit there is no other mesh, and the map places the parameters.
  current: Any = meshes.get_abstract_mesh if traced else meshes.get_mesh
  mesh = current() if mesh is None else mesh
  if mesh.empty:
    raise ValueError(
      "`mesh` must be a mesh of devices, got None and no mesh of jax.set_mesh; call "
      "gradcomp.init_state under jax.set_mesh(mesh), or with replicate=N for jax.pmap."
    )
  if not traced:
    place = functools.partial(NamedSharding, mesh)
    shardings = jax.tree.map(place, param_specs, is_leaf=is_spec)
    params = jax.device_put(params, shardings)
  over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(param_specs,))
  return made_on_mesh(optimizer.init, params, over, axis_name, param_specs)


def made_on_mesh(
  make: Callable[[Any], Any],
  params: Any,
  over: Callable[..., Any],
  axis_name: AxisName,
  param_specs: Any = None,
) -> Any:
  """Makes a state of all workers by a map ``over`` the mesh, which lacks its specs."""
  found: list[Any] = []

  def probe(params: Any) -> jax.Array:
    found.append(jax.tree.map(jax.typeof, make(params)))
    return jnp.zeros([])

  jax.eval_shape(over(probe, out_specs=P()), params)
  specs = state_specs(found[0], axis_name=axis_name, param_specs=param_specs)
  return jax.jit(over(make, out_specs=specs))(params)


def make_own(
  make: Callable[[Any], Any],
  tree: Any,
  axis_name: AxisName,
  unknown: str,
  in_specs: Any = P(),  # noqa: B008 - it is constant
) -> Any:
  """Calls ``make(tree)`` in the map, or on the mesh for global arrays."""
  names = mesh_axes.axis_names(axis_name)
  workers, is_bound = mesh_axes.count(studied_axes(names) or names)
  if is_bound:
    return make(tree)
  if workers is None:
    raise mesh_axes.UnboundAxisError(
      f"`axis_name` must be an axis that init can count, and {axis_name!r} is not "
      f"bound here: it is unknown {unknown}; call optimizer.init under "
      "jax.set_mesh(mesh), or inside the map; where a program copies one state to its "
      "workers, give it gradcomp.wrappers.replicable("
      f"optimizer, axis_name={axis_name!r}, workers=N).",
      axis_name,
    )
  inside = (*names, *sorted(axes_in(in_specs).difference(names)))
  given: Any = {"in_specs": (in_specs,), "axis_names": {*inside}, "check_vma": False}
  return made_on_mesh(make, tree, functools.partial(jax.shard_map, **given), inside)


def replicable(
  optimizer: optax.GradientTransformation,
  *,
  axis_name: AxisName,
  workers: int | tuple[int, ...],
) -> optax.GradientTransformationExtraArgs:
  """Returns an optimizer with a first state that programs may copy to N workers.

  Programs around ``jax.pmap`` copy states (``flax.jax_utils.replicate``), and some
  trainers. There ``init`` cannot count the workers, each of which owns :math:`1/N` of
  the mean and keeps the loss of its second encoding. This one returns one worker's
  part, ``[ceil(rows / N), ...]``, of zeros, so copies have the bits of an ``init``
  inside the map. ``update``, and ``init`` inside the map, are those of ``optimizer``.
  Plain ``jax.jit`` and ``jax.shard_map`` take the arrays of all workers: use
  ``optimizer`` itself there, under ``jax.set_mesh``.

  Args:
    optimizer, axis_name: as for :func:`gradcomp.init_state`.
    workers: N, of all processes together; of several axes a tuple of their sizes.

  Raises:
    ValueError: ``workers`` is no such number; in ``init``, first states of workers
      differ, as in :func:`gradcomp.parallel.zero` around an optimizer that keeps
      parameters.

  Example:
    >>> tx = gradcomp.qsgd(bits=4, axis_name="data", feedback="error")
    >>> tx = replicable(optax.chain(tx, optax.adam(1e-3)), axis_name="data", workers=8)
    >>> state = tx.init({"w": jnp.zeros((512, 512))})
    >>> [rows.shape for rows in state[0].server_residual[("data",)]]
    [(8, 8, 512)]
  """
  sizes = mesh_axes.sizes_by_axis("workers", axis_name, workers)
  optimizer = optax.with_extra_args_support(optimizer)

  def init_fn(params: Any) -> Any:
    if mesh_axes.bound_size(axis_name) is not None or is_study():
      return optimizer.init(params)
    try:
      return mesh_axes.on_each(lambda: optimizer.init(params), sizes, stacked=False)
    except ValueError as error:
      if "out_axes is None" not in str(error):
        raise
      raise ValueError(
        "`optimizer` must have the same first state on all workers to be copied, got "
        f"an array that differs along {axis_name!r}; make the states by "
        f"gradcomp.init_state(optimizer, params, axis_name={axis_name!r}, "
        f"replicate={workers})."
      ) from None

  return optax.GradientTransformationExtraArgs(init_fn, optimizer.update)


def check_stacked(opt_state: Any, specs: Any, params: Any, workers: int) -> None:
  """Raises ValueError if an array of all workers has the shape of one worker's."""

  # But for arrays of rows, which update checks.
  def less(node: Any) -> Any:
    if states.is_state(node):
      return node._replace(server_residual=None, memory=None)
    return None if is_rows(node) else node

  is_rows = lambda x: isinstance(x, states.OwnedRows | states.OwnSteps)
  is_leaf = lambda x: is_rows(x) or states.is_state(x)
  given = opt_state, specs
  opt_state, specs = (jax.tree.map(less, x, is_leaf=is_leaf) for x in given)
  own = {leaf.shape or (1,) for leaf in jax.tree.leaves(params)}
  stacked = {(workers * first, *rest) for first, *rest in own}
  leaves = jax.tree_util.tree_leaves_with_path(opt_state)
  for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
    whole = leaf.shape and leaf.shape not in own and leaf.shape[0] % workers == 0
    if axes_in(spec) and leaf.shape not in stacked and not whole:
      raise ValueError(
        f"`opt_state`{jax.tree_util.keystr(path)} must stack the parts of {workers} "
        f"workers on its first axis, got the shape {leaf.shape}; make the state by "
        "optimizer.init under jax.set_mesh(mesh), or, with optax.MultiSteps around the "
        f"exchange, inside jax.shard_map.{see('must-stack-the-parts-of')}"
      )
