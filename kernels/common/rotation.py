"""Rotation of tiles, which spreads each element over a group of 8 or 32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

PLANES = 8  # of a group; a group of 32 lies in four columns of each


def rotate(tiles: Array, size: int) -> Array:
  """Replaces the n elements x of each group by ``H s x / n``, with fixed signs s."""
  # H is the Hadamard matrix: -1 where k and i have an odd number of common bits, and
  # else 1. Tiles are float32[rows, P, B], with P a multiple of 8, and B one of 4 for
  # groups of 32; `size` is n, 8 or 32. Signs are set by bits, so that no product can be
  # contracted with a sum.
  return _butterfly(_signed(tiles * np.float32(1 / size)), size)


def unrotate(tiles: Array, size: int) -> Array:
  """Undoes :func:`rotate`, of sums of tiles, too, but for the rounding of sums."""
  return _signed(_butterfly(tiles, size))


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
  # decodes an element once. In front of a concatenation it leaves them alone.
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
