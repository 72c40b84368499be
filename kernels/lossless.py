"""Packs bfloat16 into 12 bits without loss, as bits: NaN and subnormals stay."""

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.kernels.common.planes import pack_planes, unpack_planes

PLANES, COLUMNS = 8, 128  # a plane is a bucket
ESCAPES = 10  # that a row lists
ROW_WORDS = 3 * COLUMNS + 2 + ESCAPES

_FIELD_ZERO, _ESCAPE = 14, 15  # codes; those below are distances
_UNUSED = 0xFFFFFFFF  # an entry of the list
_FULL = 0xFFFFFFFE  # the last entry, if the list does not hold all escapes


def halves(tiles: Array) -> Array:
  """Rounds ``float32`` to nearest even bfloat16: bit patterns, ``uint32``."""
  bits = jax.lax.bitcast_convert_type(tiles, jnp.uint32)
  rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
  # A NaN with bits in its lower half alone would become an infinity.
  lower = (bits & 0xFFFF != 0).astype(jnp.uint32) << 6
  return jnp.where(bits << 1 > jnp.uint32(0xFF000000), bits >> 16 | lower, rounded)


def numbers(codes: Array) -> Array:
  """Returns the ``float32`` numbers of bit patterns of bfloat16."""
  return jax.lax.bitcast_convert_type(codes << 16, jnp.float32)


def encode_rows(tiles: Array) -> Array:
  """Encodes ``float32[rows, ...]``, 1024 a row, to ``uint32[rows, ROW_WORDS]``."""
  x = halves(tiles.reshape(-1, PLANES, COLUMNS))
  field, rest = x >> 7 & 255, x >> 8 & 128 | x & 127
  largest = jnp.max(jnp.where(field == 255, 0, field), axis=2, keepdims=True)
  distance = largest - field  # of an escaped NaN or infinity, a large number
  code = jnp.where(distance < _FIELD_ZERO, distance, _ESCAPE)
  code = jnp.where(field == 0, _FIELD_ZERO, code)
  escaped = code == _ESCAPE
  count = jnp.sum(escaped, axis=(1, 2), dtype=jnp.uint32)
  entries = jnp.where(escaped, _places() << 8 | field, jnp.uint32(_UNUSED))

  def following(last: Array, _: None) -> tuple[Array, Array]:
    later = jnp.where(entries > last[:, None, None], entries, jnp.uint32(_UNUSED))
    found = jnp.min(later, axis=(1, 2))
    return found, found

  # An entry holds the exponent of an escape, which is not zero: all are above zero.
  # The product has the type of the rows, also where they vary over mesh axes.
  first = entries[:, 0, 0] * jnp.uint32(0)
  listed = jax.lax.scan(following, first, None, length=ESCAPES)[1].T
  last = jnp.where(count > ESCAPES, jnp.uint32(_FULL), listed[:, -1])
  pack = lambda x, i, bits: pack_planes([x[:, i + k] for k in range(32 // bits)], bits)
  words = [pack(rest, 0, 8), pack(rest, 4, 8), pack(code, 0, 4)]
  words += [pack(largest, 0, 8), pack(largest, 4, 8), listed[:, :-1], last[:, None]]
  return jnp.concatenate(words, axis=1)


def decode_rows(rows: Array) -> Array:
  """Decodes to ``float32[rows, 8, 128]``; a row with too many escapes is all NaN."""
  size = COLUMNS
  rest = unpack_planes(rows[:, : 2 * size].reshape(-1, 2, size), 8)
  rest = rest.reshape(-1, PLANES, size)
  code = unpack_planes(rows[:, 2 * size : 3 * size], 4)
  largest = unpack_planes(rows[:, 3 * size : 3 * size + 2].reshape(-1, 2, 1), 8)
  entries = rows[:, 3 * size + 2 :]
  field = largest.reshape(-1, PLANES, 1) - code
  field = jnp.where(code == _FIELD_ZERO, 0, field)
  places = _places()
  for k in range(ESCAPES):
    entry = entries[:, k, None, None]
    field = jnp.where(places == entry >> 8, entry & 255, field)
  x = (rest & 128) << 8 | (field & 255) << 7 | rest & 127
  full = (entries[:, -1] == jnp.uint32(_FULL))[:, None, None]
  return numbers(jnp.where(full, jnp.uint32(0x7FC0), x))


def _places() -> Array:
  """The place of each element in its row, ``uint32[1, 8, 128]``."""
  return jnp.arange(PLANES * COLUMNS, dtype=jnp.uint32).reshape(1, PLANES, COLUMNS)
