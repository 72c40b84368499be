"""Moves arrays from N to M workers, in NumPy: each worker's own, and owned rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.protocol import Codec, elements
from gradcomp._src.codecs.sums.records import Memory
from gradcomp._src.core.residual_storage import Int8Residual, read_residual, to_int8
from gradcomp._src.exchange.plan import MessagePlan, owned_matrices
from gradcomp._src.mesh.axes import Axes


def floats_of(stored: Int8Residual, workers: int) -> np.ndarray:
  """Returns the residuals of N workers as floats, stacked on the first axis."""
  parts = zip(*(np.split(np.asarray(x), workers) for x in stored), strict=True)
  return np.concatenate([jax.jit(read_residual)(Int8Residual(*part)) for part in parts])


def stored_of(x: np.ndarray, workers: int, blocks: int | None = None) -> Int8Residual:
  """Rounds M workers' residuals to ``int8``, in blocks of a worker's last axis."""
  half = lambda part: np.full(part.shape, 1 << 15, np.uint16)
  rounded = jax.jit(to_int8, static_argnums=2)  # else each operation is a program
  own = [rounded(y, half(y), blocks) for y in np.split(x, workers)]
  return jax.tree.map(lambda *parts: np.concatenate(parts), *own)


def regroup_memory(
  kept: Memory, was: Memory, like: Memory, first: Memory, workers: tuple[int, int]
) -> Memory:
  """Regroups codec states of N workers for M, by axes and leaf, as ``init`` would."""
  # Shared state stays. A worker that stays keeps its own, and others get the first one;
  # all do if shapes differ. `kept` may lack each worker's own part.
  old, new = workers
  own: dict[Axes, dict[int, Any]] = {}
  stacked = lambda one, like: np.resize(np.asarray(one), like.shape)  # copies

  def followed(begins: np.ndarray, x: np.ndarray) -> np.ndarray:
    count, rest = divmod(len(x), old)
    if rest or (count * new, *x.shape[1:]) != begins.shape:
      return begins
    stay = count * min(old, new)
    return np.concatenate([x[:stay], begins[stay:]])

  for axes, trees in like.own.items():
    for i, shapes in trees.items():
      begins = jax.tree.map(stacked, first.own[axes][i], shapes)
      if i in kept.own.get(axes, {}):
        begins = jax.tree.map(followed, begins, kept.own[axes][i])
      elif i in was.own.get(axes, {}):
        continue
      own.setdefault(axes, {})[i] = begins  # also where another exchange kept none
  shared = {
    axes: trees | {i: x for i, x in kept.shared.get(axes, {}).items() if i in trees}
    for axes, trees in first.shared.items()
  }
  return Memory(shared, own)


def recut_owned(
  owned: Mapping[Axes, Sequence[np.ndarray]],
  plans: tuple[MessagePlan, MessagePlan],
  places: Callable[[Axes], int],
  factor: float,
) -> tuple[dict[Axes, tuple[np.ndarray, ...]], dict[int, np.ndarray]]:
  """Moves owner residuals to M workers; returns them, and by leaf the ownerless."""
  old, new = plans
  # The rows of a leaf, [places, rows, *tile_shape], its codec and its shape. Worker i
  # has those from i * share on, and zeros fill the last shares of a matrix. Along other
  # mesh axes, each place has its own rows.
  waiting: dict[int, tuple[np.ndarray, Codec, jax.ShapeDtypeStruct]] = {}
  for axes, matrices in owned_matrices(old).items():
    for matrix, array in zip(matrices, owned[axes], strict=True):
      count, (_, *tile) = places(axes), array.shape
      rows = swap_outer(array, old.workers, count).reshape(count, -1, *tile)
      for leaf, slot, like in matrix.leaves():
        waiting[leaf] = rows[:, slot.start : slot.stop], matrix.codec, like
  result: dict[Axes, tuple[np.ndarray, ...]] = {}
  for axes, matrices in owned_matrices(new).items():
    for matrix in matrices:
      count, (share, *tile) = places(axes), matrix.shape
      rows = np.zeros((count, new.workers * share, *tile), np.float32)
      for leaf, slot, _ in matrix.leaves():
        if leaf in waiting:
          moved, codec, like = waiting.pop(leaf)
          # A sparse codec has a range for each worker.
          if tuple(tile) != moved.shape[2:]:
            tiles = [matrix.codec.split(_leaf(x, codec, like)) for x in moved]
            moved = np.stack([x.reshape(-1, *tile) for x in tiles])
          rows[:, slot.start : slot.stop] = moved * np.float32(factor)
      stacked = swap_outer(rows.reshape(-1, *tile), count, new.workers)
      result[axes] = *result.get(axes, ()), stacked
  if any(len(rows) > 1 for rows, *_ in waiting.values()):
    raise ValueError(
      "`optimizer` must have an exchange with owner residuals for the new number of "
      "workers, too, where parameters are sharded over other axes; give its exchange= "
      "by name."
    )
  return result, {i: _leaf(x[0], codec, y) for i, (x, codec, y) in waiting.items()}


def _leaf(rows: np.ndarray, codec: Codec, like: jax.ShapeDtypeStruct) -> np.ndarray:
  tiles = np.asarray(elements(jnp.asarray(rows), codec))
  return codec.join(tiles, like)


def swap_outer(array: np.ndarray, a: int, b: int) -> np.ndarray:
  """Turns ``[a * b * n, ...]`` into ``[b * a * n, ...]``, of shares of n rows."""
  shares = array.reshape(a, b, len(array) // (a * b), *array.shape[1:])
  return shares.swapaxes(0, 1).reshape(array.shape)
