"""Redistributes per-worker arrays from N to M workers, preserving their sum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.core.residual_storage import Int8Residual, read_residual, to_int8
from gradcomp._src.mesh.axes import Axes


def regroup_sum(x: np.ndarray, old: int, new: int, factor: float = 1.0) -> np.ndarray:
  """Regroups N workers' addends for M workers, ``[M * n, ...]``, and scales their sum.

  New workers get zeros. Worker i that leaves adds its array to that of worker
  ``i % M``. Where it is zero, the bits of the other stay.

  Example:
    >>> regroup_sum(np.float32([1, 2, 3]), 3, 4)
    array([1., 2., 3., 0.], dtype=float32)
    >>> regroup_sum(np.float32([1, 2, 3]), 3, 2)
    array([4., 2.], dtype=float32)
  """
  parts = x.reshape(old, x.shape[0] // old, *x.shape[1:])
  result = np.zeros((new, *parts.shape[1:]), x.dtype)
  for i in range(min(old, new)):
    total = parts[i]
    for left in parts[i + new :: new]:
      total = np.where(left == 0, total, total + left)
    result[i] = total * x.dtype.type(factor)
  return result.reshape(new * parts.shape[1], *x.shape[1:])


def floats_of(stored: Int8Residual, workers: int) -> np.ndarray:
  """Returns the residuals of N workers as floats, stacked on the first axis."""
  parts = zip(*(np.split(np.asarray(x), workers) for x in stored), strict=True)
  return np.concatenate(
    [np.asarray(read_residual(Int8Residual(*part))) for part in parts]
  )


def stored_of(x: np.ndarray, workers: int, blocks: int | None = None) -> Int8Residual:
  """Rounds M workers' residuals to ``int8``, to nearest: undoes :func:`floats_of`.

  ``blocks`` is the number on the last axis of a worker's, by default as in ``init``.

  Example:
    >>> found = stored_of(np.float32([0.5, 1, -2, 3]), 2)
    >>> floats_of(found, 2)
    array([ 0.5,  1. , -2. ,  3. ], dtype=float32)
  """
  half = lambda part: jnp.full(part.shape, 1 << 15, jnp.uint16)
  own = [to_int8(jnp.asarray(y), half(y), blocks) for y in np.split(x, workers)]
  whole: Any = map(np.concatenate, zip(*own, strict=True))
  return Int8Residual(*whole)


def regroup_memory(
  kept: Memory, was: Memory, like: Memory, first: Memory, workers: tuple[int, int]
) -> Memory:
  """Regroups codec states for M workers, by axes and leaf.

  Shared state stays. A worker that stays keeps its own state, and others get the first
  one. All do if shapes differ. ``kept`` may lack each worker's own part. ``was`` and
  ``like`` are the shapes of ``init`` for N and for M ``workers``, and ``first`` is the
  first state of one worker.
  """
  old, new = workers
  own: dict[Axes, dict[int, Any]] = {}

  def stacked(one: jax.Array, like: jax.ShapeDtypeStruct) -> np.ndarray:
    times = like.shape[0] // one.shape[0] if one.shape[0] else 1
    return np.concatenate([np.asarray(one)] * times)

  def followed(begins: np.ndarray, x: np.ndarray) -> np.ndarray:
    count, rest = divmod(len(x), old)
    if rest or (count * new, *x.shape[1:]) != begins.shape:
      return begins
    stay = count * min(old, new)
    return np.concatenate([x[:stay], begins[stay:]])

  for axes, trees in like.own.items():
    own[axes] = {}
    for i, shapes in trees.items():
      begins = jax.tree.map(stacked, first.own[axes][i], shapes)
      if i in kept.own.get(axes, {}):
        own[axes][i] = jax.tree.map(followed, begins, kept.own[axes][i])
      elif i not in was.own.get(axes, {}):
        own[axes][i] = begins  # another exchange kept none
  shared = {
    axes: {i: kept.shared.get(axes, {}).get(i, tree) for i, tree in trees.items()}
    for axes, trees in first.shared.items()
  }
  return Memory(shared, {axes: trees for axes, trees in own.items() if trees})
