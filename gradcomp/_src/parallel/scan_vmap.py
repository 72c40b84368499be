"""An error for ``jax.vmap`` over examples around a scan that exchanges gradients."""

from typing import Any

import jax
from jax import lax

from gradcomp._src.mesh.axes import AxisName, axis_names


def not_of_examples(carry: Any, layers: Any, axis_name: AxisName) -> Any:
  """Returns the carry; ValueError under ``jax.vmap`` over it, and not over layers.

  The workers may be those of a ``jax.vmap``. Then it numbers them.
  """
  workers = [lax.axis_index(name) for name in axis_names(axis_name)]
  return _checked(carry, layers, workers)


@jax.custom_batching.custom_vmap
def _checked(carry: Any, layers: Any, workers: list[jax.Array]) -> Any:
  return carry


@_checked.def_vmap
def _batched(size: int, is_batched: Any, *given: Any) -> tuple[Any, Any]:
  del size
  of_carry, *others = is_batched
  if any(jax.tree.leaves(of_carry)) and not any(jax.tree.leaves(others)):
    raise ValueError(
      "`scan` must not be inside of jax.vmap over examples, each of which would be "
      "exchanged by itself, and take the residual once more; put jax.vmap inside of "
      "`body`, or map over layers, too, to train several models."
    )
  return _checked(*given), of_carry
