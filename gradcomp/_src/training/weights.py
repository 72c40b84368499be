"""Division of summed losses by the sum of their weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.exchange.collectives import pmean
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.types import mark_varying


class Weighed(NamedTuple):
  """The parts of a loss with a weight; both numbers in float32 or wider."""

  total: jax.Array
  weight: jax.Array
  aux: Any


def weighed(result: Any, *, has_aux: bool) -> Weighed:
  """Returns the parts of ``(total, weight)``, or ``((total, weight), aux)``.

  TypeError for a result of another form, or numbers that are not scalars.
  """
  match result:
    case ((total, weight), aux) if has_aux:
      pass
    case (total, weight) if not has_aux:
      aux = None
    case _:
      total = weight = aux = None
  if not _is_number(total, jnp.floating) or not _is_number(weight, jnp.number):
    form = "((total, weight), aux)" if has_aux else "(total, weight)"
    raise TypeError(
      f"`loss_fn` must return {form} with has_weight=True and has_aux={has_aux}, where "
      "total is a real float, the sum of weighted losses, and weight a number, the sum "
      f"of their weights, got {jax.tree.map(jnp.shape, result)}."
    )
  wide = jnp.promote_types(jnp.result_type(total), jnp.float32)
  weight = lax.stop_gradient(jnp.asarray(weight)).astype(wide)
  return Weighed(jnp.asarray(total).astype(wide), weight, aux)


def over_all_weight(
  loss_fn: Callable[..., Any], axis_name: AxisName | None, *, has_aux: bool
) -> Callable[..., Any]:
  """Divides a loss by the mean weight: its mean over workers is the weighted mean.

  ``loss_fn`` returns a worker's sum and weight.
  """

  def loss(*args: Any, **kwargs: Any) -> Any:
    total, weight, aux = weighed(loss_fn(*args, **kwargs), has_aux=has_aux)
    value = total / mean_weight(weight, axis_name)
    return (value, aux) if has_aux else value

  return loss


def over_own_weight(loss_fn: Callable[..., Any], *, has_aux: bool) -> Any:
  """Returns a loss that divides by its own weight, with ``(weight, aux)`` as its aux.

  So gradients of half precision are those of a mean, which fits into their range.
  """

  def loss(*args: Any, **kwargs: Any) -> Any:
    total, weight, aux = weighed(loss_fn(*args, **kwargs), has_aux=has_aux)
    return total / mean_weight(weight, None), (weight, aux)

  return loss


def mean_weight(weight: jax.Array, axis_name: AxisName | None) -> jax.Array:
  """Returns the mean of the workers' weights; 1 if it is zero."""
  if axis_name is not None:
    weight = pmean(mark_varying(weight, axis_name), axis_name)
  return jnp.where(weight == 0, jnp.ones_like(weight), weight)


def _is_number(x: Any, kind: Any) -> bool:
  if x is None or not jax.tree_util.all_leaves([x]) or jnp.shape(x):
    return False
  return bool(jnp.issubdtype(jnp.result_type(x), kind))
