"""Gradients of each worker: JAX must not take their mean before the compression."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.tree_util import Partial

from gradcomp._src.checks import flag, positions
from gradcomp._src.core.specs import state_specs
from gradcomp._src.core.state import states_in
from gradcomp._src.exchange.collectives import pmean
from gradcomp._src.floats.dtypes import addend_dtype
from gradcomp._src.mesh import types
from gradcomp._src.mesh.axes import AxisName, axis_names, bound_size, require_size
from gradcomp._src.mesh.closures import arrays_of, loss_with_note
from gradcomp._src.mesh.param_specs import specs_like
from gradcomp._src.mesh.per_worker import marked
from gradcomp._src.mesh.place import GATHER_FIRST
from gradcomp._src.mesh.shard_maps import unreduce
from gradcomp._src.mesh.specs import restrict_spec, sharded_axes
from gradcomp._src.mesh.trees import combine, is_array, is_trainable, split
from gradcomp._src.training.loss_form import ACCUMULATE, LossForm, of_trainable

P = ParamSpec("P")
Params = TypeVar("Params")
Value = TypeVar("Value")


def defer_reduction(params: Params, *, axis_name: AxisName) -> Params:
  """Types the parameters as differing between workers, so that gradients stay local.

  Inside ``jax.shard_map`` with its default ``check_vma=True``, JAX all-reduces the
  gradient with respect to replicated parameters in full precision. Call this on the
  parameters before ``jax.grad``. Under ``jax.pmap``, ``jax.vmap`` and
  ``check_vma=False``, gradients are local anyway.

  In plain ``jax.jit`` under Explicit axes it types them as ``reduced``, so that
  ``jax.grad`` returns gradients typed ``{U:data}``, where JAX has rules for that: for
  matrix products, einsums, gathers and scans. As of JAX 0.12 it has none for
  convolutions, nor for operations that combine a parameter and a batch element by
  element, like a bias. :func:`value_and_grad` works for every model.

  Args:
    params: a tree whose arrays are replicated over the axis. Leaves that are not
      trained, see :func:`value_and_grad`, come out as they were.
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
    >>> jax.shard_map(grads, mesh=mesh, in_specs=P(), out_specs=P("data"))(jnp.ones(2))
    Array([2., 2.], dtype=float32)
  """
  arrays, others = split(params)
  if _in_explicit_jit(types.mesh_of(params), axis_name):
    return combine(types.mark_reduced(arrays, axis_name), others)
  require_size(axis_name, types.mesh_of(params))
  return combine(types.mark_varying(arrays, axis_name), others)


@overload
def value_and_grad(
  loss_fn: Callable[Concatenate[Params, P], Value],
  *,
  axis_name: AxisName | None,
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
  axis_name: AxisName | None,
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
  axis_name: AxisName | None,
  argnums: int | tuple[int, ...] = 0,
  has_aux: bool = False,
  has_weight: bool = False,
  accumulate: int = 1,
  batch_argnums: int | tuple[int, ...] | None = None,
  param_specs: Any = None,
  mesh: Mesh | AbstractMesh | None = None,
) -> Callable[..., tuple[Any, Any]]:
  r"""Wraps ``jax.value_and_grad`` so that each worker keeps its own gradient.

  In plain ``jax.jit`` under Explicit axes, it runs the loss in a ``jax.shard_map`` over
  the axis, on arguments sharded by their types, and returns gradients typed
  ``{U:data}``. Each worker's gradient is then divided by N, and their sum is the
  gradient of the loss over the whole batch. A float16 gradient becomes float32 before,
  and ``update`` returns float16 again, if it is given the parameters.

  There the loss must not close over arrays of the mesh. Make them arguments, or hold
  them in a ``jax.tree_util.Partial``, or in another callable that is a tree: its arrays
  become arguments. As of an argument, a worker has its part of an array that is sharded
  over the axis.

  In plain ``jax.jit`` under Auto axes, it runs the loss in such a map, too, over
  ``axis_name`` alone: other axes stay with the compiler. It returns the gradients of
  all workers, each array as a :class:`gradcomp.PerWorker`: stacked ``[N, ...]`` and
  sharded over the axis. ``update`` takes them. The arguments of ``batch_argnums``, by
  default all behind those to differentiate, are cut into the workers' parts on their
  first axes.
  Every worker has all others whole. A typed PRNG key is no batch: each worker gets a
  key of its own, ``jax.random.fold_in(key, worker)``. Raw keys, ``uint32[2]``, are
  refused as a batch, or are the same on all workers.

  Arrays of real and complex floats have gradients, as in ``equinox.filter_grad``.
  Other leaves have None in their place: functions and strings, Python's numbers and
  bools, keys, and arrays of integers. So the model may be a whole ``equinox.Module``,
  or a module of flax.nnx with its counters. ``update`` takes such gradients, and such a
  module as parameters. Optimizers of optax want ``init`` of ``equinox.filter(model,
  equinox.is_inexact_array)``, and ``equinox.apply_updates`` adds the updates. An array
  of integers is no error, because modules count in them. A weight that is one by
  mistake is not silent: ``optax.apply_updates`` refuses to add None.

  A mean of means is no mean where some parts have fewer tokens that count: padding, a
  mask, weights of examples. With ``has_weight=True`` the loss returns the sum
  :math:`S_{ij}` of the weighted losses in micro-batch j of worker i, and the sum
  :math:`W_{ij}` of their weights. Then the loss and the gradient are those of

  .. math:: \frac{\sum_{ij} S_{ij}}{\sum_{ij} W_{ij}}

  as on one device. A worker's gradient is :math:`N \sum_j \nabla S_{ij} / \sum_{ij}
  W_{ij}`; the mean of these over the workers is that gradient. Workers learn the sum of
  all weights from a message of 4 bytes. Weights are not differentiated. If all are
  zero, sums are divided by 1.

  Args:
    loss_fn: returns the mean loss over the worker's part of the batch, or ``(loss,
      aux)``.
    axis_name: the axis of the enclosing shard_map, pmap or vmap, or an axis of
      the mesh; a tuple of axes; None for none.
    argnums: the arguments to differentiate, as in JAX, each a tree with an array of
      floats.
    has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
    has_weight: whether it returns ``(total, weight)`` in place of the loss, as above.
    accumulate: the number of micro-batches that a worker takes one after the other, so
      that it holds the activations of one of them. Gradients of half precision are
      added up in float32.
    batch_argnums: the arguments that are split into micro-batches on their first axis,
      if ``accumulate`` is above 1, and into the workers' parts under Auto axes. By
      default argument 1; under Auto axes all behind those of ``argnums``, which then
      must have first axes of one length, and no other array may have that: none of
      another argument, and none that ``loss_fn`` closes over. Of an optimizer's state a
      worker has its own there.
    param_specs: under Auto axes, the specs of the arguments of ``argnums`` over other
      axes of the mesh: a tree like them of ``jax.P`` or of
      ``jax.tree.map(lambda x: x.sharding, params)``, or one for all. ``update`` then
      encodes each shard where it lies, and sends nothing over those axes. Make the
      state by :func:`gradcomp.init_state` with the same specs. By default, they are
      read from arrays outside of ``jax.jit``. Inside no type has them, and they must be
      given if the mesh has other Auto axes.
    mesh: the mesh of plain ``jax.jit``; by default that of the arguments, or of
      ``jax.set_mesh``. It must be given where neither has one: NumPy's arrays under
      ``with mesh:``, or under ``jax.jit(..., in_shardings=...)``.

  Returns:
    A function like ``loss_fn`` that returns ``(loss, grads)`` or
    ``((loss, aux), grads)``. The loss is averaged over the axis. Gradients and ``aux``
    are the worker's own, and means over the micro-batches. Under Explicit axes, where a
    value has no worker, ``aux`` is averaged over the axis, too, and so under Auto axes.

  Raises:
    ValueError: ``accumulate`` is no number of micro-batches; when called, the axis is
      not bound, or the micro-batches or the workers' parts would not be equal; under
      Explicit axes, no argument is sharded over the axis, or a differentiated one is;
      or under Auto axes, ``param_specs`` are not those of the parameters, or missing,
      or another array is as long as the batches that nobody has named.
    NotImplementedError: when called under Explicit axes, the loss closes over an array
      of the mesh. JAX raises it, and a note has the cure.
    TypeError: when called, an argument to differentiate has no array of real or complex
      floats, the loss returns no weight with ``has_weight``, an ``aux`` that is
      averaged has something that is no number, like a PRNG key, or ``param_specs`` are
      no specs.

  Example:
    >>> grad_fn = value_and_grad(lambda w, x: jnp.mean(w * x), axis_name="data")
    >>> x = jnp.array([[1.0], [3.0]])
    >>> jax.vmap(grad_fn, in_axes=(None, 0), axis_name="data")(jnp.float32(2.0), x)
    (Array([4., 4.], dtype=float32), Array([1., 3.], dtype=float32))

    Of three tokens with the losses 1, 2 and 6, one worker has one:

    >>> loss_fn = lambda w, x, mask: (w * jnp.sum(mask * x), jnp.sum(mask))
    >>> grad_fn = value_and_grad(loss_fn, axis_name="data", has_weight=True)
    >>> x, mask = jnp.array([[1.0, 2.0], [6.0, 9.0]]), jnp.array([[1, 1], [1, 0]])
    >>> workers = jax.vmap(grad_fn, in_axes=(None, 0, 0), axis_name="data")
    >>> workers(jnp.float32(1.0), x, mask)
    (Array([3., 3.], dtype=float32), Array([2., 4.], dtype=float32))
  """
  flag("has_weight", has_weight)
  split = positions("batch_argnums", 1 if batch_argnums is None else batch_argnums)
  form = LossForm(
    argnums=positions("argnums", argnums),
    has_aux=has_aux,
    has_weight=has_weight,
    accumulate=ACCUMULATE.check("accumulate", accumulate),
    cut=_several(split),
  )

  def local_value_and_grad(*given: Any, **kwargs: Any) -> tuple[Any, Any]:
    count = len(given)
    if not all(-count <= i < count for i in _several(form.argnums)):
      raise ValueError(
        f"`argnums` must be among the {count} arguments given by position, got "
        f"{form.argnums}."
      )
    differentiated = [i % count for i in _several(form.argnums)]
    for i in differentiated:
      check_trainable(f"argument {i} of `loss_fn`", given[i])
    own_loss, args = of_trainable(loss_fn, given, differentiated)
    if axis_name is None:
      return form.value_and_grad(own_loss, None)(*args, **kwargs)
    around = types.mesh_of((args, kwargs)) if mesh is None else mesh
    whole = own_loss, tuple(args), kwargs
    if _in_explicit_jit(around, axis_name):
      _check_cut([args[i] for i in differentiated], (args, kwargs), axis_name)
      value, grads = _addends(form, whole, axis_name)
      form.require_agreement(value, axis_name)
      return value, grads
    if _in_auto_jit(around, axis_name):
      behind = set(range(max(differentiated) + 1, count))
      cut = _batches(args, behind, batch_argnums)
      parts = form
      if batch_argnums is None:
        # All that workers share is cut into micro-batches, but for keys and numbers.
        has_rows = lambda i: any(
          x.ndim for x in jax.tree.leaves(args[i]) if is_array(x)
        )
        parts = dataclasses.replace(form, cut=tuple(filter(has_rows, sorted(cut))))
      if batch_argnums is None and _size(around, axis_name) > 1:
        own = cut.union(differentiated)
        others = {i: x for i, x in enumerate(args) if i not in own}
        held: dict[Any, Any] = {"": loss_fn}
        uncut = {"argument": others, "keyword": kwargs, "`loss_fn`": held}
        rows = _check_uncut([args[i] for i in sorted(cut)], uncut)
        whole = Partial(_closing_over_no_batch, own_loss, rows), *whole[1:]
      value, grads = _of_workers(parts, whole, cut, axis_name, param_specs, around)
      form.require_agreement(value, axis_name)
      return value, grads
    for i in differentiated:
      args[i] = defer_reduction(args[i], axis_name=axis_name)
    value, grads = form.value_and_grad(own_loss, axis_name)(*args, **kwargs)
    loss = pmean(value[0] if has_aux else value, axis_name)
    form.require_agreement(loss, axis_name)
    return (loss, value[1]) if has_aux else loss, grads

  return local_value_and_grad


def _several(numbers: int | tuple[int, ...]) -> tuple[int, ...]:
  return (numbers,) if isinstance(numbers, int) else numbers


def _addends(
  form: LossForm, given: tuple[Any, Any, Any], axis_name: AxisName
) -> tuple[Any, Any]:
  """Returns the mean value, and gradients divided by N, unreduced over the axes."""
  arrays, with_arrays = arrays_of(given)
  mesh, names = types.mesh_of(arrays), axis_names(axis_name)

  def local(*arrays: jax.Array) -> tuple[Any, Any]:
    loss_fn, args, kwargs = with_arrays(arrays)
    own_loss = loss_with_note(loss_fn, mesh, names)
    grad_fn = form.value_and_grad(own_loss, axis_name, averages_aux=True)
    value, grads = grad_fn(*args, **kwargs)
    share = 1 / require_size(axis_name)
    wide = lambda g: g.astype(addend_dtype(g.dtype))
    grads = jax.tree.map(lambda g: (wide(g) * share)[None], grads)
    return pmean(value, axis_name), grads

  value, stack = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=tuple(restrict_spec(types.typed_spec(x), names) for x in arrays),
    out_specs=(PartitionSpec(), PartitionSpec(axis_name)),
    axis_names=set(names),
    check_vma=False,
  )(*arrays)
  return value, unreduce(stack, axis_name)


def _of_workers(
  form: LossForm,
  given: tuple[Any, tuple[Any, ...], Any],
  cut: set[int],
  axis_name: AxisName,
  param_specs: Any,
  mesh: Mesh | AbstractMesh,
) -> tuple[Any, Any]:
  """Returns the mean value, and the gradients of all workers, under Auto axes."""
  loss_fn, *rest = given
  params: Any = tuple(rest[0][i] for i in _several(form.argnums))
  if isinstance(form.argnums, int):
    (params,) = params
  held, with_held = arrays_of(loss_fn)
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tuple(rest))
  places = [i for i, (_, x) in enumerate(leaves) if is_array(x)]
  names = axis_names(axis_name)
  param_specs = specs_like(params, param_specs, axis_name, mesh)
  size = _size(mesh, axis_name)
  in_batch = lambda path: path[0].idx == 0 and path[1].idx in cut
  rows = [in_batch(leaves[i][0]) and not _is_key(leaves[i][1]) for i in places]
  for i, is_cut in zip(places, rows, strict=True):
    path, x = leaves[i]
    if is_cut and (not x.ndim or x.shape[0] % size):
      raise ValueError(
        f"argument {path[1].idx} of `loss_fn` must have a first axis that {size} "
        f"workers can share equally, got {x.dtype} of the shape {x.shape} at "
        f"{jax.tree_util.keystr(path[2:]) or 'its root'}; name the arguments that are "
        "batches by batch_argnums=. Every worker has all others whole, and of a typed "
        "PRNG key, jax.random.key(seed), one of its own."
      )
  if not any(rows) and not any(_is_key(leaves[i][1]) for i in places):
    raise ValueError(
      f"`batch_argnums` must name an argument with arrays that {size} workers share, "
      f"got {sorted(cut)}: every worker would compute the same gradient. Pass the "
      "batch by position."
    )

  def local(arrays: Sequence[jax.Array], held: list[jax.Array]) -> tuple[Any, Any]:
    index = lax.axis_index(axis_name)
    every = [x for _, x in leaves]
    for i, x in zip(places, arrays, strict=True):
      every[i] = jax.random.fold_in(x, index) if _is_key(x) else x
    args, kwargs = jax.tree.unflatten(treedef, every)
    grad_fn = form.value_and_grad(with_held(held), axis_name, averages_aux=True)
    value, grads = grad_fn(*args, **kwargs)
    return pmean(value, axis_name), jax.tree.map(lambda g: g[None], grads)

  row, whole = PartitionSpec(axis_name), PartitionSpec()
  kept = jax.tree.leaves(state_specs(tuple(rest), axis_name=axis_name))
  specs = [row if x else kept[i] for i, x in zip(places, rows, strict=True)]
  value, stack = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(specs, whole),
    out_specs=(whole, row),
    axis_names=set(names),
    # Else a loss that starts a loop with constants would fail, as many models do.
    check_vma=False,
  )([leaves[i][1] for i in places], held)
  return value, marked(stack, axis_name, param_specs)


def _size(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> int:
  return math.prod(mesh.shape[name] for name in axis_names(axis_name))


def _check_uncut(batches: Any, uncut: dict[str, Any]) -> set[int]:
  """Returns the lengths of batches; ValueError for one among uncut arrays."""
  rows = {x.shape[0] for x in jax.tree.leaves(batches) if is_array(x) and x.ndim}
  for kind, given in uncut.items():
    parts = {name: x for name, x in given.items() if not states_in(x)}
    for path, x in jax.tree_util.tree_leaves_with_path(parts):
      name = f"{kind} {path[0].key}{jax.tree_util.keystr(path[1:])}"
      _check_no_batch(name, x, rows)
  return rows


def _check_no_batch(name: str, x: Any, rows: set[int]) -> None:
  """Raises ValueError for an array that may be a batch."""
  if is_array(x) and x.ndim and x.shape[0] in rows:
    raise ValueError(
      "`batch_argnums` must name the batches where another array has as many rows, "
      f"got None and {x.dtype}{list(x.shape)} in {name}, which every worker has whole. "
      "If it is a batch, pass it by position, behind the parameters; if it is none, "
      "pass the positions of the batches, as in batch_argnums=1."
    )


def _closing_over_no_batch(
  loss_fn: Callable[..., Any], rows: set[int], *args: Any, **kwargs: Any
) -> Any:
  """Calls a loss; ValueError for an array that it closes over and may be a batch."""
  arrays, with_arrays = arrays_of((loss_fn, args, kwargs))

  def traced(arrays: Sequence[jax.Array]) -> None:
    own_loss, args, kwargs = with_arrays(arrays)
    own_loss(*args, **kwargs)

  for x in jax.make_jaxpr(traced)(arrays).consts:
    _check_no_batch("what `loss_fn` closes over", x, rows)
  return loss_fn(*args, **kwargs)


def _batches(
  args: Sequence[Any], behind: set[int], batch_argnums: int | tuple[int, ...] | None
) -> set[int]:
  """Returns the arguments that are batches: those named, or all that may be one."""
  # An optimizer's state is none: its specs say what a worker has of it.
  if batch_argnums is not None:
    named = _several(batch_argnums)
    if not all(-len(args) <= i < len(args) for i in named):
      raise ValueError(
        f"`batch_argnums` must be among the {len(args)} arguments given by position, "
        f"got {batch_argnums}."
      )
    return {i % len(args) for i in named if not states_in(args[i])}
  found = {i for i in behind if not states_in(args[i])}
  leaves = jax.tree.leaves([args[i] for i in sorted(found)])
  lengths = {x.shape[0] for x in leaves if is_array(x) and x.ndim}
  if len(lengths) > 1:
    raise ValueError(
      "`batch_argnums` must name the arguments that are batches where the first axes "
      f"of those behind the parameters differ in length, got {sorted(lengths)}: one "
      "may be no batch, like statistics. Every worker has all others whole."
    )
  return found


def _is_key(x: Any) -> bool:
  """Returns True for one typed PRNG key, from which each worker gets its own."""
  return not x.ndim and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _in_auto_jit(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> bool:
  """Returns True for Auto axes of the mesh that no map has bound."""
  return bound_size(axis_name) is None and types.is_auto(mesh, axis_name)


def _in_explicit_jit(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> bool:
  """Returns True for Explicit axes of the mesh that no map has bound."""
  return bound_size(axis_name) is None and types.is_explicit(mesh, axis_name)


def check_trainable(name: str, params: Any) -> None:
  """Raises TypeError if no leaf has a gradient; it names the first."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  if leaves and not any(is_trainable(x) for _, x in leaves):
    path, leaf = leaves[0]
    raise TypeError(
      f"{name} must have an array of real or complex floats, which can be trained, but "
      f"has none: {jax.tree_util.keystr(path) or 'it'} is "
      f"{jax.typeof(leaf).str_short() if is_array(leaf) else repr(leaf)}; make it one "
      "by jnp.asarray(x, jnp.float32)."
    )


def _check_cut(params: Any, arguments: Any, axis_name: AxisName) -> None:
  """Raises ValueError for sharded parameters, or if no other argument is sharded."""
  names = axis_names(axis_name)
  for leaf in jax.tree.leaves(params):
    if cut := sharded_axes(types.typed_spec(leaf)).intersection(names):
      raise ValueError(
        "`argnums` must name arguments that every worker has whole, but one is "
        f"sharded over {sorted(cut)}: {GATHER_FIRST}; or compress over other axes of "
        "the batch."
      )
  specs = [types.typed_spec(leaf) for leaf in jax.tree.leaves(arguments)]
  if not all(any(name in sharded_axes(spec) for spec in specs) for name in names):
    raise ValueError(
      f"`axis_name` must shard an argument, but none is sharded over {axis_name!r}: "
      "every worker would compute the same gradient. Put the batch there: "
      "jax.device_put(batch, jax.NamedSharding(mesh, jax.P(axis_name)))."
    )
