"""Leaves and gradients that the laws try."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from gradcomp._src.codecs.protocol import Codec, LeafCodec
from gradcomp._src.codecs.sums.records import Context, Leaf
from gradcomp._src.floats.dtypes import has_smaller_range

# Words of the golden ratio and of a hash, because no bit of them is special.
KEY = np.array([0x9E3779B9, 0x7F4A7C15], np.uint32)

SIZES = (0, 1, 2, 3, 31, 33, 127, 200)

Transformation = optax.GradientTransformation
Gradients = Sequence[Any]  # trees with leaves [N, ...], one tree a step


def gaussian(shape: int | tuple[int, ...], seed: int = 0) -> np.ndarray:
  """Returns Gaussian numbers, ``float32``, equal for equal seeds."""
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tile_of(codec: LeafCodec) -> int | None:
  """Returns the elements of a row; None if they depend on the leaf."""
  found = {codec.bind(Leaf(shape)).tile_size for shape in ((6, 13), (45, 46))}
  return found.pop() if len(found) == 1 else None


def ragged(codec: LeafCodec) -> tuple[int, ...]:
  """Returns a shape of two rows and a part of a third; or of a matrix, without rows."""
  tile = tile_of(codec)
  return (45, 46) if tile is None else (2 * tile + 77,)


def leaf_of(codec: LeafCodec, x: ArrayLike | None) -> np.ndarray:
  """Returns the given leaf, or a Gaussian one of the shape of :func:`ragged`."""
  return gaussian(ragged(codec)) if x is None else np.asarray(x)


def first_context(bound: Codec, leaf: Leaf, key: ArrayLike = KEY) -> Context:
  """Returns the context of a bound codec in the first step of a worker."""
  memory = bound.init(leaf, jnp.zeros(2, jnp.uint32))
  return Context(jnp.asarray(key), memory=memory, step=jnp.zeros([], jnp.int32))


def near_the_top(shape: tuple[int, ...], dtype: DTypeLike, seed: int = 0) -> np.ndarray:
  """Returns gradients ``[N, ...]`` of equal signs; sums of three overflow the dtype."""
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
    return jnp.asarray(numbers.astype(x.dtype))

  made = [make(x, 1000 * seed + i) for i, x in enumerate(leaves)]
  return jax.tree.unflatten(treedef, made)


def workers_of(gradients: Gradients) -> int:
  return jax.tree.leaves(gradients[0])[0].shape[0]


def params_of(gradients: Gradients) -> Any:
  """Returns parameters: the first worker's first gradients, in NumPy's arrays."""
  return jax.tree.map(lambda leaf: np.asarray(leaf)[0, ...], gradients[0])


def zipped(first: Any, *trees: Any) -> list[tuple[Any, ...]]:
  """Returns the path of each leaf, and the leaves of all trees there."""
  paths = jax.tree_util.tree_leaves_with_path(first)
  others = map(jax.tree.leaves, trees)
  names = [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
  return [(*pair, *rest) for pair, *rest in zip(names, *others, strict=True)]
