"""Dithers: random numbers that stochastic rounding adds to the fraction it drops."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common.threefry import threefry2x32

# ``uint32[3]``, a key and a mask, or its three words: kernels cannot index a value.
Dither = Array | tuple[Array, Array, Array]

# The signature of jax.lax.broadcasted_iota.
Iota = Callable[[Any, tuple[int, ...], int], Array]

# The authors of the cipher know of no statistical flaw with 13 rounds or more. With 20,
# its default, drawing takes half as long again.
_ROUNDS = 13

LANES = 8  # of 16 bits, from one block of the cipher


def dither(key: Array, worker: Array | int = 0) -> Array:
  """Returns a worker's dither: the shared key, and its mask, twice in one word."""
  return jnp.append(key, mask(worker) * np.uint32(0x10001))


def mask(worker: Array | int) -> Array | np.uint32:
  """Returns the mask of a worker: ``bitreverse16(i >> 1) ^ (0xFFFF if i is odd)``."""
  # Pairs round with complements, so that their errors cancel, and are spread evenly.
  number = np.uint32(worker) if isinstance(worker, int) else worker.astype(jnp.uint32)
  pair = number >> np.uint32(1)
  pairs = (1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)
  for shift, half in np.array(pairs, np.uint32):
    pair = ((pair >> shift) & half) | ((pair & half) << shift)
  return pair ^ ((number & np.uint32(1)) * np.uint32(0xFFFF))


def random_lanes(
  dither: Dither, shape: tuple[int, int], lanes: int, *, first_row: Array | int = 0
) -> list[Array]:
  """Draws uniform 16-bit integers, independent for any two elements.

  Eight lanes share one block of the cipher with 13 rounds; three of the eight may
  depend on each other. The words of lane ``k`` at ``(row, column)`` have the counter
  ``(first_row + row, column + columns * (k // 8))``. Lane ``k`` is quarter ``k % 8`` of
  the words ``a``, ``b``, ``c = a ^ b`` and ``d = a ^ (b rotated by 16)``, low half
  first. The mask is XORed with each.

  Args:
    dither: ``uint32[3]``, as ``context.drawn`` of a codec.
    shape: the rows and columns of a lane.
    lanes: the number of lanes.
    first_row: the number of the first row, for a caller with part of the rows.

  Returns:
    The lanes, each ``uint32`` in ``shape`` from 0 to 65535.

  Example:
    >>> [hex(x[0, 0]) for x in random_lanes(jnp.zeros(3, jnp.uint32), (1, 1), 3)]
    ['0x5ec6', '0x9d1c', '0x731']
  """
  return list(itertools.islice(lane_stream(dither, shape, first_row=first_row), lanes))


def lane_stream(
  dither: Dither,
  shape: tuple[int, ...],
  *,
  first_row: Array | int,
  first: Array | int = 0,
  iota: Iota = jax.lax.broadcasted_iota,
) -> Iterator[Array]:
  """Yields the arrays of :func:`random_lanes` from lane ``first``, a multiple of 8."""
  rows = iota(jnp.uint32, shape, 0) + jnp.uint32(first_row)
  columns = iota(jnp.uint32, shape, 1)
  *key, mask = (dither[i] for i in range(3))
  half = np.uint32(16)
  for block in itertools.count():
    counter = (rows, columns + jnp.uint32((first // LANES + block) * shape[1]))
    a, b = threefry2x32((key[0], key[1]), counter, _ROUNDS)
    turned = lax.shift_left(b, half) | lax.shift_right_logical(b, half)
    masked = lax.bitwise_xor(a, mask)  # and so are the sums with it
    for word in (masked, lax.bitwise_xor(b, mask), masked ^ b, masked ^ turned):
      yield lax.bitwise_and(word, np.uint32(0xFFFF))
      yield lax.shift_right_logical(word, half)


def read(reference: Any) -> Dither | None:
  """Returns the words of a kernel's reference to a dither; None for no reference."""
  return None if reference is None else (reference[0], reference[1], reference[2])


def signed_lane(lane: Array, x: Array) -> Array:
  """Returns the lane that rounds ``|x|`` to the magnitude of ``x`` rounded by ``lane``.

  Args:
    lane: 16-bit integers, from :func:`random_lanes`.
    x: the numbers to round, in the shape of the lane.

  Returns:
    The complement of ``lane`` where ``x`` is negative, else ``lane``. So small integers
    round down whatever the sign is, and errors of several workers cancel.
  """
  return lane ^ (negative_mask(x) & jnp.uint32(0xFFFF))


def negative_mask(x: Array) -> Array:
  """Returns ``uint32`` with all bits set where the sign bit of ``x`` is, or none."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  sign = lax.shift_right_arithmetic(bits, np.int32(31))
  return lax.bitcast_convert_type(sign, jnp.uint32)
