"""Lines of a message: rows of words, joined for the wire, and split again."""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gradcomp._src.exchange.collectives import note_parts

Shape = tuple[int, ...]

# A TPU keeps an array in tiles of 8 by 128 words. A tile of flat lines, uint32[L, M],
# has words of eight lines, so that XLA would move every word before it sends a line,
# and again before it decodes one. Lanes, uint32[L, K, 128], are whole tiles of a line.
LANES = 128
# Zeros fill the last lane: less than 1 % of so many words. Shorter lines stay flat.
_LEAST = 100 * LANES
# XLA for TPUs cuts rows at lanes without moving words, but each cut is an instruction.
_MOST_CUTS = 32


def join(parts: Sequence[jax.Array]) -> jax.Array:
  """Joins arrays ``[L, *shape]`` to L lines: ``[L, M]``, or long ones ``[L, K, 128]``.

  A long line has, of each array, the first 128 words of all rows, then the next 128,
  and so on; behind all arrays what remains of their rows; and then zeros.
  """
  note_parts(parts)
  rows = [x.reshape(len(x), *_matrix(x.shape[1:])) for x in parts]
  if _short([x.shape[1:] for x in parts]):
    return jnp.concatenate(list(map(_raveled, rows)), axis=1)
  ends = [x.shape[2] - x.shape[2] % LANES for x in rows]
  pairs = list(zip(rows, ends, strict=True))
  rest = jnp.concatenate([_raveled(x[:, :, end:]) for x, end in pairs], axis=1)
  rest = jnp.pad(rest, [(0, 0), (0, -rest.shape[1] % LANES)])
  lanes = [y for x, end in pairs for y in _to_lanes(x[:, :, :end])]
  return jnp.concatenate([*lanes, rest.reshape(len(rest), -1, LANES)], axis=1)


def split(lines: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
  """Splits L lines to arrays ``[L, *shape]``: undoes :func:`join`."""
  forms = list(map(_matrix, shapes))
  if _short(shapes):
    rows = _cut(lines, [count * width for count, width in forms])
  else:
    lanes = [count * (width // LANES) for count, width in forms]
    rest = _raveled(lines[:, sum(lanes) :])
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


def _raveled(x: jax.Array) -> jax.Array:
  return x.reshape(len(x), math.prod(x.shape[1:]))


def _cut(lines: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
  """Cuts the places of lines, ``[L, M, ...]``, into parts of some sizes."""
  ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
  return [lines[:, start:stop] for start, stop in ends]


def _to_lanes(x: jax.Array) -> list[jax.Array]:
  """Returns arrays of lanes that make up rows, ``[L, rows, k * 128]``, in order."""
  count, rows, width = x.shape
  if width <= _MOST_CUTS * LANES:
    return [x[:, :, start : start + LANES] for start in range(0, width, LANES)]
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
