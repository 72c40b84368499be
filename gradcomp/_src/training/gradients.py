"""Gradients of each worker: JAX must not take their mean before the compression."""

from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradcomp._src.checks import flag, positions
from gradcomp._src.exchange.collectives import pmean
from gradcomp._src.floats.dtypes import addend_dtype
from gradcomp._src.mesh.axes import AxisName, axis_names, bound_size, require_size
from gradcomp._src.mesh.closures import arrays_of, loss_with_note
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp._src.mesh.specs import restrict_spec, sharded_axes
from gradcomp._src.mesh.types import (
  is_explicit,
  mark_reduced,
  mark_varying,
  mesh_of,
  typed_spec,
)
from gradcomp._src.mesh.unsharded_params import GATHER_FIRST
from gradcomp._src.training.loss_form import LossForm, check_accumulate

P = ParamSpec("P")
Params = TypeVar("Params")
Value = TypeVar("Value")


def defer_reduction(params: Params, *, axis_name: AxisName) -> Params:
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
    ...   w = gradcomp.defer_reduction(w, axis_name="data")
    ...   return jax.grad(lambda w: jnp.sum(w**2))(w)
    >>> jax.shard_map(
    ...   grads, mesh=mesh, in_specs=P(), out_specs=P("data")
    ... )(jnp.ones(2))
    Array([2., 2.], dtype=float32)
  """
  if _in_explicit_jit(params, axis_name):
    return mark_reduced(params, axis_name)
  require_size(axis_name, mesh_of(params))
  return mark_varying(params, axis_name)


@overload
def value_and_grad(
  loss_fn: Callable[Concatenate[Params, P], Value],
  *,
  axis_name: AxisName | None,
  argnums: Literal[0] = 0,
  has_aux: bool = False,
  has_weight: Literal[False] = False,
  accumulate: int = 1,
  batch_argnums: int | tuple[int, ...] = 1,
) -> Callable[Concatenate[Params, P], tuple[Value, Params]]: ...


@overload
def value_and_grad(
  loss_fn: Callable[P, Any],
  *,
  axis_name: AxisName | None,
  argnums: int | tuple[int, ...] = 0,
  has_aux: bool = False,
  has_weight: bool = False,
  accumulate: int = 1,
  batch_argnums: int | tuple[int, ...] = 1,
) -> Callable[P, tuple[Any, Any]]: ...


def value_and_grad(  # noqa: PLR0913 - options of users, by keyword
  loss_fn: Callable[..., Any],
  *,
  axis_name: AxisName | None,
  argnums: int | tuple[int, ...] = 0,
  has_aux: bool = False,
  has_weight: bool = False,
  accumulate: int = 1,
  batch_argnums: int | tuple[int, ...] = 1,
) -> Callable[..., tuple[Any, Any]]:
  r"""Wraps ``jax.value_and_grad`` so that each worker keeps its own gradient.

  In plain ``jax.jit`` under Explicit axes, it runs the loss in a ``jax.shard_map`` over
  the axis, on arguments sharded by their types, and returns gradients typed
  ``{U:data}``. Each worker's gradient is then divided by N, and their sum is the
  gradient of the loss over the whole batch. A float16 gradient becomes float32 before,
  because float16 does not hold 1/N of its smallest numbers. ``update`` returns float16
  again, if it is given the parameters.

  There the loss must not close over arrays of the mesh, which JAX does not let it read
  in a map. Make them arguments, or hold them in a ``jax.tree_util.Partial``, or in
  another callable that is a tree: its arrays become arguments. As of an argument, a
  worker has its part of an array that is sharded over the axis.

  A mean of means is no mean where some parts have fewer tokens that count: padding, a
  mask, weights of examples. With ``has_weight=True`` the loss returns the sum
  :math:`S_{ij}` of the weighted losses in micro-batch j of worker i, and the sum
  :math:`W_{ij}` of their weights. Then the loss and the gradient are those of

  .. math:: \frac{\sum_{ij} S_{ij}}{\sum_{ij} W_{ij}}

  over all micro-batches of all workers, as on one device. A worker's gradient is
  :math:`N \sum_j \nabla S_{ij} / \sum_{ij} W_{ij}`; the mean of these over the workers
  is that gradient. Workers learn the sum of all weights from a message of 4 bytes.
  Weights are not differentiated. If all are zero, sums are divided by 1.

  Args:
    loss_fn: returns the worker's loss, or ``(loss, aux)``. The loss is the mean over
      the worker's part of the batch.
    axis_name: the axis of the enclosing shard_map, pmap or vmap, or an Explicit axis of
      the mesh; a tuple of axes; None for none.
    argnums: the arguments to differentiate, as in JAX.
    has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
    has_weight: whether it returns ``(total, weight)`` in place of the loss, as above.
    accumulate: the number of micro-batches that a worker takes one after the other, so
      that it holds the activations of one of them. Gradients of half precision are
      added up in float32.
    batch_argnums: the arguments that are split into micro-batches on their first axis,
      if ``accumulate`` is above 1.

  Returns:
    A function like ``loss_fn`` that returns ``(loss, grads)`` or
    ``((loss, aux), grads)``. The loss is averaged over the axis. Gradients and ``aux``
    are the worker's own, and means over the micro-batches. Under Explicit axes, where a
    value has no worker, ``aux`` is averaged over the axis, too.

  Raises:
    ValueError: ``accumulate`` is no number of micro-batches; when called, the axis is
      not bound, or the micro-batches would not be equal; or under Explicit axes, no
      argument is sharded over the axis, or a differentiated one is.
    NotImplementedError: when called under Explicit axes, the loss closes over an array
      of the mesh. JAX raises it, and a note has the cure.
    TypeError: when called, a leaf to differentiate is no real or complex float, or the
      loss returns no weight with ``has_weight``.

  Example:
    >>> grad_fn = value_and_grad(lambda w, x: jnp.mean(w * x), axis_name="data")
    >>> x = jnp.array([[1.0], [3.0]])
    >>> jax.vmap(grad_fn, in_axes=(None, 0), axis_name="data")(jnp.float32(2.0), x)
    (Array([4., 4.], dtype=float32), Array([1., 3.], dtype=float32))

    Of three tokens with the losses 1, 2 and 6, one worker has one:

    >>> loss_fn = lambda w, x, mask: (w * jnp.sum(mask * x), jnp.sum(mask))
    >>> grad_fn = value_and_grad(loss_fn, axis_name="data", has_weight=True)
    >>> x, mask = jnp.array([[1.0, 2.0], [6.0, 9.0]]), jnp.array([[1, 1], [1, 0]])
    >>> jax.vmap(grad_fn, in_axes=(None, 0, 0), axis_name="data")(
    ...   jnp.float32(1.0), x, mask
    ... )
    (Array([3., 3.], dtype=float32), Array([2., 4.], dtype=float32))
  """
  flag("has_weight", has_weight)
  form = LossForm(
    argnums=positions("argnums", argnums),
    has_aux=has_aux,
    has_weight=has_weight,
    accumulate=check_accumulate(accumulate),
    cut=_several(positions("batch_argnums", batch_argnums)),
  )
  if axis_name is None:
    return form.value_and_grad(loss_fn, None)

  def local_value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    differentiated = _several(form.argnums)
    if not all(-len(args) <= i < len(args) for i in differentiated):
      raise ValueError(
        f"`argnums` must be among the {len(args)} arguments given by position, got "
        f"{form.argnums}."
      )
    for i in differentiated:
      _check_floats(i, args[i])
    if _in_explicit_jit((args, kwargs), axis_name):
      _check_cut([args[i] for i in differentiated], (args, kwargs), axis_name)
      return _addends(form, loss_fn, axis_name, args, kwargs)
    marked = list(args)
    for i in differentiated:
      marked[i] = defer_reduction(marked[i], axis_name=axis_name)
    value, grads = form.value_and_grad(loss_fn, axis_name)(*marked, **kwargs)
    if has_aux:
      return (pmean(value[0], axis_name), value[1]), grads
    return pmean(value, axis_name), grads

  return local_value_and_grad


def _several(numbers: int | tuple[int, ...]) -> tuple[int, ...]:
  return (numbers,) if isinstance(numbers, int) else numbers


def _addends(
  form: LossForm,
  loss_fn: Callable[..., Any],
  axis_name: AxisName,
  args: Any,
  kwargs: Any,
) -> tuple[Any, Any]:
  """Returns the mean value, and gradients divided by N, unreduced over the axes.

  Each worker has its parts of the arrays of all arguments, and of the loss, if that is
  a tree.
  """
  arrays, with_arrays = arrays_of((loss_fn, args, kwargs))
  mesh, names = mesh_of(arrays), axis_names(axis_name)

  def local(*arrays: jax.Array) -> tuple[Any, Any]:
    loss_fn, args, kwargs = with_arrays(arrays)
    grad_fn = form.value_and_grad(loss_with_note(loss_fn, mesh, names), axis_name)
    value, grads = grad_fn(*args, **kwargs)
    share = 1 / require_size(axis_name)
    wide = lambda g: g.astype(addend_dtype(g.dtype))
    grads = jax.tree.map(lambda g: (wide(g) * share)[None], grads)
    return pmean(value, axis_name), grads

  value, stack = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=tuple(restrict_spec(typed_spec(x), names) for x in arrays),
    out_specs=(PartitionSpec(), PartitionSpec(axis_name)),
    axis_names=set(names),
    check_vma=False,
  )(*arrays)
  return value, unreduce(stack, axis_name)


def _in_explicit_jit(tree: Any, axis_name: AxisName) -> bool:
  """Returns True for Explicit axes of the mesh that no map has bound."""
  if bound_size(axis_name) is not None:
    return False
  return is_explicit(mesh_of(tree), axis_name)


def _check_floats(argument: int, params: Any) -> None:
  """Raises TypeError for leaves that are not floats, with the name of the leaf."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if not jnp.issubdtype(dtype := jax.typeof(leaf).dtype, jnp.inexact):
      raise TypeError(
        f"argument {argument} of `loss_fn` must have leaves of real or complex floats, "
        f"which can be trained, but {jax.tree_util.keystr(path)} is of {dtype}; make "
        "what is not trained an argument of its own, behind the batch."
      )


def _check_cut(params: Any, arguments: Any, axis_name: AxisName) -> None:
  """Raises ValueError for sharded parameters, or if no other argument is sharded."""
  names = axis_names(axis_name)
  for leaf in jax.tree.leaves(params):
    if cut := sharded_axes(typed_spec(leaf)).intersection(names):
      raise ValueError(
        "`argnums` must name arguments that every worker has whole, but one is "
        f"sharded over {sorted(cut)}: {GATHER_FIRST}; or compress over other axes of "
        "the batch."
      )
  specs = [typed_spec(leaf) for leaf in jax.tree.leaves(arguments)]
  if not all(any(name in sharded_axes(spec) for spec in specs) for name in names):
    raise ValueError(
      f"`axis_name` must shard an argument, but none is sharded over {axis_name!r}: "
      "every worker would compute the same gradient. Put the batch there: "
      "jax.device_put(batch, jax.NamedSharding(mesh, jax.P(axis_name)))."
    )
