"""Encodes the rows of several leaves by one program that selects elements in each."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.entry_rows import EntryRow
from gradcomp._src.kernels.common.row_view import COPIED, Row

# Selects in a row, given what the choice depends on besides. Returns ``int32[slots]``
# positions, which are the row's size in slots that are not used.
Select = Callable[[Row, jax.Array | None], jax.Array]


class Entries(NamedTuple):
  """The entries that one row sends, and what they leave."""

  words: jax.Array  # uint32[words]
  positions: jax.Array  # int32[slots], the row's size in slots that are not used
  unsent: jax.Array  # float32[slots], the values there less what they decode to
  rest: jax.Array | None  # float32[n], the residual of the row, if it was copied


def encode_leaves(
  form: EntryRow,
  select: Select,
  leaves: Sequence[jax.Array],
  matrices: Sequence[jax.Array],
  given: Sequence[jax.Array | None],
) -> tuple[jax.Array, list[jax.Array]]:
  """Encodes several leaves of one size by a single program.

  Args:
    form: describes the entries of a row.
    select: selects the elements of a row to send.
    leaves: ``float32``, of one size.
    matrices: their rows, filled with zeros.
    given: for each leaf, what the choice depends on besides, or None.

  Returns:
    The rows of all leaves, ``uint32[rows, words]``, and for each leaf its residual,
    ``float32`` in its shape.
  """
  entries = encode_rows(form, select, matrices, given, copied=leaves[0].size <= COPIED)
  count = matrices[0].shape[0]
  result = []
  for i, (leaf, matrix) in enumerate(zip(leaves, matrices, strict=True)):
    own = jax.tree.map(lambda x, i=i: x[i * count : (i + 1) * count], entries)
    result.append(_rest(leaf, matrix, own))
  return entries.words, result


def encode_rows(
  form: EntryRow,
  select: Select,
  matrices: Sequence[jax.Array],
  given: Sequence[jax.Array | None],
  *,
  copied: bool = False,
) -> Entries:
  """Encodes the rows of several matrices of one shape, one row after the other.

  The result has the rows of the first matrix, then those of the second, and so on. With
  ``copied`` each row is copied first, which spares the compiler a program a matrix.
  """
  count = matrices[0].shape[0]
  total = count * len(matrices)
  if not total:
    empty = jnp.zeros((0, form.slots))
    words = jnp.zeros((0, form.words), jnp.uint32)
    return Entries(words, empty.astype(jnp.int32), empty, jnp.zeros((0, form.size)))
  lines = [jnp.broadcast_to(x, (count,)) for x in given if x is not None]
  every = jnp.concatenate(lines) if lines else None

  def encode(number: jax.Array) -> Entries:
    row = Row(matrices, number)
    if copied:
      row = row.copied()
    positions = select(row, None if every is None else every[number])
    values = row.at(positions)
    words, sent = form.encode(positions, values)
    unsent, rest = values - sent, None
    if copied:
      place = row.matrices[0][0].at[positions]
      rest = place.set(unsent, mode="drop", unique_indices=True)
    return Entries(words, positions, unsent, rest)

  if total == 1:
    return jax.tree.map(lambda x: x[None], encode(jnp.int32(0)))
  return jax.lax.map(encode, jnp.arange(total, dtype=jnp.int32))


def _rest(leaf: jax.Array, matrix: jax.Array, own: Entries) -> jax.Array:
  """Returns the residual of a leaf, made of what its entries leave.

  It is written into the matrix that was read, so that XLA does not hold the leaf twice.
  """
  rest = own.rest
  if rest is None:
    place: tuple[jax.Array, ...] = (own.positions,)
    lost = own.unsent
    if len(matrix) == 1:  # which was read as a flat array
      matrix, place, lost = jax.tree.map(lambda x: x[0], (matrix, place, lost))
    else:
      place = (jnp.arange(len(matrix))[:, None], *place)
    rest = matrix.at[place].set(lost, mode="drop", unique_indices=True)
  return rest.reshape(-1)[: leaf.size].reshape(leaf.shape)
