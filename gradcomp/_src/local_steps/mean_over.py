"""``mean_over``: the compressed mean of a stacked tree, for loops of others."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from gradcomp._src.checks import static_integer
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core.of_workers import of_workers
from gradcomp._src.core.specs import init_state
from gradcomp._src.core.transform import compress
from gradcomp._src.local_steps.options import feedback_of
from gradcomp._src.mesh.axes import AxisName, axis_names, bound_size, mesh_size
from gradcomp._src.mesh.param_specs import specs_like
from gradcomp._src.mesh.per_worker import marked
from gradcomp._src.mesh.specs import (
  axes_in,
  names_by_axis,
  rows_spec,
  spec_of,
)
from gradcomp._src.mesh.types import is_explicit, mesh_of, placed_spec, typed_spec

_ROWS = "gradcomp_rows"  # the axis of the workers on one device


def mean_over(  # noqa: PLR0913 - options of users, by keyword
  tree: Any,
  *,
  axis: int = 0,
  codec: LeafCodec,
  state: Any = None,
  mesh_axis: AxisName | None = None,
  key: ArrayLike | None = None,
  param_specs: Any = None,
) -> Any:
  r"""Returns the mean of a stacked tree over one axis, sent compressed.

  It has the place of ``drjax.reduce_mean`` in loops that stack what their workers
  have, like the differences of DiLoCo. Of rows :math:`x_i`, and of residuals
  :math:`e_i` in ``state``, zero without it, it returns

  .. math:: \frac{1}{N} \sum_i Q(x_i + e_i), \qquad e_i' = x_i + e_i - Q(x_i + e_i)

  where :math:`Q` encodes and decodes, as ``update`` of :func:`gradcomp.compress` does
  with ``feedback="error"``. Without a state it is unbiased if the codec is.

  With ``mesh_axis`` the rows lie on the devices of a mesh, Auto or Explicit, or of an
  enclosing map. Each device has one row or several, and sends their mean: so N is the
  number of devices along the axis, and the bytes on the wire are those of one row.
  Without it all rows are on one device, which computes what N workers would send, with
  the same bits.

  Call it in ``jax.jit``. For other exchanges and feedbacks call ``update`` of a
  transformation with ``gradcomp.PerWorker(tree, axis_name)``.

  Args:
    tree: arrays of floats, all with as many rows on ``axis``.
    axis: the axis of the rows, which the result does not have.
    codec: of the rows.
    state: the residuals, of :func:`gradcomp.local.mean_state` or the last call.
    mesh_axis: the axis of the mesh, or a tuple of axes, over which ``axis`` is sharded.
    key: the random bits of a call without a state, another one in each call. A codec
      that draws needs it; a state has its own.
    param_specs: under Auto axes, the specs of a row over other axes of the mesh, a tree
      like ``tree``: then each shard is encoded where it lies, and nothing is sent over
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

    The residuals are what a mean lacks:

    >>> codec = gradcomp.codecs.TopK(density=0.5)
    >>> state = gradcomp.local.mean_state(delta, codec=codec)
    >>> mean, state = mean_over(delta, codec=codec, state=state)
    >>> mean["w"] + state.residual["w"].mean(0)
    Array([2., 2.], dtype=float32)
  """
  kept = state is not None
  _exchange(codec, mesh_axis, None, kept=kept)  # TypeError for what is no codec
  _check_key(codec, key, kept=kept)
  _check_rows(tree, axis, mesh_axis)
  tree = jax.tree.map(jnp.asarray, tree)  # a jitted vmap takes no arrays of NumPy

  # The key is an argument: a map over Explicit axes closes over no array.
  def worker(own: Any, state: Any, params: Any = None, *, key: Any) -> tuple[Any, Any]:
    tx = _exchange(codec, mesh_axis, key, kept=kept)
    if kept:
      return tx.update(own, state, params)
    return tx.update(own, tx.init(own), params)[0], None

  if mesh_axis is None:
    own = functools.partial(worker, key=key)
    rows, state = jax.vmap(own, (axis, 0), axis_name=_ROWS)(tree, state)
    mean = jax.tree.map(lambda x: x[0], rows)
  elif bound_size(mesh_axis) is not None:
    mean, state = worker(_means(tree, axis), state, key=key)
  else:
    rows = _of_devices(tree, axis, mesh_axis, param_specs)
    mean, state = of_workers(worker, mesh_axis)(rows, state, key=key)
  return (mean, state) if kept else mean


def mean_state(
  tree: Any,
  *,
  axis: int = 0,
  codec: LeafCodec,
  mesh_axis: AxisName | None = None,
  key: ArrayLike = 0,
  param_specs: Any = None,
) -> Any:
  """Returns the first state of :func:`gradcomp.mean_over`, with residuals of zero.

  With ``mesh_axis`` it is the state of ``gradcomp.compress(codec, axis_name=mesh_axis,
  feedback="error")``, which checkpoints and :func:`gradcomp.reshard_state` know. Call
  it under ``jax.set_mesh(mesh)`` then, or inside the map. Without it every array has
  a first axis of N workers.

  Args:
    tree: arrays like those to average; their values do not matter.
    axis, codec, mesh_axis: as of :func:`gradcomp.mean_over`.
    key: the random bits of all calls.
    param_specs: as of :func:`gradcomp.mean_over`.

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
  _check_rows(tree, axis, mesh_axis)
  if mesh_axis is None:
    return jax.vmap(tx.init, axis, axis_name=_ROWS)(tree)
  if bound_size(mesh_axis) is not None:
    return tx.init(_means(tree, axis))
  if mesh_size(mesh_axis) is None:
    raise ValueError(
      f"`mesh_axis` must name axes of the mesh of jax.set_mesh, got {mesh_axis!r}; "
      "call gradcomp.local.mean_state under jax.set_mesh(mesh)."
    )
  mesh = jax.sharding.get_mesh()

  def zeros(x: Any) -> jax.Array:
    row = jax.eval_shape(lambda x: jnp.mean(x, axis), x)
    spec = _without(axis, placed_spec(x), x.ndim)
    return jnp.zeros(row.shape, x.dtype, device=NamedSharding(mesh, spec))

  params = jax.tree.map(zeros, tree)
  if param_specs is None:
    return tx.init(params)
  return init_state(tx, params, axis_name=mesh_axis, param_specs=param_specs)


def _exchange(
  codec: LeafCodec, mesh_axis: AxisName | None, key: Any, *, kept: bool
) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation of the workers' rows, with residuals if ``kept``."""
  return compress(
    codec,
    axis_name=_ROWS if mesh_axis is None else mesh_axis,
    feedback=feedback_of("error", codec) if kept else None,
    key=0 if key is None else key,
  )


def _check_key(codec: LeafCodec, key: Any, *, kept: bool) -> None:
  """Raises ValueError for a missing key, or one beside a state."""
  if key is not None and kept:
    raise ValueError("`key` must be None with a state, which has the key of all calls.")
  if key is None and codec.needs_key and not kept:
    raise ValueError(
      f"`key` must be given for {codec} without a state, because it draws random "
      "numbers: pass a jax.random.key, another one in each call."
    )


def _check_rows(tree: Any, axis: int, mesh_axis: AxisName | None) -> None:
  """Raises an error if leaves are no floats, or lack rows that workers can share."""
  static_integer("axis", "the axis of the rows", axis)
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
      f"`tree` must have arrays with equally many rows on axis {axis}, one or more, "
      f"got {found or 'none'}."
    )
  if mesh_axis is None or bound_size(mesh_axis) is not None:
    return
  mesh, names = mesh_of(tree), axis_names(mesh_axis)
  if not set(names).issubset(mesh.axis_names):
    raise ValueError(
      f"`mesh_axis` must name axes of a mesh or of an enclosing map, got {mesh_axis!r} "
      f"and a mesh of {mesh.axis_names}; call jax.set_mesh(mesh), or pass "
      "mesh_axis=None for rows on one device."
    )
  (rows,), workers = counts, math.prod(mesh.shape[name] for name in names)
  if rows % workers:
    raise ValueError(
      f"`tree` must have as many rows for each of {workers} devices along "
      f"{mesh_axis!r}, got {rows} rows."
    )


def _without(axis: int, spec: P, ndim: int) -> P:
  """Returns the spec of a row, which lacks the axis."""
  names = [*names_by_axis(spec, ndim)]
  del names[axis]
  return spec_of(names)


def _means(tree: Any, axis: int) -> Any:
  """Returns the mean of a device's rows; a single row keeps its bits."""
  mean = lambda x: jnp.squeeze(x, axis) if x.shape[axis] == 1 else jnp.mean(x, axis)
  return jax.tree.map(mean, tree)


def _of_devices(tree: Any, axis: int, mesh_axis: AxisName, param_specs: Any) -> Any:
  """Returns the mean of the rows of each device, in a map over all axes that cut it."""
  mesh, names = mesh_of(tree), axis_names(mesh_axis)
  if param_specs is None and is_explicit(mesh, mesh_axis):
    param_specs = jax.tree.map(lambda x: _without(axis, typed_spec(x), x.ndim), tree)
  whole = specs_like(tree, P() if param_specs is None else param_specs, mesh_axis)

  def stacked(x: Any, spec: P) -> P:
    cut = [*names_by_axis(spec, x.ndim - 1)]
    cut.insert(axis % x.ndim, names)
    return spec_of(cut)

  rows = jax.shard_map(
    lambda tree: jax.tree.map(lambda x: x[None], _means(tree, axis)),
    mesh=mesh,
    in_specs=(jax.tree.map(stacked, tree, whole),),
    out_specs=jax.tree.map(lambda _, spec: rows_spec(mesh_axis, spec), tree, whole),
    axis_names=axes_in(whole).union(names),
  )(tree)
  return marked(rows, mesh_axis, whole)
