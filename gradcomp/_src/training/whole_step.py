"""``whole_step``: a trainer's own train step, on each worker's part of a batch."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from gradcomp._src.core.specs import state_specs
from gradcomp._src.core.state import states_in
from gradcomp._src.mesh import axes, shard_maps, types
from gradcomp._src.mesh.axes import axes_in, is_spec
from gradcomp._src.training import batches, constraints, gradients


def whole_step(
  step: Callable[..., tuple[Any, Any]],
  *,
  axis_name: axes.AxisName,
  param_specs: Any = None,
  mesh: Mesh | AbstractMesh | None = None,
) -> Callable[..., tuple[Any, Any]]:
  r"""Runs a trainer's own train step on each worker, in one map over the axis.

  It is for trainers that take norms of gradients, clip or cast them before the
  optimizer, in plain ``jax.jit`` under Auto axes. The one other change is an exchange
  in the optimizer. ``jax.value_and_grad`` in ``step`` stays as it is, and returns the
  worker's own gradient, a plain array, because the map covers the whole step. A norm or
  a clip is each worker's own before the exchange, and the mean's after it.

  The loss may constrain activations over the axis, as in
  :func:`gradcomp.value_and_grad`. Other axes of the mesh stay with the compiler. A
  worker has its part of each array of the batch; all of the state, but for residuals
  and other parts that are its own, see :func:`gradcomp.state_specs`; and further
  arguments whole. A typed PRNG key in the batch or in further arguments is
  ``jax.random.fold_in(key, worker)``. A key in the state is the same on all workers,
  and so are random numbers from it.

  Args:
    step: ``step(state, batch, *extra)`` returns ``(state, metrics)``. In the state is
      that of an optimizer with a gradcomp transformation over the axis.
    axis_name: an Auto axis of the mesh, which shards batches, or a tuple of axes.
    param_specs: how other axes shard the parameters: a tree like them, in the state, of
      ``jax.P`` or of ``jax.tree.map(lambda x: x.sharding, params)``; or ``jax.P()``
      where every device has them whole. ``update`` then encodes each shard where it
      lies. Make the state by :func:`gradcomp.init_state` with the same specs. It must
      be given if the mesh has other Auto axes.
    mesh: the mesh, where neither arguments nor ``jax.set_mesh`` have it.

  Returns:
    A function like ``step``, for ``jax.jit``. Metrics are means over the workers, but
    for PRNG keys and unsigned integers, which are the first worker's.

  Raises:
    ValueError: when called, the axis is no Auto axis of the mesh, the state has no
      gradcomp transformation, workers cannot share a batch equally, ``param_specs`` is
      missing or like no tree in the state, or the step maps over the axis.

  Example:
    >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    >>> tx = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.sgd(0.25))
    >>> def step(state, batch):
    ...   params, opt_state = state
    ...   loss, grads = jax.value_and_grad(lambda w, x: jnp.mean(w * x))(params, batch)
    ...   updates, opt_state = tx.update(grads, opt_state, params)
    ...   metrics = {"loss": loss, "norm": optax.tree.norm(grads)}
    ...   return (optax.apply_updates(params, updates), opt_state), metrics
    >>> with jax.set_mesh(mesh):
    ...   state = jnp.float32(1.0), tx.init(jnp.float32(1.0))
    ...   step = jax.jit(whole_step(step, axis_name="data"))
    ...   state, metrics = step(state, jnp.ones(4))
    >>> state[0], metrics["norm"]
    (Array(0.75, dtype=float32), Array(1., dtype=float32))
  """
  names = frozenset(axes.axis_names(axis_name))

  def local(state: Any, batch: Any, *extra: Any) -> tuple[Any, Any]:
    state, metrics = step(state, *batches.with_own_keys((batch, *extra), axis_name))
    return state, gradients.mean_of_workers(metrics, axis_name)

  def on_workers(state: Any, batch: Any, *extra: Any) -> tuple[Any, Any]:
    around, kind = types.around((state, batch, extra), axis_name, mesh)
    if kind != AxisType.Auto:
      raise ValueError(
        f"`axis_name` must be an Auto axis of the mesh, got {axis_name!r} and {around};"
        " make it by jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,)), and "
        "call this under jax.set_mesh(mesh), or pass mesh=."
      )
    if not states_in(state):
      raise ValueError(
        "`state` must hold the state of a gradcomp transformation, or workers would "
        f"take steps of their own, got {jax.tree.structure(state)}; put one in front "
        f"of the optimizer: optax.chain(gradcomp.qsgd(axis_name={axis_name!r}), tx)."
      )
    workers = math.prod(around.shape[name] for name in names)
    batches.check_shared("`batch`", batch, workers)
    specs, whole = state_specs(state, axis_name=axis_name), PartitionSpec()
    cut = batches.cut_specs(batch, axis_name)
    with shard_maps.PLACED(_places(state, param_specs, axis_name, around)):
      return jax.shard_map(
        constraints.over(local, names, around, argument="step"),
        mesh=around,
        in_specs=(specs, cut, *[whole] * len(extra)),
        out_specs=(specs, whole),
        axis_names=names,
        check_vma=False,  # a step may start a loop with constants
      )(state, batch, *extra)

  return on_workers


def _places(state: Any, given: Any, axis_name: axes.AxisName, mesh: Any) -> Any:
  """Returns the specs of the parameters in a state by leaf; None if all are whole."""
  if given is None:
    shard_maps.specs_like(state, given, axis_name, mesh)
    return None
  specs = shard_maps.specs_of(given, axis_name)
  if not axes_in(specs):
    return None
  structure: Any = jax.tree.structure(specs, is_leaf=is_spec)
  like = lambda x: jax.tree.structure(x) == structure
  nodes = () if is_spec(specs) else jax.tree.leaves(state, is_leaf=like)
  for params in filter(like, nodes):
    return shard_maps.by_leaf(params, jax.tree.leaves(specs, is_leaf=is_spec))
  raise ValueError(
    f"`param_specs` must be like a tree in the state, got {structure} and a state "
    f"{jax.tree.structure(state)}; take those of the parameters: jax.tree.map(lambda "
    "x: x.sharding, params)."
  )
