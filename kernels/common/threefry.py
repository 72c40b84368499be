"""Counter-based random bits, as plain uint32 arithmetic that XLA fuses.

``jax.random`` materializes its bits before they are used, which costs 20 to 38 times a
memory copy for an array of the gradient's size on CPU. The same cipher written as array
arithmetic fuses into the expression that consumes the bits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA

# ``uint32[2]``, or its two words: kernels cannot index a value.
Key = Array | tuple[Array, Array]


# It is jitted so that it is traced once for all planes and kernels of a shape, and
# inlined so that it fuses as if it were not jitted.
@functools.partial(jax.jit, static_argnums=2, inline=True)
def threefry2x32(
  key: Key, counter: tuple[Array, Array], rounds: int = 20
) -> tuple[Array, Array]:
  """Computes Threefry-2x32: 64 random bits for each 64-bit counter.

  Args:
    key: ``uint32[2]``, as ``jax.random.key_data`` returns it.
    counter: two ``uint32`` arrays that broadcast against each other.
    rounds: how often the words are mixed; 20 in ``jax.random``, for the same bits.

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
  for number in range(rounds):
    rotation = _ROTATIONS[number // 4 % 2][number % 4]
    a = a + b
    b = ((b << rotation) | (b >> (32 - rotation))) ^ a
    if number % 4 == 3:
      group = number // 4 + 1
      a = a + keys[group % 3]
      b = b + keys[(group + 1) % 3] + jnp.uint32(group)
  return a, b


def key_words(key: Array) -> Array:
  """Returns the two words of one threefry2x32 key, typed or raw.

  Args:
    key: a key from ``jax.random.key`` or ``jax.random.PRNGKey``.

  Returns:
    The words, ``uint32[2]``.

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


def fold_key(key: Array, number: Array | int) -> Array:
  """Derives a key as ``jax.random.fold_in`` does for threefry2x32.

  Args:
    key: ``uint32[2]``.
    number: the number to fold in, ``uint32``.

  Returns:
    The new key, ``uint32[2]``.
  """
  typed = jax.random.wrap_key_data(key, impl="threefry2x32")
  return jax.random.key_data(jax.random.fold_in(typed, number))
