"""Selection of the elements of rows, for one leaf or for several at a time."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from gradcomp._src.codecs.entries import EntryRow
from gradcomp._src.kernels.common.row_view import COPIED, RowView

Selection = Literal["auto", "exact", "trimmed", "threshold", "sampled"]

# Fang 2018, sections 2.1 and 3.1: 128 KB of float32.
_SMALL = 1 << 15
# From this size on up to twice the needed elements are sent, which is no large message.
_LARGE = 1 << 20


class Selected(NamedTuple):
  """The codec state of a selection: a threshold and a count for each row."""

  threshold: jax.Array  # float32[rows], the smallest magnitude of the last search
  used: jax.Array  # int32[rows], the entries sent in this step


def method_of(selection: Selection, size: int) -> Selection:
  """Returns the selection for a row of ``size`` elements, with ``"auto"`` resolved.

  Example:
    >>> [method_of("auto", size) for size in (1000, 100_000, 10_000_000)]
    ['exact', 'trimmed', 'threshold']
  """
  if selection != "auto":
    return selection
  if size < _SMALL:
    return "exact"
  return "trimmed" if size < _LARGE else "threshold"


# Selects in a row, given a threshold, a sign, or None. Returns positions,
# ``int32[slots]``, which are the row's size in slots that are not used.
Select = Callable[[RowView, jax.Array | None], jax.Array]


class SelectedEntries(NamedTuple):
  """The entries that one row sends, and the residual that they leave."""

  words: jax.Array  # uint32[words]
  positions: jax.Array  # int32[slots], the row's size in slots that are not used
  unsent: jax.Array  # float32[slots], the values there less the decoded values
  rest: jax.Array | None  # float32[n], the residual of the row, if it was copied


def encode_leaves(
  form: EntryRow,
  select: Select,
  leaves: Sequence[jax.Array],
  matrices: Sequence[jax.Array],
  given: Sequence[jax.Array | None],
) -> tuple[jax.Array, list[jax.Array]]:
  """Encodes several leaves of one size by a single program.

  ``matrices`` holds their rows, filled with zeros, and ``given`` the threshold or the
  turn of each leaf, or None.

  Returns:
    The rows of all leaves, ``uint32[rows, words]``, and for each leaf its residual,
    ``float32`` in its shape.
  """
  entries = encode_rows(form, select, matrices, given, copied=leaves[0].size <= COPIED)
  count = matrices[0].shape[0]
  result = []
  for i, (leaf, matrix) in enumerate(zip(leaves, matrices, strict=True)):
    cut = lambda x, i=i: jax.lax.slice_in_dim(x, i * count, (i + 1) * count)
    result.append(_rest(leaf, matrix, jax.tree.map(cut, entries)))
  return entries.words, result


def encode_rows(
  form: EntryRow,
  select: Select,
  matrices: Sequence[jax.Array],
  given: Sequence[jax.Array | None],
  *,
  copied: bool = False,
) -> SelectedEntries:
  """Encodes the rows of matrices of one shape, matrix by matrix and row by row.

  With ``copied`` each row is copied first, which spares XLA a program a matrix.
  """
  count = matrices[0].shape[0]
  total = count * len(matrices)
  if not total:
    empty = jnp.zeros((0, form.slots))
    words = jnp.zeros((0, form.words), jnp.uint32)
    return SelectedEntries(
      words, empty.astype(jnp.int32), empty, jnp.zeros((0, form.size))
    )
  lines = [jnp.broadcast_to(x, (count,)) for x in given if x is not None]
  every = jnp.concatenate(lines) if lines else None

  def encode(number: jax.Array) -> SelectedEntries:
    row = RowView(matrices, number)
    if copied:
      row = row.copied()
    positions = select(row, None if every is None else every[number])
    values = row.at(positions)
    words, sent = form.encode(positions, values)
    unsent, rest = values - sent, None
    if copied:
      place = row.matrices[0][0].at[positions]
      rest = place.set(unsent, mode="drop", unique_indices=True)
    return SelectedEntries(words, positions, unsent, rest)

  if total == 1:
    return jax.tree.map(lambda x: x[None], encode(jnp.int32(0)))
  return jax.lax.map(encode, jnp.arange(total, dtype=jnp.int32))


@jax.jit  # leaves of a shape: traced once
def _rest(leaf: jax.Array, matrix: jax.Array, own: SelectedEntries) -> jax.Array:
  """Returns the residual of a leaf, from the unsent values of its entries."""
  rest = own.rest
  if rest is None:
    place: tuple[jax.Array, ...] = (own.positions,)
    lost = own.unsent
    if len(matrix) == 1:  # which was read as a flat array
      matrix, place, lost = jax.tree.map(lambda x: x[0], (matrix, place, lost))
    else:
      place = (jnp.arange(len(matrix))[:, None], *place)
    # Written into the matrix that was read, so that XLA does not hold the leaf twice.
    rest = matrix.at[place].set(lost, mode="drop", unique_indices=True)
  return rest.reshape(-1)[: leaf.size].reshape(leaf.shape)
