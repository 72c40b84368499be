"""Rows of words: in lines for the wire, and in shares, one for each owner."""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.exchange.collectives import Workers, note_parts

Shape = tuple[int, ...]

# A TPU keeps an array in tiles of 8 by 128 words. A tile of flat lines, uint32[L, M],
# has words of eight lines, so that XLA would move every word before it sends a line,
# and again before it decodes one. Lanes, uint32[L, K, 128], are whole tiles of a line.
LANES = 128
# Zeros fill the last lane: less than 1 % from here on. Shorter lines stay flat.
_LEAST = 100 * LANES
# XLA for TPUs cuts rows at lanes without moving words, but each cut is an instruction.
_MOST_CUTS = 32


def join(parts: Sequence[jax.Array]) -> jax.Array:
  """Joins arrays ``[L, *shape]`` to L lines: ``[L, M]``, or long ``[L, K, 128]``."""
  note_parts(parts)
  rows = [x.reshape(len(x), *_matrix(x.shape[1:])) for x in parts]
  if _short([x.shape[1:] for x in parts]):
    return jnp.concatenate([lax.collapse(x, 1) for x in rows], axis=1)
  ends = [x.shape[2] - x.shape[2] % LANES for x in rows]
  pairs = list(zip(rows, ends, strict=True))
  rest = jnp.concatenate([lax.collapse(x[:, :, end:], 1) for x, end in pairs], axis=1)
  rest = jnp.pad(rest, [(0, 0), (0, -rest.shape[1] % LANES)])
  # A long line has the first 128 words of all rows of each array, then the next 128,
  # and so on; then the rest of all rows; and then zeros.
  lanes = [y for x, end in pairs for y in _to_lanes(x[:, :, :end])]
  return jnp.concatenate([*lanes, rest.reshape(len(rest), -1, LANES)], axis=1)


def split(lines: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
  """Splits L lines to arrays ``[L, *shape]``: undoes :func:`join`."""
  forms = list(map(_matrix, shapes))
  if _short(shapes):
    rows = _cut(lines, [count * width for count, width in forms])
  else:
    lanes = [count * (width // LANES) for count, width in forms]
    rest = lax.collapse(lines[:, sum(lanes) :], 1)
    rests = _cut(rest, [count * (width % LANES) for count, width in forms])
    parts = zip(_cut(lines, lanes), rests, forms, strict=True)
    rows = [_from_lanes(*part) for part in parts]
  pairs = zip(rows, shapes, strict=True)
  return [x.reshape(len(lines), *shape) for x, shape in pairs]


def form(words: int) -> Shape:
  """Returns the shape of a line by the number of its words."""
  return (words,) if words < _LEAST else (-(-words // LANES), LANES)


def _short(shapes: Sequence[Shape]) -> bool:
  return len(form(sum(map(math.prod, shapes)))) == 1


def _matrix(shape: Shape) -> tuple[int, int]:
  """Returns the number of rows, and the number of words in each."""
  return math.prod(shape[:-1]), shape[-1] if shape else 1


def _cut(lines: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
  """Cuts the places of lines, ``[L, M, ...]``, into parts of some sizes."""
  ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
  return [lax.slice_in_dim(lines, *end, axis=1) for end in ends]


def _to_lanes(x: jax.Array) -> list[jax.Array]:
  """Returns arrays of lanes that make up rows, ``[L, rows, k * 128]``, in order."""
  count, rows, width = x.shape
  if width <= _MOST_CUTS * LANES:
    starts = range(0, width, LANES)
    return [lax.slice_in_dim(x, start, start + LANES, axis=2) for start in starts]
  lanes = x.reshape(count, rows, width // LANES, LANES).swapaxes(1, 2)
  return [lanes.reshape(count, rows * (width // LANES), LANES)]


def _from_lanes(lanes: jax.Array, rest: jax.Array, form: tuple[int, int]) -> jax.Array:
  """Returns rows, ``[L, rows, width]``, from their lanes and the rest of them."""
  count, (rows, width) = len(lanes), form
  whole = width // LANES
  if whole <= _MOST_CUTS:
    cut = _cut(lanes, [rows] * whole)
  else:
    parts = lanes.reshape(count, whole, rows, LANES).swapaxes(1, 2)
    cut = [parts.reshape(count, rows, whole * LANES)]
  return jnp.concatenate([*cut, rest.reshape(count, rows, width % LANES)], axis=2)


def shares(rows: jax.Array, workers: Workers) -> jax.Array:
  """Splits rows into N shares, ``[N, share, ...]``, with zeros after the last."""
  share = -(-rows.shape[0] // workers.size)
  padding = workers.size * share - rows.shape[0]
  if padding:
    rows = jnp.pad(rows, [(0, padding)] + [(0, 0)] * (rows.ndim - 1))
  return rows.reshape(workers.size, share, *rows.shape[1:])


def own_share(rows: jax.Array, workers: Workers) -> jax.Array:
  """Returns the rows that this worker owns: ``[rows, ...]`` to ``[share, ...]``."""
  number = lax.axis_index(workers.axis_name)
  return lax.dynamic_index_in_dim(shares(rows, workers), number, keepdims=False)


def own_rows(share: int, worker: jax.Array) -> jax.Array:
  """Returns the numbers of the rows in a worker's share, ``int32[share]``."""
  return worker * share + lax.iota(jnp.int32, share)


def place(lost: jax.Array, workers: Workers, size: int) -> jax.Array:
  """Places errors of this worker's shares, ``[groups, share, ...]``, among zeros."""
  own = lax.axis_index(workers.axis_name) % size
  mine = jnp.arange(size) == own
  placed = jnp.where(mine.reshape(-1, *[1] * (lost.ndim - 1)), lost[:, None], 0.0)
  return lax.collapse(placed, 0, 3)
