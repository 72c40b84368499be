"""Rotation of tiles, which spreads each element over a group of 8 or 32."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.tpu import lines
from gradcomp._src.kernels.tpu.lines import LANES

PLANES = 8  # of a group; a group of 32 lies in four columns of each


def rotate(
  tiles: Array,
  planes: int,
  size: int,
  by: dispatch.Implementation | None = None,
  *,
  forward: bool = True,
) -> Array:
  """Replaces the n elements x of each group by ``H s x / n``, with fixed signs s."""
  # H is the Hadamard matrix: -1 where k and i have an odd number of common bits, and
  # else 1. Tiles are float32[rows, P * B], with P a multiple of 8, and B one of 4 for
  # groups of 32, of any shape after the rows; `size` is n, 8 or 32. Signs are set by
  # bits, so that no product can be contracted with a sum.
  rows, tile = len(tiles), math.prod(tiles.shape[1:])
  function: Any = transform
  line = tile // planes * PLANES // size
  if rows >= lines.ROWS and tile <= lines.LARGEST_UNROLLED and not line % LANES:
    function = functools.partial(_with_kernel, implementation=by)
  flat = tiles.reshape(rows, tile)
  return function(flat, planes=planes, size=size, forward=forward).reshape(tiles.shape)


# Undoes it, of sums of tiles, too, but for the rounding of sums.
unrotate = functools.partial(rotate, forward=False)


def transform(tiles: Array, *, planes: int, size: int, forward: bool) -> Array:
  """Rotates tiles, or rotates them back."""
  columns = tiles.shape[1] // planes
  x = tiles.reshape(len(tiles), planes, columns)
  plane = jnp.arange(planes, dtype=jnp.uint32)[:, None]
  signs = (jnp.asarray(_sign_words(planes, columns)) >> plane) << 31
  if forward:
    x = _butterfly(_signed(x * np.float32(1 / size), signs), size)
  else:
    x = _signed(_butterfly(x, size), signs)
  return x.reshape(tiles.shape)


def by_kernel(
  tiles: Array, *, planes: int, size: int, forward: bool, interpret: Any = False
) -> Array:
  """Returns :func:`transform` for TPUs, in one pass over the tiles."""
  # XLA writes the array anew for each of the sums of two. Here a group lies in
  # registers: element i of `line` groups is a line of a tile, and lines `size * k` to
  # `size * k + size` are groups.
  (rows, tile), columns = tiles.shape, tiles.shape[1] // planes
  words, plane = _sign_words(planes, columns), np.arange(planes, dtype=np.uint32)
  signs = ((words >> plane[:, None]) << np.uint32(31)).reshape(1, -1).view(np.int32)
  block, line = lines.rows_of_block(rows, tile), columns * PLANES // size
  groups = range(0, tile, size * line)

  def kernel(x_ref: Any, sign_ref: Any, out_ref: Any) -> None:
    def of_rows(row: Any) -> None:
      for first in [group + at for group in groups for at in range(0, line, LANES)]:
        starts = range(first, first + size * line, line)  # of 128 groups
        lanes = [slice(start, start + LANES) for start in starts]
        parts = [x_ref[row, lane] for lane in lanes]
        signs = [sign_ref[:, lane] for lane in lanes]
        if forward:
          parts = [part * np.float32(1 / size) for part in parts]
          parts = _sums_of_parts(list(map(_signed, parts, signs)))
        else:
          parts = list(map(_signed, _sums_of_parts(parts), signs))
        for lane, part in zip(lanes, parts, strict=True):
          out_ref[row, lane] = part

    lines.by_registers(block, of_rows)

  inputs = [(tiles, block), (jnp.asarray(signs), 0)]
  out = [(tiles.shape, block, np.float32)]
  name = "rotate" if forward else "unrotate"
  (found,) = lines.run(kernel, inputs, out, name, interpret)
  return found


_with_kernel = dispatch.with_kernel(transform, by_kernel)


def _butterfly(tiles: Array, size: int) -> Array:
  """Multiplies each group by the Hadamard matrix, in a sum of two for each bit."""
  rows, planes, columns = tiles.shape
  pairs = size.bit_length() - 1
  x = tiles.reshape(rows, planes // PLANES, *[2] * pairs, columns * PLANES // size)
  last = 1 + pairs
  for axis in range(2, last):
    first, second = jnp.split(x, 2, axis)
    shape = [2 if i == axis else 1 for i in range(x.ndim)]
    x = first + second * np.array([1, -1], np.float32).reshape(shape)
  # XLA:CPU fuses a reshape to flat into sums, and then neither vectorizes them nor
  # decodes an element once. Before a concatenation it leaves them alone.
  first, second = jnp.split(x, 2, last)
  return jnp.concatenate([first + second, first - second], last).reshape(tiles.shape)


def _sums_of_parts(parts: list[Array]) -> list[Array]:
  """Returns :func:`_butterfly` of a group of arrays."""
  numbers = range(len(parts))
  for k in reversed(range(len(parts).bit_length() - 1)):
    pair = [parts[i ^ 1 << k] for i in numbers]
    parts = [pair[i] - parts[i] if i >> k & 1 else parts[i] + pair[i] for i in numbers]
  return parts


def _signed(x: Array, sign: Array) -> Array:
  """Changes the sign of an element where the highest bit is set."""
  bits = lax.bitcast_convert_type(x, sign.dtype) ^ sign
  return lax.bitcast_convert_type(bits, np.float32)


@functools.cache
def _sign_words(planes: int, columns: int) -> np.ndarray:
  """Returns the signs of a tile, plane k in bit k of each column: ``uint32[B]``."""
  number = np.arange(planes * columns, dtype=np.uint32).reshape(planes, columns)
  parity = number & (number >> 1)
  for shift in (16, 8, 4, 2, 1):
    parity ^= parity >> shift
  plane = np.arange(planes, dtype=np.uint32)[:, None]
  return np.bitwise_or.reduce((parity & 1) << plane, axis=0)
