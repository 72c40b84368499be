"""Keeps gradients per worker, and makes train steps for people who want no plumbing."""

import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gradcomp import _axes, _whole, explicit
from gradcomp._axes import AxisName
from gradcomp.exchange import pmean
from gradcomp.sharding import check_stacked, state_specs


def defer_reduction(params: Any, axis_name: AxisName) -> Any:
  """Types the parameters as differing between workers, so that gradients stay local.

  Inside ``jax.shard_map`` with its default ``check_vma=True``, JAX all-reduces the
  gradient with respect to replicated parameters in full precision, before anyone could
  compress it. Call this on the parameters before ``jax.grad``. Under ``jax.pmap``,
  ``jax.vmap`` and ``check_vma=False``, gradients are local anyway, and the parameters
  come back as they are.

  In plain ``jax.jit`` under Explicit axes it types them as ``reduced``, so that
  ``jax.grad`` returns gradients typed ``{U:data}``, where JAX has rules for that. It
  has rules for matrix products, einsums, gathers and scans. As of JAX 0.12 it has none
  for convolutions, nor for operations that combine a parameter and a batch element by
  element, like a bias. :func:`value_and_grad` works for every model.

  Args:
    params: a tree of arrays, replicated over the axis.
    axis_name: an axis of the enclosing map, or an Explicit axis of the mesh; or a tuple
      of them.

  Returns:
    The same values.

  Raises:
    ValueError: the axis is not bound by a map, nor an Explicit axis of the mesh.

  Example:
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> def grads(w):
    ...   w = gradcomp.defer_reduction(w, "data")
    ...   return jax.grad(lambda w: jnp.sum(w**2))(w)
    >>> jax.shard_map(
    ...   grads, mesh=mesh, in_specs=P(), out_specs=P("data")
    ... )(jnp.ones(2))
    Array([2., 2.], dtype=float32)
  """
  if _in_explicit_jit(params, axis_name):
    return explicit.mark_reduced(params, axis_name)
  _axes.require_size(axis_name, explicit.mesh_of(params))
  return _axes.mark_varying(params, axis_name)


def value_and_grad(
  loss_fn: Callable[..., Any],
  *,
  axis_name: AxisName | None,
  argnums: int | tuple[int, ...] = 0,
  has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
  """Returns what ``jax.value_and_grad`` does, but gradients stay per worker.

  They do so wherever it runs. In plain ``jax.jit`` under Explicit axes, it runs the
  loss in a ``jax.shard_map`` over the axis, on arguments cut as their types say, and
  returns gradients typed ``{U:data}``. Each worker's gradient is then divided by N, and
  their sum is the gradient of the loss over the whole batch.

  Args:
    loss_fn: returns the worker's loss, or ``(loss, aux)``. The loss is the mean over
      the worker's part of the batch.
    axis_name: the axis of the enclosing shard_map, pmap or vmap, or an Explicit axis of
      the mesh; a tuple of axes; None for none.
    argnums: the arguments to differentiate, as in JAX.
    has_aux: whether ``loss_fn`` returns ``(loss, aux)``.

  Returns:
    A function like ``loss_fn`` that returns ``(loss, grads)`` or
    ``((loss, aux), grads)``. The loss is averaged over the axis. Gradients and ``aux``
    are the worker's own. Under Explicit axes, where a value has no worker, ``aux`` is
    averaged, too.

  Raises:
    ValueError: when called, the axis is not bound; or under Explicit axes, no argument
      is cut over the axis, or a differentiated one is.

  Example:
    >>> grad_fn = value_and_grad(lambda w, x: jnp.mean(w * x), axis_name="data")
    >>> x = jnp.array([[1.0], [3.0]])
    >>> jax.vmap(grad_fn, in_axes=(None, 0), axis_name="data")(jnp.float32(2.0), x)
    (Array([4., 4.], dtype=float32), Array([1., 3.], dtype=float32))
  """
  grad_fn = jax.value_and_grad(loss_fn, argnums=argnums, has_aux=has_aux)
  if axis_name is None:
    return grad_fn
  differentiated = (argnums,) if isinstance(argnums, int) else tuple(argnums)

  def local_value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    if _in_explicit_jit((args, kwargs), axis_name):
      _check_cut([args[i] for i in differentiated], (args, kwargs), axis_name)
      return explicit.addends(grad_fn, axis_name, *args, **kwargs)
    marked = list(args)
    for i in differentiated:
      marked[i] = defer_reduction(marked[i], axis_name)
    value, grads = grad_fn(*marked, **kwargs)
    if has_aux:
      return (pmean(value[0], axis_name), value[1]), grads
    return pmean(value, axis_name), grads

  return local_value_and_grad


def _in_explicit_jit(tree: Any, axis_name: AxisName) -> bool:
  """Returns True if the axes are Explicit ones of the mesh that no map has bound."""
  if _axes.bound_size(axis_name) is not None:
    return False
  return explicit.is_explicit(explicit.mesh_of(tree), axis_name)


def _check_cut(params: Any, arguments: Any, axis_name: AxisName) -> None:
  """Raises ValueError unless the parameters are whole, and another argument is cut."""
  names = _axes.names(axis_name)
  for leaf in jax.tree.leaves(params):
    if cut := explicit.sharded(explicit.typed_spec(leaf)).intersection(names):
      raise ValueError(
        "`argnums` must name arguments that every worker has whole, but one is cut "
        f"over {sorted(cut)}: {_whole.CURE}; or compress over other axes of the batch."
      )
  specs = [explicit.typed_spec(leaf) for leaf in jax.tree.leaves(arguments)]
  if not all(any(name in explicit.sharded(spec) for spec in specs) for name in names):
    raise ValueError(
      f"`axis_name` must cut an argument, but none is sharded over {axis_name!r}: "
      "every worker would compute the same gradient. Put the batch there: "
      "jax.device_put(batch, jax.NamedSharding(mesh, jax.P(axis_name)))."
    )


def _check_equal(updates: Any, axis_name: AxisName) -> None:
  """Raises ValueError for updates that still differ between the workers."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
    if _axes.varying(leaf).intersection(_axes.names(axis_name)):
      raise ValueError(
        "`optimizer` must return updates that are equal on all workers, but that of "
        f"{jax.tree_util.keystr(path)} differs between those of {axis_name!r}: no "
        "exchange has seen its gradient. Where optax.partition, optax.masked or "
        "optax.set_to_zero keep leaves from gradcomp's transformation, let it see all "
        "leaves, and freeze or mask them behind it."
      )


def make_train_step(
  loss_fn: Callable[..., Any],
  optimizer: optax.GradientTransformation,
  *,
  axis_name: AxisName | None,
  mesh: Mesh | None = None,
  has_aux: bool = False,
  donate: bool = True,
) -> Callable[..., tuple[Any, Any, dict[str, Any]]]:
  """Makes a jitted data-parallel train step: gradients, exchange and update.

  Args:
    loss_fn: ``loss_fn(params, batch)`` returns the mean loss over ``batch``, or
      ``(loss, aux)``.
    optimizer: an optax transformation with gradcomp's in it, over the same axis.
    axis_name: the mesh axis that batches are cut over, or a tuple of them; None for one
      device.
    mesh: the devices; by default the mesh of ``jax.set_mesh``. Its other axes stay as
      they are: parameters may be sharded over them.
    has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
    donate: whether parameters and state are updated in place. The arrays that were
      passed in are then gone.

  Returns:
    A jitted ``step(params, opt_state, batch) -> (params, opt_state, metrics)``.
    Parameters are replicated over the axis. Every array of ``batch`` is cut on its
    first axis. ``opt_state`` is ``optimizer.init(params)`` under
    ``jax.set_mesh(mesh)``. Put the parameters on the mesh first, by
    ``jax.device_put(params, NamedSharding(mesh, P()))``. Parameters on one device work,
    but then the second step compiles again. ``metrics["loss"]``, and ``metrics["aux"]``
    with ``has_aux``, are means over the workers.

  Raises:
    ValueError: the mesh does not have an axis; when called, a batch cannot be cut into
      equal parts, the state was made outside the mesh, the parameters are cut over an
      Explicit axis of the batch, or the optimizer's updates differ between workers,
      because no exchange has seen them.

  Example:
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    >>> optimizer = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.sgd(0.1))
    >>> step = make_train_step(loss_fn, optimizer, axis_name="data", mesh=mesh)
    >>> params = {"w": jnp.ones((4, 1))}
    >>> with jax.set_mesh(mesh):
    ...   opt_state = optimizer.init(params)
    >>> params, opt_state, metrics = step(params, opt_state, jnp.ones((2, 4)))
    >>> metrics["loss"]
    Array(16., dtype=float32)
  """
  grad_fn = value_and_grad(loss_fn, axis_name=axis_name, has_aux=has_aux)

  def local_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
    value, grads = grad_fn(params, batch)
    metrics = dict(zip(("loss", "aux"), value if has_aux else (value,), strict=False))
    if has_aux and axis_name is not None:
      metrics["aux"] = pmean(metrics["aux"], axis_name)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    if axis_name is not None:
      _check_equal(updates, axis_name)
    return optax.apply_updates(params, updates), opt_state, metrics

  if axis_name is None:
    return jax.jit(local_step, donate_argnums=(0, 1) if donate else ())
  mesh = jax.sharding.get_mesh() if mesh is None else mesh
  names = _axes.names(axis_name)
  if not set(names).issubset(mesh.shape):
    raise ValueError(
      f"`axis_name` must be an axis of the mesh, got {axis_name!r} and a mesh with the "
      f"axes {mesh.axis_names}; pass mesh=, or call this under jax.set_mesh(mesh)."
    )
  workers = math.prod(mesh.shape[name] for name in names)
  kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  cut = PartitionSpec(axis_name)

  def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
      if not leaf.shape or leaf.shape[0] % workers:
        raise ValueError(
          f"`batch`{jax.tree_util.keystr(path)} must have a first axis that {workers} "
          f"workers can share equally, got the shape {leaf.shape}."
        )
    _whole.check_placed("params", params, axis_name)
    if all(kinds[name] == AxisType.Explicit for name in names):
      batch = jax.reshard(batch, NamedSharding(mesh, cut))
    specs = state_specs(opt_state, axis_name)
    check_stacked(opt_state, specs, params, workers)
    mapped = jax.shard_map(
      local_step,
      mesh=mesh,
      in_specs=(PartitionSpec(), specs, cut),
      out_specs=(PartitionSpec(), specs, PartitionSpec()),
      axis_names=set(names),
    )
    return mapped(params, opt_state, batch)

  return jax.jit(step, donate_argnums=(0, 1) if donate else ())
