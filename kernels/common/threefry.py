"""Counter-based random bits, as plain uint32 arithmetic that XLA fuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA

# ``uint32[2]``, or its two words: kernels cannot index a value.
Key = Array | tuple[Array, Array]


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
