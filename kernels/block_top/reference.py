"""The largest elements of blocks in jnp: selects, codes, packs, and decodes them."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.kernels.block_top.form import (
  WORDS,
  Form,
  behind_of,
  behind_of_code,
  code,
  cut_value,
  keys,
  values,
)
from gradcomp._src.kernels.common.planes import (
  float_words,
  floats,
  pack_planes,
  unpack_planes,
)
from gradcomp._src.kernels.common.scales import norms, scales
from gradcomp._src.kernels.materialize import materialized, packed

# A maximum is taken over lanes of at most 16 steps, and then over the lanes. XLA:CPU
# vectorizes such short ones, without writing the integers down first.
_LANES = 8
_STEPS = 16

_MANY = 2**12  # words of rows: fewer are decoded soon, however that is done

# The places and values of the entries of blocks, and the value at all other places.
Entries = tuple[list[tuple[jax.Array, jax.Array]], jax.Array]


def encode_rows(
  x: jax.Array, *, form: Form, first_row: int = 0
) -> tuple[jax.Array, jax.Array | None]:
  """Encodes ``float32`` of any shape: ``uint32[rows, row_words]``, and the residual."""
  del first_row  # nothing is random
  flat = x.reshape(-1)
  if not flat.size:
    return jnp.zeros((0, form.row_words), jnp.uint32), x if form.keep else None
  entries = select(flat, form)
  parts = []
  if form.scaled:
    scale = scales(norms(entries[0][1], "max"))[:, None]
    for behind, value in entries:
      parts.append(packed_codes(code(behind, value, scale, form), form))
    parts.append(float_words(scale))
  else:
    for behind, value in entries:
      words = float_words(value)
      some = (words << 1) > 0  # minus zero is sent as zero, and as nothing
      parts.append(packed_codes(jnp.where(some, behind, np.uint32(0)), form))
      parts.append(jnp.where(some, words, np.uint32(0)))
  rows = packed(jnp.concatenate(parts, axis=1))
  return rows, remainder(x, rows, form) if form.keep else None


def remainder(x: jax.Array, rows: jax.Array, form: Form) -> jax.Array:
  """Returns the residual of an array, in its shape: the array less its decoded rows."""
  entries, others = _entries(rows, form)
  if x.size % form.block_size:
    sent = spread(entries, others, form).reshape(-1)[: x.size]
    return x - sent.reshape(x.shape)
  # Whole blocks are subtracted in their own shape: XLA's loops for CPUs take several
  # times as long in another one.
  blocks = x.reshape(-1, form.block_size)
  own = lambda part: part.reshape(-1)[: blocks.shape[0]]
  entries = [(own(behind), own(value)) for behind, value in entries]
  return (blocks - spread(entries, own(others), form)).reshape(x.shape)


def packed_codes(codes: jax.Array, form: Form) -> jax.Array:
  """Packs the codes of tiles, ``uint32[rows, R]``: ``uint32[rows, 32]``."""
  planes = codes.reshape(-1, form.planes, WORDS)
  return pack_planes([planes[:, k] for k in range(form.planes)], form.code_bits)


def _largest(key: jax.Array) -> jax.Array:
  """Returns the largest number of each line of ``uint32[m, B]``."""
  count, size = key.shape
  steps = min(_STEPS, size // _LANES)
  lanes = jax.lax.reduce(
    key.reshape(count, size // (steps * _LANES), steps, _LANES),
    np.uint32(0),
    jax.lax.max,
    (2,),
  ).reshape(count, -1)
  while (size := lanes.shape[1]) > 1:
    lanes = jnp.maximum(lanes[:, : size // 2], lanes[:, size // 2 :])
  return lanes[:, 0]


def _select(x: jax.Array, form: Form) -> list[tuple[jax.Array, jax.Array]]:
  """Selects in whole blocks, ``float32[m, B]``: the keys and values of entries."""
  every = keys(x, form)
  found = [_largest(every)]
  while len(found) < form.count:
    found.append(_largest(jnp.where(every < found[-1][:, None], every, np.uint32(0))))
  if form.scaled:
    return [(key, cut_value(key, form)) for key in found]
  whole = jax.lax.bitcast_convert_type(x, jnp.uint32)
  bits = [_largest(jnp.where(every == key[:, None], whole, 0)) for key in found]
  return list(zip(found, map(floats, bits), strict=True))


def select(x: jax.Array, form: Form) -> list[tuple[jax.Array, jax.Array]]:
  """Selects the largest elements of each block of a flat array.

  Returns:
    For each entry of a block the number of elements behind it, ``uint32[rows, R]``, and
    its value, ``float32[rows, R]``; zeros for blocks behind the array.
  """
  size = form.block_size
  whole = x.size // size * size
  parts = []
  if whole:
    parts.append(_select(x[:whole].reshape(-1, size), form))
  if whole < x.size:
    last = jnp.pad(x[whole:], (0, whole + size - x.size))
    parts.append(_select(last.reshape(1, size), form))
  blocks = -(-x.size // size)
  rows = -(-blocks // form.blocks)

  def joined(pieces: Sequence[jax.Array]) -> jax.Array:
    flat = jnp.concatenate(pieces)
    return jnp.pad(flat, (0, rows * form.blocks - blocks)).reshape(rows, form.blocks)

  entries = []
  for entry in zip(*parts, strict=True):
    key, value = map(joined, zip(*entry, strict=True))
    entries.append((behind_of(key, form), value))
  return entries


def _entries(rows: jax.Array, form: Form) -> Entries:
  """Returns the :func:`entries_of_rows`, materialized on a CPU if that is faster."""
  # Where a tile's blocks are no power of two, XLA would find the row of each element by
  # a division, and take ten times as long.
  unpack = functools.partial(entries_of_rows, form=form)
  odd = form.planes & (form.planes - 1)
  return materialized(unpack, rows) if odd and rows.size >= _MANY else unpack(rows)


def entries_of_rows(rows: jax.Array, form: Form) -> Entries:
  """Unpacks the entries of rows, ``uint32[..., words]``.

  Returns:
    For each entry of a block the number of elements behind it, ``uint32[..., R]``, and
    its value, ``float32[..., R]``. And the value of a block's other elements,
    ``float32[..., R]``: zero, or NaN if something in the block was not finite.
  """
  shape = (*rows.shape[:-1], form.blocks)
  each = form.entry_words
  parts = [rows[..., k * each :][..., :each] for k in range(form.count)]
  codes = [
    unpack_planes(part[..., :WORDS], form.code_bits).reshape(shape) for part in parts
  ]
  places = [behind_of_code(code, form) for code in codes]
  if form.scaled:
    scale = floats(rows[..., -1:])
    sent = [values(code, scale, form) for code in codes]
    return list(zip(places, sent, strict=True)), jnp.broadcast_to(scale * 0, shape)
  sent = [floats(part[..., WORDS:]) for part in parts]
  finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, sent))
  sent = [jnp.where(finite, value, np.nan) for value in sent]
  return list(zip(places, sent, strict=True)), jnp.where(finite, 0.0, np.nan)


def decode_rows(rows: jax.Array, form: Form) -> jax.Array:
  """Decodes ``uint32[..., rows, words]`` to values, ``float32[..., rows, R, B]``."""
  return spread(*_entries(rows, form), form)


def spread(
  entries: Sequence[tuple[jax.Array, jax.Array]], others: jax.Array, form: Form
) -> jax.Array:
  """Puts entries into their places in blocks, ``float32[..., B]``, among ``others``.

  An entry is the number of elements behind it, and its value. ``others``,
  ``float32[...]``, is the value of a block's other elements.
  """
  shape = (*others.shape, form.block_size)
  place = jax.lax.broadcasted_iota(jnp.uint32, shape, others.ndim)
  blocks = jnp.broadcast_to(others[..., None], shape)
  for behind, value in reversed(entries):
    at = (form.block_size - 1 - behind)[..., None]
    blocks = jnp.where(place == at, value[..., None], blocks)
  return blocks
