"""Packs positions into 16 bits, and adds many sparse rows to one dense array."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradcomp._src.kernels import materialize
from gradcomp._src.kernels.common import planes

HALF = 16  # bits of a position in its block
BLOCK = 1 << HALF
COUNTED = 1 << 31  # elements: int32 counts the positions in fewer


def block_ends(positions: Array, size: int, block: int = BLOCK) -> Array:
  """Counts the entries that lie in each block or before it: ``uint32[blocks]``."""
  blocks = -(-size // block)
  owner = jnp.where(positions < size, positions // block, blocks)
  ends = _count_up_to(lax.iota(jnp.int32, blocks), owner)
  return jnp.minimum(ends, positions.size).astype(jnp.uint32)


def slot_blocks(ends: Array, slots: int) -> Array:
  """Returns the block of each slot, later ones of unused slots: ``int32[slots]``."""
  if ends.size == 1:
    return jnp.zeros(slots, jnp.int32)
  return _count_up_to(lax.iota(jnp.int32, slots), ends.astype(jnp.int32))


def _count_up_to(limits: Array, ascending: Array) -> Array:
  """Counts the numbers that are no larger than a limit; more, where none is larger."""
  # It finds all counts at once, bit by bit from the highest. jnp.searchsorted fails in
  # some maps (JAX 0.10.2).
  steps = ascending.size.bit_length()

  def count(k: Array, found: Array) -> Array:
    further = found + (1 << (steps - 1) >> k)
    last = ascending.at[further - 1].get(mode="clip", wrap_negative_indices=False)
    return jnp.where(last <= limits, further, found)

  return lax.fori_loop(0, steps, count, limits * 0 + ascending[:1] * 0)


def pack_halves(values: Array) -> Array:
  """Packs ``uint32[slots]`` of 16 bits, the second half above the first."""
  half = half_words(values.size)
  above = jnp.pad(values[half:], (0, 2 * half - values.size))
  return planes.pack_planes([values[:half], above], HALF)


def unpack_halves(words: Array, slots: int) -> Array:
  """Unpacks the words of :func:`pack_halves`: ``uint32[slots]``."""
  return planes.unpack_planes(words, HALF).reshape(-1)[:slots]


def half_words(slots: int) -> int:
  """Returns the number of words that hold ``slots`` halves."""
  return -(-slots // 2)


@functools.partial(jax.jit, static_argnums=(0, 4))  # leaves of a shape: traced once
def add_entries(
  size: int,
  positions: Array,
  values: Array,
  start: Array | int = 0,
  count: int | None = None,
) -> Array:
  """Adds entries of K payloads, ``[K, rows, slots]``: ``float32[count, 1, size]``."""
  rows = positions.shape[1] if count is None else count
  row = lax.iota(jnp.int32, rows)[:, None]
  flat = rows * size < COUNTED  # else no int32 counts the elements of a flat array
  index = functools.partial(lax.dynamic_index_in_dim, allow_negative_indices=False)

  def add(k: Array | int, total: Array) -> Array:
    # Cut in the loop, so that XLA makes no other program for rows elsewhere.
    payloads = (index(x, k, keepdims=False) for x in (positions, values))
    at, value = (materialize.slice_at(x, start, rows) for x in payloads)
    used = (at >= 0) & (at < size)
    place: tuple[Array, ...]
    if flat:
      place = (jnp.where(used, row * size + at, rows * size),)
    else:
      place = (jnp.broadcast_to(row, used.shape), jnp.where(used, at, size))
    where = total.at[tuple(x.reshape(-1) for x in place)]
    return where.add(
      value.reshape(-1), mode="drop", unique_indices=True, wrap_negative_indices=False
    )

  # Zeros that vary over the same mesh axes as the values.
  bits = lax.bitcast_convert_type(values.reshape(-1)[:1], jnp.uint32) & 0
  zero = lax.bitcast_convert_type(bits, jnp.float32) if values.size else jnp.float32(0)
  total = jnp.broadcast_to(zero, (rows * size,) if flat else (rows, size))
  # One payload after the other. The entries of one payload have different positions, so
  # that every device adds in one order. GPUs would order a single scatter of all
  # payloads anew, and workers would differ in the last bit.
  return lax.fori_loop(0, positions.shape[0], add, total).reshape(rows, 1, size)
