"""Packs positions into 16 bits, and adds many sparse rows to one dense array.

Positions are relative to blocks of 65,536 elements. Entries lie block by block, and a
row says where the entries of each block end.
"""

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.kernels.common import planes
from gradcomp._src.kernels.compaction import groups_of_slots

HALF = 16  # bits of a position in its block
BLOCK = 1 << HALF
COUNTED = 1 << 31  # elements: int32 counts the positions in fewer


def block_ends(positions: jax.Array, size: int, block: int = BLOCK) -> jax.Array:
  """Counts the entries that lie in each block or before it: ``uint32[blocks]``.

  Positions are ``int32[slots]``, block by block; ``size`` in slots that are not used.

  Example:
    >>> block_ends(jnp.array([7, 5, 70_000, 80_000]), 80_000)
    Array([2, 3], dtype=uint32)
  """
  blocks = -(-size // block)
  owner = jnp.where(positions < size, positions // block, blocks)
  numbers = lax.iota(jnp.int32, blocks)

  # This bisects all blocks at once. jnp.searchsorted fails in some maps (JAX 0.10.2).
  def halve(_: jax.Array, sides: tuple[jax.Array, jax.Array]) -> tuple:
    low, high = sides
    middle = low + (high - low) // 2
    right = (owner.at[middle].get(mode="clip") <= numbers) & (low < high)
    return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

  none = numbers * 0 + owner[:1] * 0
  steps = positions.size.bit_length()
  ends, _ = lax.fori_loop(0, steps, halve, (none, none + positions.size))
  return ends.astype(jnp.uint32)


def slot_blocks(ends: jax.Array, slots: int) -> jax.Array:
  """Returns the block of each used slot: ``int32[slots]``."""
  if ends.size == 1:
    return jnp.zeros(slots, jnp.int32)
  ends = ends.astype(jnp.int32)
  return groups_of_slots(jnp.diff(ends, prepend=ends[:1] * 0), slots)[0]


def pack_halves(values: jax.Array) -> jax.Array:
  """Packs ``uint32[slots]`` of 16 bits, two a word: ``uint32[ceil(slots / 2)]``.

  The second half of the values lies in the high bits, above the first half.

  Example:
    >>> pack_halves(jnp.array([1, 2, 3], jnp.uint32)).tolist() == [1 + (3 << 16), 2]
    True
  """
  half = half_words(values.size)
  above = jnp.pad(values[half:], (0, 2 * half - values.size))
  return planes.pack_planes([values[:half], above], HALF)


def unpack_halves(words: jax.Array, slots: int) -> jax.Array:
  """Unpacks the words of :func:`pack_halves`: ``uint32[slots]``."""
  return planes.unpack_planes(words, HALF).reshape(-1)[:slots]


def half_words(slots: int) -> int:
  """Returns the number of words that hold ``slots`` halves."""
  return -(-slots // 2)


def add_entries(
  shape: tuple[int, ...], positions: jax.Array, values: jax.Array, scale: float
) -> jax.Array:
  """Returns the sum of several payloads times ``scale``: ``float32[rows, size]``.

  Positions and values are ``[K, rows, slots]``; unused slots have the position ``size``
  or more. ``shape`` holds the number of rows, and of elements in a row.

  Example:
    >>> positions = jnp.array([[[2, 0]], [[2, 3]]])
    >>> add_entries((1, 3), positions, jnp.ones((2, 1, 2)), 0.5)
    Array([[0.5, 0. , 1. ]], dtype=float32)
  """
  rows, size = shape[0], shape[1]
  row = lax.iota(jnp.int32, rows)[:, None]
  used = (positions >= 0) & (positions < size)
  place: tuple[jax.Array, ...]
  if rows * size < COUNTED:
    shape = (rows * size,)
    place = (jnp.where(used, row * size + positions, rows * size),)
  else:  # no int32 counts the elements of a flat array
    place = (jnp.broadcast_to(row, used.shape), jnp.where(used, positions, size))
  values = values * scale

  def add(k: jax.Array | int, total: jax.Array) -> jax.Array:
    where = total.at[tuple(x[k].reshape(-1) for x in place)]
    return where.add(values[k].reshape(-1), mode="drop", unique_indices=True)

  total = zeros_of_type(values, shape)
  # One payload after the other. The entries of one payload have different positions, so
  # that no device can add in an order of its own. A single scatter of all payloads
  # would on GPUs, and workers would differ in the last bit.
  return lax.fori_loop(0, positions.shape[0], add, total).reshape(rows, size)


def zeros_of_type(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns ``float32`` zeros that vary over the same mesh axes as ``x``."""
  bits = lax.bitcast_convert_type(x.reshape(-1)[:1], jnp.uint32) & 0
  zero = lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.broadcast_to(zero, shape) if x.size else jnp.zeros(shape, jnp.float32)
