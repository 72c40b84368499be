"""Rotation of tiles, which spreads each element over a group of 8 or 32."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.tpu import rotation as tpu

PLANES = 8  # of a group; a group of 32 lies in four columns of each


def rotate(
  tiles: Array, planes: int, size: int, by: dispatch.Implementation | None = None
) -> Array:
  """Replaces the n elements x of each group by ``H s x / n``, with fixed signs s."""
  # H is the Hadamard matrix: -1 where k and i have an odd number of common bits, and
  # else 1. Tiles are float32[rows, P * B], with P a multiple of 8, and B one of 4 for
  # groups of 32, of any shape after the rows; `size` is n, 8 or 32. Signs are set by
  # bits, so that no product can be contracted with a sum.
  return _turned(tiles, by, planes=planes, size=size, forward=True)


def unrotate(
  tiles: Array, planes: int, size: int, by: dispatch.Implementation | None = None
) -> Array:
  """Undoes :func:`rotate`, of sums of tiles, too, but for the rounding of sums."""
  return _turned(tiles, by, planes=planes, size=size, forward=False)


def _turned(tiles: Array, by: dispatch.Implementation | None, **how: Any) -> Array:
  """Returns the transform, by a kernel for TPUs where tiles suit it."""
  rows, tile = len(tiles), math.prod(tiles.shape[1:])
  flat = tiles.reshape(rows, tile)
  line = tile // how["planes"] * PLANES // how["size"]
  if not tpu.fits(rows, tile, line):
    return transform(flat, **how).reshape(tiles.shape)
  return _with_kernel(flat, implementation=by, **how).reshape(tiles.shape)


def transform(tiles: Array, *, planes: int, size: int, forward: bool) -> Array:
  """Rotates tiles, or rotates them back."""
  x = tiles.reshape(len(tiles), planes, tiles.shape[1] // planes)
  if forward:
    x = _butterfly(_signed(x * np.float32(1 / size)), size)
  else:
    x = _signed(_butterfly(x, size))
  return x.reshape(tiles.shape)


def by_kernel(
  tiles: Array, *, planes: int, size: int, forward: bool, interpret: Any = False
) -> Array:
  """Returns :func:`transform` for TPUs."""
  columns = tiles.shape[1] // planes
  words = _sign_words(planes, columns)
  signs = (words >> np.arange(planes, dtype=np.uint32)[:, None]) << np.uint32(31)
  return tpu.transform(
    tiles,
    size=size,
    group_line=columns * PLANES // size,
    signs=signs.reshape(-1),
    forward=forward,
    interpret=interpret,
  )


_with_kernel = dispatch.on_tpu(by_kernel, mosaic=True)(transform)


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


def _signed(tiles: Array) -> Array:
  """Changes the sign of an element where the sequence of its tile has -1."""
  words = jnp.asarray(_sign_words(*tiles.shape[1:]))
  plane = jnp.arange(tiles.shape[1], dtype=jnp.uint32)[:, None]
  signs = (words >> plane) << 31
  bits = jax.lax.bitcast_convert_type(tiles, jnp.uint32) ^ signs
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


@functools.cache
def _sign_words(planes: int, columns: int) -> np.ndarray:
  """Returns the signs of a tile, plane k in bit k of each column: ``uint32[B]``."""
  number = np.arange(planes * columns, dtype=np.uint32).reshape(planes, columns)
  parity = number & (number >> 1)
  for shift in (16, 8, 4, 2, 1):
    parity ^= parity >> shift
  plane = np.arange(planes, dtype=np.uint32)[:, None]
  return np.bitwise_or.reduce((parity & 1) << plane, axis=0)
