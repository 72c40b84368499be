"""``mean_over``: the compressed mean of a stacked tree, for loops of others."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from gradcomp._src import checks
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core import border, transform
from gradcomp._src.core import specs as states
from gradcomp._src.local_steps import rounds
from gradcomp._src.mesh import axes, shard_maps, trees, types

_ROWS = "gradcomp_rows"  # the axis of the workers on one device
_first = functools.partial(jax.tree.map, lambda x: x[0])


def mean_over(  # noqa: PLR0913 - options of users, by keyword
  tree: Any,
  *,
  axis: int = 0,
  codec: LeafCodec,
  state: Any = None,
  mesh_axis: axes.AxisName | None = None,
  key: ArrayLike | None = None,
  param_specs: Any = None,
) -> Any:
  r"""Returns the mean of a stacked tree over one axis, sent compressed.

  It replaces ``drjax.reduce_mean`` in loops that stack arrays of workers, like the
  differences of DiLoCo. For rows :math:`x_i`, and residuals :math:`e_i` in ``state``,
  zero without it, it returns

  .. math:: \frac{1}{N} \sum_i Q(x_i + e_i), \qquad e_i' = x_i + e_i - Q(x_i + e_i)

  where :math:`Q` encodes and decodes, as ``update`` of :func:`gradcomp.compress` does
  with ``feedback="error"``. Without a state it is unbiased if the codec is.

  With ``mesh_axis`` the rows lie on the devices of a mesh, Auto or Explicit, or of an
  enclosing map. Each device sends the mean of its rows: N is the number of devices
  along the axis, and the bytes on the wire are those of one row. Without it all rows
  are on one device, which computes the same bits as N workers. Call it in ``jax.jit``.
  For other exchanges and feedbacks call ``update`` of a transformation with
  ``gradcomp.PerWorker(tree, axis_name)``.

  Args:
    tree: arrays of floats, all with the same number of rows on ``axis``.
    axis: the axis of the rows, which the result does not have.
    codec: the codec of the rows.
    state: the residuals, of :func:`gradcomp.local.mean_state` or the last call.
    mesh_axis: the axis of the mesh, or a tuple of axes, over which ``axis`` is sharded.
    key: the random bits of a call without a state, another one in each call. A codec
      that draws needs it; a state has its own.
    param_specs: under Auto axes, the specs of a row over other axes of the mesh, a tree
      like ``tree``: each shard is then encoded where it lies, and nothing is sent over
      those axes.

  Returns:
    The mean, in the dtypes of ``tree``, with the same bits on all devices. With a
    state, ``(mean, state)``.

  Raises:
    ValueError: the arrays do not have such rows; the mesh does not have the axis;
      ``key`` is missing, or there are both it and a state; or the state is another's.
    TypeError: a leaf is no array of floats, ``codec`` is not one, or ``jax.grad``
      differentiates through it.

  Example:
    >>> delta = {"w": jnp.array([[0.0, 1.0], [4.0, 3.0]])}
    >>> mean_over(delta, codec=gradcomp.codecs.Dense())["w"]
    Array([2., 2.], dtype=float32)

    The residuals are the loss of a mean:

    >>> codec = gradcomp.codecs.TopK(density=0.5)
    >>> state = gradcomp.local.mean_state(delta, codec=codec)
    >>> mean, state = mean_over(delta, codec=codec, state=state)
    >>> mean["w"] + state.residual["w"].mean(0)
    Array([2., 2.], dtype=float32)
  """
  kept = state is not None
  _exchange(codec, mesh_axis, None, kept=kept)  # TypeError unless it is a codec
  if key is not None and kept:
    raise ValueError("`key` must be None with a state, which has the key of all calls.")
  if key is None and codec.needs_key and not kept:
    raise ValueError(
      f"`key` must be given for {codec} without a state, because it draws random "
      "numbers: pass a jax.random.key, another one in each call."
    )
  workers = _workers(tree, axis, mesh_axis)
  tree = jax.tree.map(jnp.asarray, tree)  # a jitted vmap takes no arrays of NumPy

  # The key is an argument: a map over Explicit axes closes over no array.
  def worker(own: Any, state: Any, _: Any = None, *, key: Any) -> tuple[Any, Any]:
    tx = _exchange(codec, mesh_axis, key, kept=kept)
    mean, new = tx.update(own, state if kept else tx.init(own))
    return mean, new if kept else None

  if mesh_axis is None:
    own = functools.partial(worker, key=key)
    rows, state = jax.vmap(own, (axis, 0), axis_name=_ROWS)(tree, state)
    mean = _first(rows)
  else:
    rows = _means(tree, axis, workers or 1)
    if workers is None:
      rows = _first(rows)
    else:
      if param_specs is None:  # of types, which have Explicit axes
        row = lambda x: P(*axes.entries(types.typed_spec(x))[1:])
        param_specs = jax.tree.map(row, rows)
      whole = shard_maps.specs_like(tree, param_specs, mesh_axis)
      rows = trees.marked(rows, mesh_axis, whole)
    tx = border.any_tree(lambda own: None, worker, {"axis_name": mesh_axis})
    mean, state = tx.update(rows, state, key=key)
  return (mean, state) if kept else mean


def mean_state(
  tree: Any,
  *,
  axis: int = 0,
  codec: LeafCodec,
  mesh_axis: axes.AxisName | None = None,
  param_specs: Any = None,
  key: ArrayLike = 0,
) -> Any:
  """Returns the first state of :func:`gradcomp.mean_over`, with residuals of zero.

  With ``mesh_axis`` it is the state of
  ``gradcomp.compress(codec, axis_name=mesh_axis, feedback="error")``, which checkpoints
  and :func:`gradcomp.reshard_state` know: call it under ``jax.set_mesh(mesh)``, or
  inside the map. Without it every array has a first axis of N workers.

  Args:
    tree: arrays like those to average; their values do not matter.
    axis, codec, mesh_axis, param_specs: as for :func:`gradcomp.mean_over`.
    key: the random bits of all calls.

  Returns:
    A :class:`gradcomp.state.CompressState`.

  Raises:
    ValueError, TypeError: as :func:`gradcomp.mean_over` does.

  Example:
    >>> codec = gradcomp.codecs.QSGD(bits=4)
    >>> state = mean_state({"w": jnp.ones((2, 300))}, codec=codec)
    >>> state.residual["w"].shape
    (2, 300)
  """
  tx = _exchange(codec, mesh_axis, key, kept=True)
  workers = _workers(tree, axis, mesh_axis)
  if mesh_axis is None:
    return jax.vmap(tx.init, axis, axis_name=_ROWS)(tree)
  if workers is None:
    return tx.init(_first(_means(tree, axis, 1)))
  if axes.count(mesh_axis)[0] is None:
    raise ValueError(
      f"`mesh_axis` must name axes of the mesh of jax.set_mesh, got {mesh_axis!r}; "
      "call gradcomp.local.mean_state under jax.set_mesh(mesh)."
    )

  def zeros(x: Any) -> jax.Array:
    names, shape = [*axes.names_by_axis(types.placed_spec(x), x.ndim)], [*x.shape]
    del names[axis], shape[axis]
    row = NamedSharding(jax.sharding.get_mesh(), axes.spec_of(names))
    return jnp.zeros(shape, x.dtype, device=row)

  params = jax.tree.map(zeros, tree)
  if param_specs is None:
    return tx.init(params)
  return states.init_state(tx, params, axis_name=mesh_axis, param_specs=param_specs)


def _exchange(
  codec: LeafCodec, mesh_axis: axes.AxisName | None, key: Any, *, kept: bool
) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation of the workers' rows, with residuals if ``kept``."""
  return transform.compress(
    codec,
    axis_name=_ROWS if mesh_axis is None else mesh_axis,
    feedback=rounds.feedback_of("error", codec) if kept else None,
    key=0 if key is None else key,
  )


def _workers(tree: Any, axis: int, mesh_axis: axes.AxisName | None) -> int | None:
  """Returns the workers of a mesh, None elsewhere; errors for rows that do not fit."""
  checks.static_integer("axis", "the axis of the rows", axis)
  counts: dict[int, str] = {}
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    name = f"`tree`{jax.tree_util.keystr(path)}"
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.inexact):
      raise TypeError(f"{name} must be an array of floats, got {x!r}.")
    if not -x.ndim <= axis < x.ndim:
      raise ValueError(
        f"{name} must have rows on axis {axis}, got the shape {x.shape}."
      )
    counts.setdefault(x.shape[axis], name)
  if len(counts) != 1 or 0 in counts:
    found = ", ".join(f"{count} in {name}" for count, name in counts.items())
    raise ValueError(
      f"`tree` must have arrays with one number of rows, at least 1, on axis {axis}, "
      f"got {found or 'none'}."
    )
  if mesh_axis is None:
    return None
  mesh = types.mesh_of(tree)
  workers, is_bound = axes.count(mesh_axis, mesh)
  if is_bound:
    return None
  if workers is None:
    raise ValueError(
      f"`mesh_axis` must name axes of a mesh or of an enclosing map, got {mesh_axis!r} "
      f"and a mesh of {mesh.axis_names}; call jax.set_mesh(mesh), or pass "
      "mesh_axis=None for rows on one device."
    )
  (rows,) = counts
  if rows % workers:
    raise ValueError(
      f"`tree` must have equally many rows on each of {workers} devices along "
      f"{mesh_axis!r}, got {rows} rows."
    )
  return workers


def _means(tree: Any, axis: int, devices: int) -> Any:
  """Returns the means of equally many rows, ``[devices, ...]``."""

  def mean(x: jax.Array) -> jax.Array:
    rows = jnp.moveaxis(x, axis, 0)
    if len(rows) == devices:  # a single row keeps its bits
      return rows
    return jnp.mean(rows.reshape(devices, -1, *rows.shape[1:]), 1)

  return jax.tree.map(mean, tree)
