"""Resharding of owned rows from N to M workers, in NumPy.

Owners have the rows of a matrix in one order: worker i has those from ``i * share`` on,
and zeros fill the last shares. Along other mesh axes, each place has its own rows.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.codecs.protocol import Codec
from gradcomp._src.codecs.tiles import elements, tile_shape
from gradcomp._src.exchange.owners import owned_matrices
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.mesh.axes import Axes

# The number of a leaf, and of the round that sends its rows.
_Place = tuple[int, int]


class _Rows(NamedTuple):
  """The rows of a leaf: ``[places, rows, *tile_shape]``."""

  rows: np.ndarray
  codec: Codec
  like: jax.ShapeDtypeStruct


def recut_owned(
  owned: Mapping[Axes, Sequence[np.ndarray]],
  plans: tuple[MessagePlan, MessagePlan],
  places: Mapping[Axes, int],
  factor: float,
) -> tuple[dict[Axes, tuple[np.ndarray, ...]], dict[int, np.ndarray]]:
  """Moves owner residuals of N workers to M, and multiplies them by ``factor``.

  A leaf may have other rows for M workers: a sparse codec has a range for each worker.
  ``places`` has, by axes, the number of a worker's shares along other axes. Returns the
  arrays by axes, and by leaf the residuals that no worker owns any more.
  """
  old, new = plans
  waiting: dict[_Place, _Rows] = {}
  for axes, matrices in owned_matrices(old).items():
    for matrix, array in zip(matrices, owned[axes], strict=True):
      rows = concat_rows(array, old.workers, places[axes])
      for leaf, slot, like in matrix.leaves():
        found = _Rows(rows[:, slot.start : slot.stop], matrix.codec, like)
        waiting[leaf, matrix.message.round] = found
  result: dict[Axes, tuple[np.ndarray, ...]] = {}
  for axes, matrices in owned_matrices(new).items():
    arrays = []
    for matrix in matrices:
      share, *tile = matrix.shape
      rows = np.zeros((places[axes], new.workers * share, *tile), np.float32)
      for leaf, slot, _ in matrix.leaves():
        place = leaf, matrix.message.round
        if place in waiting:
          moved = _as_rows_of(waiting.pop(place), matrix.codec)
          rows[:, slot.start : slot.stop] = moved * np.float32(factor)
      arrays.append(stack_rows(rows, new.workers))
    result[axes] = tuple(arrays)
  return result, {i: _leaf(found) for (i, _), found in waiting.items()}


def recut_rows(
  array: np.ndarray, old: int, new: int, places: int, size: int
) -> np.ndarray:
  """Reshards rows to M owners: ``[size, ...]``.

  ``array`` are the shares of all N owners, ``[N * places * share, ...]``, with
  ``places`` shares of a worker along other axes. Padding is dropped, or added as zeros.
  """
  rows = concat_rows(array, old, places)
  result = np.zeros((places, size // places, *rows.shape[2:]), array.dtype)
  count = min(rows.shape[1], result.shape[1])
  result[:, :count] = rows[:, :count]
  return stack_rows(result, new)


def concat_rows(array: np.ndarray, workers: int, places: int) -> np.ndarray:
  """Joins shares to rows: ``[N * places * share, ...]`` to ``[places, rows, ...]``."""
  share = array.shape[0] // (workers * places)
  shares = array.reshape(workers, places, share, *array.shape[1:])
  return shares.swapaxes(0, 1).reshape(places, workers * share, *array.shape[1:])


def stack_rows(rows: np.ndarray, workers: int) -> np.ndarray:
  """Splits rows into shares: the inverse of :func:`concat_rows`."""
  places, count, *tile = rows.shape
  shares = rows.reshape(places, workers, count // workers, *tile)
  return shares.swapaxes(0, 1).reshape(places * count, *tile)


def _as_rows_of(found: _Rows, codec: Codec) -> np.ndarray:
  """Returns a leaf's rows in the tiles of another codec."""
  if tile_shape(codec) == found.rows.shape[2:]:
    return found.rows
  tiles = [codec.split(_whole(found, rows)) for rows in found.rows]
  return np.stack([x.reshape(-1, *tile_shape(codec)) for x in tiles])


def _leaf(found: _Rows) -> np.ndarray:
  """Returns a leaf from its rows; ValueError if each place has a part of it."""
  if len(found.rows) > 1:
    raise ValueError(
      "`optimizer` must have an exchange whose owners keep residuals, also for the new "
      "number of workers, where parameters are sharded over other axes; give its "
      "exchange= by name."
    )
  return _whole(found, found.rows[0])


def _whole(found: _Rows, rows: np.ndarray) -> np.ndarray:
  tiles = np.asarray(elements(jnp.asarray(rows), found.codec))
  return found.codec.join(tiles, found.like)
