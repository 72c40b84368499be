"""Gradients of a worker's batch in several micro-batches, one after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.checks import static_integer
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.training.weights import mean_weight, weighed


def check_accumulate(value: Any) -> int:
  """Returns the number of micro-batches; ValueError otherwise."""
  rule = "a number of micro-batches, 1 or more"
  return static_integer("accumulate", rule, value, least=1)


def over_micro_batches(
  grad_fn: Callable[..., tuple[Any, Any]],
  argnums: int | tuple[int, ...],
  count: int,
  cut: tuple[int, ...],
) -> Callable[..., tuple[Any, Any]]:
  """Returns a function that averages the results of ``grad_fn`` over micro-batches."""

  def averaged(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    def add(total: Any, micro_batch: Any) -> tuple[Any, Any]:
      value, grads = grad_fn(*_with(args, cut, micro_batch), **kwargs)
      return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), value

    params = _picked(args, argnums)
    parts = micro_batches(args, count, cut)
    total, values = lax.scan(add, jax.tree.map(_zeros, params), parts)
    mean = lambda t, x: (t / count).astype(x.dtype)
    value = jax.tree.map(lambda x: jnp.mean(x, axis=0), values)
    return value, jax.tree.map(mean, total, params)

  return averaged


def over_weighed_micro_batches(
  grad_fn: Callable[..., tuple[Any, Any]],
  argnums: int | tuple[int, ...],
  count: int,
  cut: tuple[int, ...],
  axis_name: AxisName | None,
  *,
  has_aux: bool,
) -> Callable[..., tuple[Any, Any]]:
  """Returns a function with the weighted means over all micro-batches of all workers.

  ``grad_fn`` returns ``((loss, (weight, aux)), grads)``, with a loss that is divided by
  its own weight, see ``weights.over_own_weight``. ``cut`` are the
  arguments that are split into ``count`` micro-batches. With ``has_aux`` the mean
  ``aux`` is returned, too.
  """

  def averaged(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    def add(total: Any, micro_batch: Any) -> tuple[Any, Any]:
      value, grads = grad_fn(*_with(args, cut, micro_batch), **kwargs)
      loss, (weight, aux) = value
      own = mean_weight(weight, None)
      times = lambda t, g: t + g.astype(t.dtype) * own.astype(t.dtype)
      return jax.tree.map(times, total, grads), (loss * own, weight, aux)

    params = _picked(args, argnums)
    parts = micro_batches(args, count, cut)
    total, found = lax.scan(add, jax.tree.map(_zeros, params), parts)
    losses, weights, aux = found
    share = mean_weight(jnp.sum(weights), axis_name)
    mean = lambda t, x: (t / share.astype(t.dtype)).astype(x.dtype)
    loss = jnp.sum(losses) / share
    aux = jax.tree.map(lambda x: jnp.mean(x, axis=0), aux)
    return (loss, aux) if has_aux else loss, jax.tree.map(mean, total, params)

  return averaged


def loss_alone(
  loss_fn: Callable[..., Any],
  count: int,
  cut: tuple[int, ...],
  axis_name: AxisName | None,
  *,
  has_weight: bool,
) -> Callable[..., jax.Array]:
  """Returns the loss of all micro-batches without its gradients.

  ``loss_fn`` returns ``(loss, aux)``, or ``((total, weight), aux)`` with
  ``has_weight``. Without weights all micro-batches weigh the same.
  """

  def value(*args: Any) -> jax.Array:
    def part(micro_batch: Any) -> tuple[jax.Array, jax.Array]:
      result = loss_fn(*_with(args, cut, micro_batch))
      if has_weight:
        total, weight, _ = weighed(result, has_aux=True)
        return total, weight
      return result[0], jnp.ones_like(result[0])

    if count == 1:
      total, weight = part([args[i] for i in cut])
    else:
      found = lax.map(part, micro_batches(args, count, cut))
      total, weight = jax.tree.map(jnp.sum, found)
    return total / mean_weight(weight, axis_name if has_weight else None)

  return value


def micro_batches(args: Any, count: int, cut: tuple[int, ...]) -> tuple[Any, ...]:
  """Returns the split arguments with a new first axis of micro-batches."""

  def part(path: Any, x: Any) -> Any:
    if not jnp.shape(x) or jnp.shape(x)[0] % count:
      raise ValueError(
        f"`accumulate` must divide the first axis of a worker's part of the batch, got "
        f"{count} and the shape {jnp.shape(x)} at {jax.tree_util.keystr(path)}."
      )
    return jnp.reshape(x, (count, x.shape[0] // count, *x.shape[1:]))

  return tuple(jax.tree_util.tree_map_with_path(part, args[i]) for i in cut)


def _with(args: Any, cut: tuple[int, ...], micro_batch: Any) -> list[Any]:
  """Returns the arguments of one micro-batch."""
  own = list(args)
  for i, x in zip(cut, micro_batch, strict=True):
    own[i] = x
  return own


def _picked(args: Any, argnums: int | tuple[int, ...]) -> Any:
  return args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)


def _zeros(x: Any) -> jax.Array:
  return jnp.zeros_like(x, dtype=jnp.promote_types(x.dtype, jnp.float32))
