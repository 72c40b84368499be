"""Gradients of all workers, and iteration over several workers' trees."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gradcomp._src.floats.dtypes import has_smaller_range
from gradcomp._src.testing.leaves import gaussian

Gradients = Sequence[Any]  # trees with leaves [N, ...], one tree a step


def near_the_top(shape: tuple[int, ...], dtype: DTypeLike, seed: int = 0) -> np.ndarray:
  """Returns gradients ``[N, ...]``; a sum of three overflows the dtype.

  All workers agree on the signs.

  Example:
    >>> bool(abs(near_the_top((3, 2), jnp.float16).sum(0)).min() > 65504)
    True
  """
  rng = np.random.default_rng(seed)
  signs = rng.choice([-1.0, 1.0], shape[1:])
  numbers = signs * rng.uniform(0.5, 0.95, shape) * float(jnp.finfo(dtype).max)
  return numbers.astype(dtype).astype(np.float32)


def gradients_like(params: Any, workers: int, seed: int = 0) -> Any:
  """Returns Gaussian gradients of all workers, leaves ``[N, ...]``.

  In dtypes with a smaller range than float32 they are near its end.

  Args:
    params: arrays, or their shapes and dtypes.
    workers: N.
    seed: other seeds give other numbers.

  Example:
    >>> gradients_like({"w": jnp.zeros((2, 3))}, workers=4)["w"].shape
    (4, 2, 3)
  """
  leaves, treedef = jax.tree.flatten(params)

  def make(x: jax.Array, seed: int) -> jax.Array:
    shape = (workers, *x.shape)
    small = jnp.issubdtype(x.dtype, jnp.floating) and has_smaller_range(x.dtype)
    numbers = near_the_top(shape, x.dtype, seed) if small else gaussian(shape, seed)
    return jnp.asarray(numbers, x.dtype)

  made = [make(x, 1000 * seed + i) for i, x in enumerate(leaves)]
  return jax.tree.unflatten(treedef, made)


def workers_of(gradients: Gradients) -> int:
  return jax.tree.leaves(gradients[0])[0].shape[0]


def zipped(first: Any, *trees: Any) -> list[tuple[Any, ...]]:
  """Returns the path of each leaf, and the leaves of all trees there."""
  paths = jax.tree_util.tree_leaves_with_path(first)
  others = map(jax.tree.leaves, trees)
  names = [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
  return [(*pair, *rest) for pair, *rest in zip(names, *others, strict=True)]
