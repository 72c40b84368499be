"""Makes gradients of all workers, and walks over what workers have."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradcomp.testing._leaves import gaussian

Gradients = Sequence[Any]  # trees with leaves [N, ...], one tree a step


def gradients_like(params: Any, workers: int, seed: int = 0) -> Any:
  """Returns Gaussian gradients of all workers, leaves ``[N, ...]``.

  Args:
    params: arrays, or their shapes and dtypes.
    workers: N.
    seed: other seeds give other numbers.

  Example:
    >>> gradients_like({"w": jnp.zeros((2, 3))}, workers=4)["w"].shape
    (4, 2, 3)
  """
  leaves, treedef = jax.tree.flatten(params)
  made = [
    jnp.asarray(gaussian((workers, *x.shape), 1000 * seed + i), x.dtype)
    for i, x in enumerate(leaves)
  ]
  return jax.tree.unflatten(treedef, made)


def workers_of(gradients: Gradients) -> int:
  return jax.tree.leaves(gradients[0])[0].shape[0]


def zipped(first: Any, *trees: Any) -> list[tuple[Any, ...]]:
  """Returns the path of each leaf, and the leaves of all trees there."""
  paths = jax.tree_util.tree_leaves_with_path(first)
  others = map(jax.tree.leaves, trees)
  names = [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
  return [(*pair, *rest) for pair, *rest in zip(names, *others, strict=True)]
