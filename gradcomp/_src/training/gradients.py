"""Gradients of each worker: JAX must not take their mean before the compression."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from gradcomp._src.checks import flag, positions
from gradcomp._src.exchange.collectives import pmean
from gradcomp._src.floats.dtypes import addend_dtype
from gradcomp._src.mesh import axes, closures, per_worker, place, shard_maps, types
from gradcomp._src.mesh.param_specs import specs_like
from gradcomp._src.mesh.trees import combine, is_array, is_trainable, split
from gradcomp._src.training import batches, constraints, loss_form

P = ParamSpec("P")
Params = TypeVar("Params")
Value = TypeVar("Value")


def defer_reduction(params: Params, *, axis_name: axes.AxisName) -> Params:
  """Returns the parameters, typed as differing between workers: gradients stay local.

  Inside ``jax.shard_map`` with its default ``check_vma=True``, JAX all-reduces the
  gradient with respect to replicated parameters in full precision. Call this on the
  parameters before ``jax.grad``. Elsewhere in maps, gradients are local anyway.

  In plain ``jax.jit`` under Explicit axes it types them as ``reduced``: ``jax.grad``
  then returns gradients typed ``{U:data}`` for matrix products, einsums, gathers and
  scans. As of JAX 0.12 convolutions fail, and so do elementwise operations of a
  parameter and a batch, like a bias. :func:`value_and_grad` works for every model.

  Args:
    params: a tree of arrays that are replicated over the axis. Leaves that are not
      trained, see :func:`value_and_grad`, come out as they were.
    axis_name: an axis of the enclosing map, or an Explicit axis of the mesh; or a tuple
      of them.

  Raises:
    ValueError: the axis is not bound by a map, nor an Explicit axis of the mesh.

  Example:
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> def grads(w):
    ...   w = gradcomp.defer_reduction(w, axis_name="data")
    ...   return jax.grad(lambda w: jnp.sum(w**2))(w)
    >>> jax.shard_map(grads, mesh=mesh, in_specs=P(), out_specs=P("data"))(jnp.ones(2))
    Array([2., 2.], dtype=float32)
  """
  arrays, others = split(params)
  mesh, kind = types.around(params, axis_name)
  if kind == AxisType.Explicit:
    return combine(types.mark_reduced(arrays, axis_name), others)
  axes.require_size(axis_name, mesh)
  return combine(types.mark_varying(arrays, axis_name), others)


@overload
def value_and_grad(
  loss_fn: Callable[Concatenate[Params, P], Value],
  *,
  axis_name: axes.AxisName | None,
  argnums: Literal[0] = 0,
  has_aux: bool = False,
  has_weight: Literal[False] = False,
  accumulate: int = 1,
  batch_argnums: int | tuple[int, ...] | None = None,
  param_specs: Any = None,
  mesh: Mesh | AbstractMesh | None = None,
) -> Callable[Concatenate[Params, P], tuple[Value, Params]]: ...


@overload
def value_and_grad(
  loss_fn: Callable[P, Any],
  *,
  axis_name: axes.AxisName | None,
  argnums: int | tuple[int, ...] = 0,
  has_aux: bool = False,
  has_weight: bool = False,
  accumulate: int = 1,
  batch_argnums: int | tuple[int, ...] | None = None,
  param_specs: Any = None,
  mesh: Mesh | AbstractMesh | None = None,
) -> Callable[P, tuple[Any, Any]]: ...


def value_and_grad(  # noqa: PLR0913 - options of users, by keyword
  loss_fn: Callable[..., Any],
  *,
  axis_name: axes.AxisName | None,
  argnums: int | tuple[int, ...] = 0,
  has_aux: bool = False,
  has_weight: bool = False,
  accumulate: int = 1,
  batch_argnums: int | tuple[int, ...] | None = None,
  param_specs: Any = None,
  mesh: Mesh | AbstractMesh | None = None,
) -> Callable[..., tuple[Any, Any]]:
  r"""Wraps ``jax.value_and_grad`` so that each worker keeps its own gradient.

  In plain ``jax.jit`` it runs the loss in a ``jax.shard_map`` over the axis. Under
  Explicit axes, arguments are sharded by their types, and gradients typed ``{U:data}``:
  each worker's is divided by N, and their sum is the gradient of the whole batch. A
  float16 gradient becomes float32 before, and ``update`` returns float16 again, if it
  is given the parameters. The loss must not close over arrays of the mesh: make them
  arguments, or leaves of a ``jax.tree_util.Partial`` or another callable tree.

  Under Auto axes, other axes stay with the compiler. Each gradient is a
  :class:`gradcomp.PerWorker` with the gradients of all workers, which ``update`` takes.
  A worker has its part of each batch, and all other arguments whole. Of a typed PRNG
  key each worker has one of its own, ``jax.random.fold_in(key, worker)``; raw keys,
  ``uint32[2]``, are refused as a batch. The loss may constrain activations over the
  axis. Only arrays of floats have gradients, as in ``equinox.filter_grad``: other
  leaves have None there, like functions, numbers, keys and integers.

  A mean of means is wrong where parts have different numbers of tokens: padding, masks,
  weights. With ``has_weight=True`` the loss returns the sum :math:`S_{ij}` of weighted
  losses in micro-batch j of worker i, and the sum :math:`W_{ij}` of the weights. Loss
  and gradient are those of

  .. math:: \frac{\sum_{ij} S_{ij}}{\sum_{ij} W_{ij}}

  as on one device. A worker's gradient is :math:`N \sum_j \nabla S_{ij} / \sum_{ij}
  W_{ij}`, with a mean over workers that is that gradient. Workers learn the sum of
  weights from 4 bytes. Weights have no gradient; if all are zero, the divisor is 1.

  Args:
    loss_fn: returns the mean loss over the worker's part of the batch.
    axis_name: the axis of the enclosing shard_map, pmap or vmap, or an axis of the
      mesh; a tuple of axes; None for none.
    argnums: the arguments to differentiate, as in JAX, each with an array of floats.
    has_aux, has_weight: whether it returns ``(loss, aux)``, and ``(total, weight)`` in
      place of the loss.
    accumulate: the number of micro-batches that a worker takes one after the other.
      Gradients of half precision are added up in float32.
    batch_argnums: the arguments that are split on their first axis: into micro-batches,
      and under Auto axes into the workers' parts. By default argument 1; under Auto
      axes all after those of ``argnums``, if their first axes have one length, and no
      other array has it. Of an optimizer's state a worker has its own there.
    param_specs: under Auto axes, the specs of the arguments of ``argnums`` over other
      axes of the mesh: a tree like them of ``jax.P`` or of ``jax.tree.map(lambda x:
      x.sharding, params)``, or one for all. ``update`` then encodes each shard where it
      lies. Make the state by :func:`gradcomp.init_state` with the same specs. By
      default, they are read from arrays outside of ``jax.jit``; inside they must be
      given if the mesh has other Auto axes.
    mesh: the mesh of plain ``jax.jit``, where neither arguments nor ``jax.set_mesh``
      have it: for NumPy's arrays under ``with mesh:``, or under ``jax.jit(...,
      in_shardings=...)``.

  Returns:
    A function like ``loss_fn`` that returns ``(loss, grads)`` or ``((loss, aux),
    grads)``. The loss is averaged over the axis. Gradients and ``aux`` are the worker's
    own, and means over the micro-batches. In plain ``jax.jit`` ``aux`` is averaged over
    the axis, too, except PRNG keys and unsigned integers, by which modules count: those
    are of the first worker, and of its last micro-batch.

  Raises:
    ValueError: an option is bad; when called, the axis is not bound, or parts of a
      batch would not be equal; under Explicit axes, no argument is sharded over the
      axis, or a differentiated one is; or under Auto axes, ``param_specs`` are missing,
      another array is as long as the batches, or the loss maps over the axis.
    NotImplementedError: by JAX, with a note: the loss closes over an array of the mesh.
    TypeError: when called, ``argnums`` has no array of floats, a weight is missing, an
      averaged ``aux`` is no number, or ``param_specs`` are no specs.

  Example:
    >>> grad_fn = value_and_grad(lambda w, x: jnp.mean(w * x), axis_name="data")
    >>> x = jnp.array([[1.0], [3.0]])
    >>> jax.vmap(grad_fn, in_axes=(None, 0), axis_name="data")(jnp.float32(2.0), x)
    (Array([4., 4.], dtype=float32), Array([1., 3.], dtype=float32))
  """
  flag("has_weight", has_weight)
  named = positions("batch_argnums", 1 if batch_argnums is None else batch_argnums)
  form = loss_form.LossForm(
    argnums=positions("argnums", argnums),
    has_aux=has_aux,
    has_weight=has_weight,
    accumulate=loss_form.ACCUMULATE.check("accumulate", accumulate),
    cut=batches.several(named),
  )

  def local_value_and_grad(*given: Any, **kwargs: Any) -> tuple[Any, Any]:
    count = len(given)
    differentiated = batches.among("argnums", form.argnums, count)
    for i in differentiated:
      check_trainable(f"argument {i} of `loss_fn`", given[i])
    own_loss, args = loss_form.of_trainable(loss_fn, given, differentiated)
    if axis_name is None:
      return form.value_and_grad(own_loss, None)(*args, **kwargs)
    params, whole = [args[i] for i in differentiated], (args, kwargs)
    around, kind = types.around(whole, axis_name, mesh)
    if kind == AxisType.Explicit:
      for _, cut_over, _ in place.leaves_cut(params, axis_name):
        raise ValueError(
          "`argnums` must name arguments that every worker has whole, got one sharded "
          f"over {cut_over}: {place.GATHER_FIRST}; or compress over other axes of the "
          "batch."
        )
      if not types.sharded_over(whole).issuperset(axes.axis_names(axis_name)):
        raise ValueError(
          "`axis_name` must shard an argument, but none is sharded over "
          f"{axis_name!r}: every worker would compute the same gradient. Put the batch "
          "there: jax.device_put(batch, jax.NamedSharding(mesh, jax.P(axis_name)))."
        )
      specs = types.typed_specs(jax.tree.leaves(whole), axis_name)
      value, stack = _stacked(form, own_loss, whole, specs, around, axis_name)
      grads = shard_maps.unreduce(stack, axis_name)
    elif kind == AxisType.Auto:
      workers = math.prod(around.shape[name] for name in axes.axis_names(axis_name))
      cut, parts = batches.batches_in(args, differentiated, batch_argnums), form
      rows = set[int]()  # of arrays that no worker may have whole
      if batch_argnums is None:
        # All that workers share is cut into micro-batches, but for keys and numbers.
        micro = tuple(i for i in cut if batches.rows_of(args[i]))
        parts = dataclasses.replace(form, cut=micro)
        if workers > 1:
          rows = batches.rows_of([args[i] for i in cut])
          uncut = set(range(count)).difference(cut, differentiated)
          others = {f"argument {i}": args[i] for i in sorted(uncut)}
          others |= {f"keyword {name}": x for name, x in kwargs.items()}
          batches.check_others(rows, others | {"`loss_fn` ": loss_fn})
      tree = params[0] if isinstance(form.argnums, int) else tuple(params)
      kept = specs_like(tree, param_specs, axis_name, around)
      specs = batches.specs_of(whole, cut, axis_name, workers)
      value, stack = _stacked(parts, own_loss, whole, specs, around, axis_name, rows)
      grads = per_worker.marked(stack, axis_name, kept)
    else:
      for i in differentiated:
        args[i] = defer_reduction(args[i], axis_name=axis_name)
      value, grads = form.value_and_grad(own_loss, axis_name)(*args, **kwargs)
      loss = pmean(value[0] if has_aux else value, axis_name)
      form.require_agreement(loss, axis_name)
      return (loss, value[1]) if has_aux else loss, grads
    form.require_agreement(value, axis_name)
    return value, grads

  return local_value_and_grad


def _stacked(  # noqa: PLR0913 - facts of a map
  form: loss_form.LossForm,
  loss_fn: Callable[..., Any],
  given: tuple[Sequence[Any], dict[str, Any]],
  specs: Sequence[PartitionSpec | None],
  mesh: Mesh | AbstractMesh,
  axis_name: axes.AxisName,
  rows: Collection[int] = (),
) -> tuple[Any, Any]:
  """Returns the mean value and gradients ``[N, ...]``, addends under Explicit axes."""
  leaves, treedef = jax.tree.flatten((*given, loss_fn))
  specs = [*specs, *types.typed_specs(leaves[len(specs) :], axis_name)]
  places = [i for i, spec in enumerate(specs) if spec is not None]
  names = frozenset(axes.axis_names(axis_name))
  is_sum = names.issubset(mesh.explicit_axes)

  def local(arrays: Sequence[jax.Array]) -> tuple[Any, Any]:
    own = loss_form.put(leaves, places, arrays)
    args, kwargs, own_loss = jax.tree.unflatten(treedef, own)
    if not is_sum:
      args, kwargs = batches.with_own_keys((args, kwargs), axis_name)
    own_loss = closures.with_note(own_loss, closures.OF_LOSS, mesh, names)
    grad_fn = form.value_and_grad(own_loss, axis_name, averages_aux=True)
    value, grads = grad_fn(*args, **kwargs)
    if is_sum:
      share = 1 / axes.require_size(axis_name)
      grads = jax.tree.map(lambda g: g.astype(addend_dtype(g.dtype)) * share, grads)
    mean = loss_form.mean_of_workers(value, axis_name)
    return mean, jax.tree.map(lambda g: g[None], grads)

  check = lambda x: batches.check_others(rows, {"what `loss_fn` closes over": x})
  return jax.shard_map(
    local if is_sum else constraints.over(local, names, mesh, check),
    mesh=mesh,
    in_specs=([specs[i] for i in places],),
    out_specs=(PartitionSpec(), PartitionSpec(axis_name)),
    axis_names=names,
    # Else a loss that starts a loop with constants would fail, as many models do.
    check_vma=False,
  )([leaves[i] for i in places])


def check_trainable(name: str, params: Any) -> None:
  """Raises TypeError if no leaf has a gradient; it names the first."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  if leaves and not any(is_trainable(x) for _, x in leaves):
    path, leaf = leaves[0]
    raise TypeError(
      f"{name} must have an array of real or complex floats to train, but has none: "
      f"{jax.tree_util.keystr(path) or 'it'} is "
      f"{jax.typeof(leaf).str_short() if is_array(leaf) else repr(leaf)}; make it one "
      "by jnp.asarray(x, jnp.float32)."
    )
