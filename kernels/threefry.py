"""Draws counter-based random bits, written as plain uint32 arithmetic.

``jax.random`` materialises its bits before they are used, which costs 20 to 38 times a
memory copy for an array of the gradient's size on CPU. The same cipher written as array
arithmetic fuses into the expression that consumes the bits.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA

# ``uint32[2]``, or its two words: kernels cannot index a value.
Key = jax.Array | tuple[jax.Array, jax.Array]

# The signature of jax.lax.broadcasted_iota.
Iota = Callable[[Any, tuple[int, ...], int], jax.Array]


# It is jitted so that it is traced once for all planes and kernels of a shape, and
# inlined so that it fuses as if it were not jitted.
@functools.partial(jax.jit, inline=True)
def threefry2x32(
  key: Key, counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """Computes Threefry-2x32 with 20 rounds: 64 random bits for each 64-bit counter.

  For the same key and counter, its bits are those of the function behind ``jax.random``
  with the ``threefry2x32`` implementation.

  Args:
    key: ``uint32[2]``, as ``jax.random.key_data`` returns it.
    counter: two ``uint32`` arrays that broadcast against each other.

  Returns:
    Two ``uint32`` arrays of the broadcast shape.

  Example:
    >>> key = jnp.array([0x13198A2E, 0x03707344], jnp.uint32)
    >>> a, b = threefry2x32(key, (jnp.uint32(0x243F6A88), jnp.uint32(0x85A308D3)))
    >>> hex(a), hex(b)
    ('0xc4923a9c', '0x483df7a0')

  References:
    Salmon et al., `Parallel random numbers: as easy as 1, 2, 3
    <https://doi.org/10.1145/2063384.2063405>`_, 2011
  """
  keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
  a = counter[0] + keys[0]
  b = counter[1] + keys[1]
  for group in range(5):
    for rotation in _ROTATIONS[group % 2]:
      a = a + b
      b = ((b << rotation) | (b >> (32 - rotation))) ^ a
    a = a + keys[(group + 1) % 3]
    b = b + keys[(group + 2) % 3] + jnp.uint32(group + 1)
  return a, b


def random_lanes(
  key: Key,
  shape: tuple[int, int],
  lanes: int,
  *,
  first_row: jax.Array | int = 0,
) -> list[jax.Array]:
  """Draws independent uniform 16-bit integers: ``lanes`` arrays of ``shape``, uint32.

  Four lanes share one block of the cipher: lane ``k`` at ``(row, column)`` is the
  16-bit quarter ``k % 4`` (low half of the first word, its high half, then the second
  word's) of the block with the counter
  ``(first_row + row, column + columns * (k // 4))``. No two elements share a bit.

  Args:
    key: ``uint32[2]``.
    shape: ``(rows, columns)``.
    lanes: how many arrays, one for each plane of a tile.
    first_row: added to the row number, for a caller that works on part of the rows.

  Returns:
    A list of ``uint32[rows, columns]`` with values in ``[0, 2**16)``.

  Example:
    >>> lanes = random_lanes(jnp.zeros(2, jnp.uint32), (1, 1), 3)
    >>> [hex(lane[0, 0]) for lane in lanes]
    ['0x159', '0x6b20', '0x4efe']
  """
  return list(itertools.islice(lane_stream(key, shape, first_row=first_row), lanes))


def lane_stream(
  key: Key,
  shape: tuple[int, int],
  *,
  first_row: jax.Array | int,
  iota: Iota = jax.lax.broadcasted_iota,
) -> Iterator[jax.Array]:
  """Yields the arrays of :func:`random_lanes`, each computed when it is asked for.

  Kernels use it whose registers would not hold all arrays. ``iota`` is for kernels that
  lay out their arrays themselves.
  """
  rows = iota(jnp.uint32, shape, 0) + jnp.uint32(first_row)
  columns = iota(jnp.uint32, shape, 1)
  for block in itertools.count():
    counter = (rows, columns + jnp.uint32(block * shape[1]))
    for word in threefry2x32(key, counter):
      yield word & jnp.uint32(0xFFFF)
      yield word >> 16


def key_words(key: jax.Array) -> jax.Array:
  """Returns the two words of one threefry2x32 key, typed or raw: ``uint32[2]``.

  Raises:
    ValueError: a key of another kind, or more than one.

  Example:
    >>> key_words(jax.random.key(7, impl="threefry2x32"))
    Array([0, 7], dtype=uint32)
  """
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


def fold_key(key: jax.Array, number: jax.Array | int) -> jax.Array:
  """Derives a key as ``jax.random.fold_in`` does, for a raw threefry2x32 key.

  Args:
    key: ``uint32[2]``.
    number: what the new key derives from.

  Returns:
    ``uint32[2]``.

  Example:
    >>> key = jax.random.key(7, impl="threefry2x32")
    >>> folded = fold_key(key_words(key), 3)
    >>> bool((folded == key_words(jax.random.fold_in(key, 3))).all())
    True
  """
  typed = jax.random.wrap_key_data(key, impl="threefry2x32")
  return jax.random.key_data(jax.random.fold_in(typed, number))
