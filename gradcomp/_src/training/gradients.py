"""Gradients of each worker: JAX must not take their mean before the compression."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jax.tree_util import Partial

from gradcomp._src.checks import flag, integer, positions
from gradcomp._src.exchange.collectives import pmean, psum
from gradcomp._src.floats.dtypes import addend_dtype
from gradcomp._src.mesh import axes, shard_maps, trees, types
from gradcomp._src.mesh.agreement import require_agreement
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.shard_maps import OF_LOSS, specs_like, with_note
from gradcomp._src.mesh.types import GATHER_FIRST, leaves_cut
from gradcomp._src.training import batches, constraints

P = ParamSpec("P")
Params = TypeVar("Params")
Value = TypeVar("Value")
_KEY = jax.dtypes.prng_key
ACCUMULATE = integer("a number of micro-batches, 1 or more", 1)
Function = Callable[..., Any]  # a loss, or one that returns a value and gradients


def defer_reduction(params: Params, *, axis_name: AxisName) -> Params:
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
  arrays, others = trees.split(params)
  mesh, kind = types.around(params, axis_name)
  if kind == AxisType.Explicit:
    return trees.combine(types.mark_reduced(arrays, axis_name), others)
  axes.require_size(axis_name, mesh)
  return trees.combine(types.mark_varying(arrays, axis_name), others)


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
  cut = 1 if batch_argnums is None else batch_argnums
  form = LossForm(
    argnums=positions("argnums", argnums),
    has_aux=has_aux,
    has_weight=has_weight,
    accumulate=ACCUMULATE.check("accumulate", accumulate),
    cut=batches.several(positions("batch_argnums", cut)),
  )
  told = vars(form) | {"accumulate": None}  # how many micro-batches sends nothing

  def local_value_and_grad(*given: Any, **kwargs: Any) -> tuple[Any, Any]:
    differentiated = batches.among("argnums", form.argnums, len(given))
    names = {i: f"argument {i} of `loss_fn`" for i in differentiated}
    own_loss, args = of_trainable(loss_fn, given, names)
    if axis_name is None:
      return form.value_and_grad(own_loss, None)(*args, **kwargs)
    params, whole = [args[i] for i in differentiated], (args, kwargs)
    around, kind = types.around(whole, axis_name, mesh)
    is_sum = kind == AxisType.Explicit
    if not is_sum and kind != AxisType.Auto:
      for i in differentiated:
        args[i] = defer_reduction(args[i], axis_name=axis_name)
      value, grads = form.value_and_grad(own_loss, axis_name)(*args, **kwargs)
      loss = pmean(value[0] if has_aux else value, axis_name)
      require_agreement("gradcomp.value_and_grad", told, loss, axis_name)
      return (loss, value[1]) if has_aux else loss, grads
    over, parts = frozenset(axes.axis_names(axis_name)), form
    if is_sum:
      for _, cut_over, _ in leaves_cut(params, axis_name):
        raise ValueError(
          "`argnums` must name arguments that every worker has whole, got one sharded "
          f"over {cut_over}: {GATHER_FIRST}; or compress over other axes of the "
          "batch."
        )
      if not types.sharded_over(whole).issuperset(over):
        raise ValueError(
          "`axis_name` must shard an argument, but none is sharded over "
          f"{axis_name!r}: every worker would compute the same gradient. Put the batch "
          "there: jax.device_put(batch, jax.NamedSharding(mesh, jax.P(axis_name)))."
        )
      specs = types.typed_specs(jax.tree.leaves(whole), axis_name)
    else:
      workers = math.prod(around.shape[name] for name in over)
      specs, micro_batches, rows = batches.argument_specs(
        whole, loss_fn, differentiated, batch_argnums, axis_name, workers
      )
      parts = dataclasses.replace(form, cut=micro_batches)
      tree = params[0] if isinstance(form.argnums, int) else tuple(params)
      kept = specs_like(tree, param_specs, axis_name, around)
    leaves, treedef = jax.tree.flatten((args, kwargs, own_loss))
    specs += types.typed_specs(leaves[len(specs) :], axis_name)
    places = [i for i, spec in enumerate(specs) if spec is not None]

    def local(arrays: Sequence[jax.Array]) -> tuple[Any, Any]:
      own = put(leaves, places, arrays)
      args, kwargs, own_loss = jax.tree.unflatten(treedef, own)
      if not is_sum:
        args, kwargs = batches.with_own_keys((args, kwargs), axis_name)
      own_loss = with_note(own_loss, OF_LOSS, around, over)
      grad_fn = parts.value_and_grad(own_loss, axis_name, averages_aux=True)
      value, grads = grad_fn(*args, **kwargs)
      if is_sum:
        share = 1 / axes.require_size(axis_name)
        grads = jax.tree.map(lambda g: g.astype(addend_dtype(g.dtype)) * share, grads)
      mean = mean_of_workers(value, axis_name)
      return mean, jax.tree.map(lambda g: g[None], grads)

    in_map = local
    if not is_sum:
      check = lambda x: batches.check_others(rows, {"what `loss_fn` closes over": x})
      in_map = constraints.over(local, over, around, check)
    value, stack = jax.shard_map(
      in_map,
      mesh=around,
      in_specs=([specs[i] for i in places],),
      out_specs=(PartitionSpec(), PartitionSpec(axis_name)),
      axis_names=over,
      # Else a loss that starts a loop with constants would fail, as many models do.
      check_vma=False,
    )([leaves[i] for i in places])
    require_agreement("gradcomp.value_and_grad", told, value, axis_name)
    if is_sum:
      return value, shard_maps.unreduce(stack, axis_name)
    return value, trees.marked(stack, axis_name, kept)

  return local_value_and_grad


def of_trainable(
  loss_fn: Function, args: Sequence[Any], names: dict[int, str]
) -> tuple[Function, list[Any]]:
  """Returns a loss of named arguments' trainable leaves, and its arguments."""
  # It holds all else, and is then a tree: its arrays become arguments of maps.
  own, others = list(args), {}
  for i, name in names.items():
    own[i], others[i] = trees.split(args[i])
    leaves = jax.tree_util.tree_leaves_with_path(args[i])
    if leaves and not jax.tree.leaves(own[i]):
      path, leaf = leaves[0]
      raise TypeError(
        f"{name} must have an array of real or complex floats to train, but has none: "
        f"{jax.tree_util.keystr(path) or 'it'} is {_shown(leaf)}; make it one by "
        "jnp.asarray(x, jnp.float32)."
      )
  if not jax.tree.leaves(others):
    return loss_fn, own

  def combined(loss_fn: Any, others: dict[int, Any], *args: Any, **kwargs: Any) -> Any:
    whole = [trees.combine(args[i], part) for i, part in others.items()]
    return loss_fn(*put(args, others, whole), **kwargs)

  return Partial(combined, loss_fn, others), own


def _shown(x: Any) -> str:
  return jax.typeof(x).str_short() if trees.is_array(x) else repr(x)


def check_numbers(aux: Any) -> None:
  """Raises TypeError for a leaf without a mean in an aux that is averaged."""
  for path, x in jax.tree_util.tree_leaves_with_path(aux):
    kind = getattr(x, "dtype", type(x))
    if not any(jnp.issubdtype(kind, x) for x in (jnp.number, jnp.bool_, _KEY)):
      raise TypeError(
        f"`aux`{jax.tree_util.keystr(path)} must be a PRNG key or numbers, because aux "
        f"is averaged over workers and micro-batches, got {_shown(x)}; let `loss_fn` "
        "return an aux without it."
      )


def mean_of_workers(tree: Any, axis_name: AxisName | None) -> Any:
  """Returns means over the workers; keys and unsigned integers of the first worker."""
  if axis_name is None:
    return tree

  def first(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, _KEY):
      data = first(jax.random.key_data(x))
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return psum(jnp.where(lax.axis_index(axis_name) == 0, x, 0), axis_name)

  leaves, treedef = jax.tree.flatten(tree)
  means = iter(pmean([x for x in leaves if not _counts(x)], axis_name))
  found = [first(x) if _counts(x) else next(means) for x in leaves]
  return jax.tree.unflatten(treedef, found)


def _counts(x: Any) -> bool:
  """Returns True for a PRNG key and for unsigned integers, by which modules count."""
  dtype = jnp.result_type(x)
  return any(jnp.issubdtype(dtype, kind) for kind in (jnp.unsignedinteger, _KEY))


def put(args: Sequence[Any], places: Iterable[int], new: Sequence[Any]) -> list[Any]:
  """Returns arguments with others at some places."""
  own = list(args)
  for i, x in zip(places, new, strict=True):
    own[i] = x
  return own


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossForm:
  """The form of a loss, with the options of :func:`gradcomp.value_and_grad`."""

  argnums: int | tuple[int, ...] = 0
  has_aux: bool
  has_weight: bool
  accumulate: int
  cut: tuple[int, ...] = (1,)  # batch_argnums

  def value_and_grad(
    self, loss_fn: Function, axis_name: AxisName | None, *, averages_aux: bool = False
  ) -> Function:
    """Returns a function with a worker's value and gradients, or its part of means."""
    several, n = self.accumulate > 1, self.argnums
    averages_aux = self.has_aux and (averages_aux or several)

    def one(*args: Any, **kwargs: Any) -> Any:
      result = loss_fn(*args, **kwargs)
      match result:
        case (_, aux) if averages_aux:
          check_numbers(aux)
      if not self.has_weight:
        return result
      total, weight, aux = self._weighed(result)
      # Gradients of half precision are those of a mean, which fits into their range.
      value = total / _mean_weight(weight, None if several else axis_name)
      if several:
        return value, (weight, aux)
      return (value, aux) if self.has_aux else value

    grad_fn = jax.value_and_grad(one, n, self.has_aux or (self.has_weight and several))
    if not several:
      return grad_fn

    def accumulated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
      def add(total: Any, micro_batch: Any) -> tuple[Any, Any]:
        value, grads = grad_fn(*put(args, self.cut, micro_batch), **kwargs)
        part = lambda t, g: g.astype(t.dtype)
        if self.has_weight:
          loss, (weight, aux) = value
          own = _mean_weight(weight, None)
          value = loss * own, weight, aux
          part = lambda t, g: g.astype(t.dtype) * own.astype(t.dtype)
        return jax.tree.map(lambda t, g: t + part(t, g), total, grads), value

      params = args[n] if isinstance(n, int) else tuple(args[i] for i in n)
      zeros = lambda x: jnp.zeros_like(x, dtype=jnp.promote_types(x.dtype, jnp.float32))
      totals, value = lax.scan(add, jax.tree.map(zeros, params), self._split(args))
      of_leaf = lambda x: x[-1] if _counts(x) else jnp.mean(x, axis=0)
      mean = functools.partial(jax.tree.map, of_leaf)
      share: Any = self.accumulate
      if self.has_weight:
        losses, weights, aux = value
        share = _mean_weight(jnp.sum(weights), axis_name)
        loss = jnp.sum(losses) / share
        value = (loss, mean(aux)) if self.has_aux else loss
      else:
        value = mean(value)
      divide = lambda t, x: (t / jnp.asarray(share, t.dtype)).astype(x.dtype)
      return value, jax.tree.map(divide, totals, params)

    return accumulated

  def value(
    self, loss_fn: Function, axis_name: AxisName | None, args: Sequence[Any]
  ) -> jax.Array:
    """Returns the loss of all micro-batches, of a loss with aux, without gradients."""

    def part(micro_batch: Any) -> tuple[jax.Array, jax.Array]:
      result = loss_fn(*put(args, self.cut, micro_batch))
      if self.has_weight:
        return self._weighed(result)[:2]
      return result[0], jnp.ones_like(result[0])

    if self.accumulate == 1:
      total, weight = part([args[i] for i in self.cut])
    else:
      total, weight = jax.tree.map(jnp.sum, lax.map(part, self._split(args)))
    return total / _mean_weight(weight, axis_name if self.has_weight else None)

  def _split(self, args: Any) -> tuple[Any, ...]:
    """Returns the split arguments with a new first axis of micro-batches."""

    def part(path: Any, x: Any) -> Any:
      if not jnp.shape(x) or jnp.shape(x)[0] % self.accumulate:
        raise ValueError(
          "`accumulate` must divide the first axis of a worker's part of the batch, "
          f"got {self.accumulate} and the shape {jnp.shape(x)} at "
          f"{jax.tree_util.keystr(path)}."
        )
      rows = x.shape[0] // self.accumulate
      return jnp.reshape(x, (self.accumulate, rows, *x.shape[1:]))

    return tuple(jax.tree_util.tree_map_with_path(part, args[i]) for i in self.cut)

  def _weighed(self, result: Any) -> tuple[jax.Array, jax.Array, Any]:
    """Returns a loss's total and weight, in float32 or wider, and aux."""
    is_number = lambda x, kind: (
      jax.tree_util.all_leaves([x])
      and not jnp.shape(x)
      and jnp.issubdtype(jnp.result_type(x), kind)
    )
    match result if self.has_aux else (result, None):
      case ((total, weight), aux) if is_number(total, jnp.floating) and is_number(
        weight, jnp.number
      ):
        wide = jnp.promote_types(jnp.result_type(total), jnp.float32)
        weight = lax.stop_gradient(jnp.asarray(weight)).astype(wide)
        return jnp.asarray(total).astype(wide), weight, aux
    form = "((total, weight), aux)" if self.has_aux else "(total, weight)"
    raise TypeError(
      f"`loss_fn` must return {form} with has_weight=True and has_aux={self.has_aux}, "
      "where total is a real float, the sum of weighted losses, and weight a number, "
      f"the sum of their weights, got {jax.tree.map(jnp.shape, result)}."
    )


def _mean_weight(weight: jax.Array, axis_name: AxisName | None) -> jax.Array:
  """Returns the mean of the workers' weights; 1 if it is zero."""
  if axis_name is not None:
    weight = pmean(types.mark_varying(weight, axis_name), axis_name)
  return jnp.where(weight == 0, jnp.ones_like(weight), weight)
