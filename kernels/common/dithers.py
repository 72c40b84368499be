"""Random bits by a cipher that XLA fuses, and dithers, which rounding adds."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA

# ``uint32[2]``, or its two words: kernels cannot index a value.
Key = Array | tuple[Array, Array]

# ``uint32[3]``, a key and a mask, or its three words.
Dither = Array | tuple[Array, Array, Array]

# The signature of jax.lax.broadcasted_iota.
Iota = Callable[[Any, tuple[int, ...], int], Array]

# The authors of the cipher know of no statistical flaw with 13 rounds or more. With 20,
# its default, drawing takes half as long again.
_ROUNDS = 13

LANES = 8  # of 16 bits, from one block of the cipher


# `jax.random` materializes its bits, which costs 20 to 38 times a memory copy on CPU.
# This is the same cipher; it fuses into the reader of the bits.
# It is jitted so that it is traced once for all planes and kernels of a shape, and
# inlined so that it fuses as if it were not jitted.
@functools.partial(jax.jit, static_argnums=2, inline=True)
def threefry2x32(
  key: Key, counter: tuple[Array, Array], rounds: int = 20
) -> tuple[Array, Array]:
  """Computes 64 random bits of Threefry-2x32 (Salmon et al., 2011) for each counter.

  Example:
    >>> key = jnp.array([0x13198A2E, 0x03707344], jnp.uint32)
    >>> a, b = threefry2x32(key, (jnp.uint32(0x243F6A88), jnp.uint32(0x85A308D3)))
    >>> hex(a), hex(b)
    ('0xc4923a9c', '0x483df7a0')
  """
  # Operators of arrays are jitted functions, and take twice as long to trace.
  keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(_PARITY))
  a, b = map(jnp.add, counter, keys[:2])
  add = jnp.add if jnp.ndim(keys[0]) else lax.add  # which broadcasts numbers alone
  for number in range(rounds):
    rotation = np.uint32(_ROTATIONS[number // 4 % 2][number % 4])
    left, right = lax.shift_left(b, rotation), lax.shift_right_logical(b, 32 - rotation)
    a = add(a, b)
    b = lax.bitwise_xor(lax.bitwise_or(left, right), a)
    if number % 4 == 3:
      group = number // 4 + 1
      a = add(a, keys[group % 3])
      b = add(add(b, keys[(group + 1) % 3]), np.uint32(group))
  return a, b


def key_words(key: Array) -> Array:
  """Returns the words of a threefry2x32 key, ``uint32[2]``; ValueError for others."""
  key = jnp.asarray(key)
  typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
  words = jax.random.key_data(key) if typed else key
  if words.shape != (2,) or words.dtype != jnp.uint32:
    raise ValueError(
      "`key` must be one threefry2x32 key (two 32-bit words), got "
      f"{words.dtype}{list(words.shape)}; make it with "
      'jax.random.key(seed, impl="threefry2x32").'
    )
  return words


def fold_key(key: Array, number: Array | int) -> Array:
  """Derives a key, ``uint32[2]``, as ``jax.random.fold_in`` does for threefry2x32."""
  typed = jax.random.wrap_key_data(key, impl="threefry2x32")
  return jax.random.key_data(jax.random.fold_in(typed, number))


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
