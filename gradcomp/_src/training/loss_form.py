"""Losses and their gradients over micro-batches, as plain or weighted means."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from gradcomp._src import checks
from gradcomp._src.exchange.collectives import pmean, psum
from gradcomp._src.mesh import agreement, trees, types
from gradcomp._src.mesh.axes import AxisName

Function = Callable[..., Any]  # a loss, or one that returns a value and gradients
_KEY = jax.dtypes.prng_key
ACCUMULATE = checks.integer("a number of micro-batches, 1 or more", 1)


def of_trainable(
  loss_fn: Function, args: Sequence[Any], argnums: Sequence[int]
) -> tuple[Function, list[Any]]:
  """Returns a loss of the trainable leaves of arguments, and its arguments."""
  # It holds all else, and is then a tree: its arrays become arguments of maps.
  own, others = list(args), {}
  for i in argnums:
    own[i], others[i] = trees.split(own[i])
  if not jax.tree.leaves(others):
    return loss_fn, own

  def combined(loss_fn: Any, others: dict[int, Any], *args: Any, **kwargs: Any) -> Any:
    whole = [trees.combine(args[i], part) for i, part in others.items()]
    return loss_fn(*put(args, others, whole), **kwargs)

  return Partial(combined, loss_fn, others), own


def check_numbers(aux: Any) -> None:
  """Raises TypeError for a leaf without a mean in an aux that is averaged."""
  for path, x in jax.tree_util.tree_leaves_with_path(aux):
    kind = getattr(x, "dtype", type(x))
    if not any(jnp.issubdtype(kind, x) for x in (jnp.number, jnp.bool_, _KEY)):
      raise TypeError(
        f"`aux`{jax.tree_util.keystr(path)} must be a PRNG key or numbers, because aux "
        "is averaged over workers and micro-batches, got "
        f"{jax.typeof(x).str_short() if hasattr(x, 'dtype') else repr(x)}; let "
        "`loss_fn` return an aux without it."
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

  def require_agreement(self, means: Any, axis_name: AxisName) -> None:
    """Raises ValueError if another process averages other values, or in other form."""
    told = {x: y for x, y in vars(self).items() if x != "accumulate"}  # sends nothing
    agreement.require_agreement("gradcomp.value_and_grad", told, means, axis_name)

  def value_and_grad(
    self, loss_fn: Function, axis_name: AxisName | None, *, averages_aux: bool = False
  ) -> Function:
    """Returns a function with a worker's value and gradients, or its part of means."""
    several = self.accumulate > 1
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

    has_aux = self.has_aux or (self.has_weight and several)
    grad_fn = jax.value_and_grad(one, self.argnums, has_aux)
    return self._accumulated(grad_fn, axis_name) if several else grad_fn

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

  def _accumulated(self, grad_fn: Function, axis_name: AxisName | None) -> Function:
    """Returns a function with the means of ``grad_fn`` over micro-batches."""
    one = lambda x: x[-1] if _counts(x) else jnp.mean(x, axis=0)
    mean = lambda tree: jax.tree.map(one, tree)

    def averaged(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
      def add(total: Any, micro_batch: Any) -> tuple[Any, Any]:
        value, grads = grad_fn(*put(args, self.cut, micro_batch), **kwargs)
        part = lambda t, g: g.astype(t.dtype)
        if self.has_weight:
          loss, (weight, aux) = value
          own = _mean_weight(weight, None)
          value = loss * own, weight, aux
          part = lambda t, g: g.astype(t.dtype) * own.astype(t.dtype)
        return jax.tree.map(lambda t, g: t + part(t, g), total, grads), value

      n = self.argnums
      params = args[n] if isinstance(n, int) else tuple(args[i] for i in n)
      zeros = lambda x: jnp.zeros_like(x, dtype=jnp.promote_types(x.dtype, jnp.float32))
      totals, value = lax.scan(add, jax.tree.map(zeros, params), self._split(args))
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

    return averaged

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
    match result if self.has_aux else (result, None):
      case ((total, weight), aux):
        pass
      case _:
        total = weight = aux = None
    if not _is_number(total, jnp.floating) or not _is_number(weight, jnp.number):
      form = "((total, weight), aux)" if self.has_aux else "(total, weight)"
      raise TypeError(
        f"`loss_fn` must return {form} with has_weight=True and has_aux={self.has_aux},"
        " where total is a real float, the sum of weighted losses, and weight a number,"
        f" the sum of their weights, got {jax.tree.map(jnp.shape, result)}."
      )
    wide = jnp.promote_types(jnp.result_type(total), jnp.float32)
    weight = lax.stop_gradient(jnp.asarray(weight)).astype(wide)
    return jnp.asarray(total).astype(wide), weight, aux


def _mean_weight(weight: jax.Array, axis_name: AxisName | None) -> jax.Array:
  """Returns the mean of the workers' weights; 1 if it is zero."""
  if axis_name is not None:
    weight = pmean(types.mark_varying(weight, axis_name), axis_name)
  return jnp.where(weight == 0, jnp.ones_like(weight), weight)


def _is_number(x: Any, kind: Any) -> bool:
  is_scalar = x is not None and jax.tree_util.all_leaves([x]) and not jnp.shape(x)
  return bool(is_scalar and jnp.issubdtype(jnp.result_type(x), kind))
