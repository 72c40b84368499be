"""Selection of the elements of rows, for one leaf or for several at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.codecs.entries import EntryRow
from gradcomp._src.codecs.sums.records import Encoded
from gradcomp._src.kernels.common import sparse
from gradcomp._src.kernels.common.row_view import COPIED, RowView
from gradcomp._src.kernels.materialize import slice_at, unknown

Selection = Literal["auto", "exact", "trimmed", "threshold", "sampled"]


class Selected(NamedTuple):
  """The codec state of a selection: a threshold and a count for each row."""

  threshold: Array  # float32[rows], the smallest magnitude of the last search
  used: Array  # int32[rows], the entries sent in this step


# Selects in a row, given a threshold, a sign, or None. Returns positions,
# ``int32[slots]``, which are the row's size in slots that are not used.
Select = Callable[[RowView, Array | None], Array]


class SelectedEntries(NamedTuple):
  """The entries that one row sends, and the residual that they leave."""

  words: Array  # uint32[words]
  positions: Array  # int32[slots], the row's size in slots that are not used
  sent: Array  # float32[slots], the decoded values there
  unsent: Array  # float32[slots], the values there less the decoded values
  rest: Array | None  # float32[n], the residual of the row, if it was copied


def encode_leaves(
  form: EntryRow,
  select: Select,
  leaves: Sequence[Array],
  matrices: Sequence[Array],
  given: Sequence[Array | None],
) -> list[Encoded]:
  """Encodes several leaves of one size by a single program, with their residuals.

  ``matrices`` holds their rows, filled with zeros, and ``given`` the threshold or the
  turn of each leaf, or None. The codec state of a leaf is :class:`Selected`.
  """
  size, count = leaves[0].size, len(matrices[0])
  every = encode_rows(form, select, matrices, given, copied=size <= COPIED)
  # Of all leaves at once: leaf by leaf, there would be several programs for each.
  used = every.positions < form.size
  smallest = jnp.where(used, jnp.abs(every.sent), jnp.inf).min(axis=1, initial=jnp.inf)
  threshold = jnp.where(jnp.isfinite(smallest), smallest, 0.0)
  selected = Selected(threshold, form.used(every.words))
  chosen = None
  if size < sparse.COUNTED:
    start = form.size * jnp.tile(jnp.arange(count, dtype=jnp.int32), len(leaves))
    nonzero = used & (every.sent != 0)
    chosen = jnp.where(nonzero, start[:, None] + every.positions, size)
  starts = unknown([i * count for i in range(len(leaves))], every.words)
  result = []
  for at, leaf, matrix in zip(starts, leaves, matrices, strict=True):
    parts = jax.tree.map(
      lambda x, at=at: slice_at(x, at, count), (every, selected, chosen)
    )
    own, kept, places = parts
    rest = _rest(leaf, matrix, own, len(leaves) > 1)
    flat = None if places is None else places.reshape(-1)
    result.append(Encoded(own.words, rest, kept, flat))
  return result


def encode_rows(
  form: EntryRow,
  select: Select,
  matrices: Sequence[Array],
  given: Sequence[Array | None],
  *,
  copied: bool = False,
) -> SelectedEntries:
  """Encodes rows of matrices of one shape; ``copied`` ones share a program of XLA."""
  count = matrices[0].shape[0]
  total = count * len(matrices)
  if not total:
    empty = jnp.zeros((0, form.slots), jnp.float32)
    words = jnp.zeros((0, form.words), jnp.uint32)
    rest = jnp.zeros((0, form.size), jnp.float32)
    return SelectedEntries(words, empty.astype(jnp.int32), empty, empty, rest)
  lines = [jnp.broadcast_to(x, (count,)) for x in given if x is not None]
  every = jnp.concatenate(lines) if lines else None

  views = [matrices[0].reshape(-1)] if total == 1 else matrices

  def encode(number: Array) -> SelectedEntries:
    row = RowView(views, number)
    if copied:
      row = row.copied()
    positions = select(row, None if every is None else every[number])
    values = row.at(positions)
    words, sent = form.encode(positions, values)
    unsent, rest = values - sent, None
    if copied:
      place = row.read(lambda x: x).at[positions]
      rest = place.set(unsent, mode="drop", unique_indices=True)
    return SelectedEntries(words, positions, sent, unsent, rest)

  if total == 1:
    return jax.tree.map(lambda x: x[None], encode(jnp.int32(0)))
  return jax.lax.map(encode, jnp.arange(total, dtype=jnp.int32))


@functools.partial(jax.jit, static_argnums=3)  # leaves of a shape: traced once
def _rest(leaf: Array, matrix: Array, own: SelectedEntries, together: bool) -> Array:
  """Returns the residual of a leaf, from the unsent values of its entries."""
  rest = own.rest
  if rest is None:
    place: tuple[Array, ...] = (own.positions,)
    lost = own.unsent
    # Written into the array that was read, so that XLA does not hold the leaf twice: of
    # one leaf with one row a flat array, of several leaves their matrices.
    if len(matrix) == 1 and not together:
      matrix, place, lost = jax.tree.map(lambda x: x[0], (matrix, place, lost))
    else:
      place = (jnp.arange(len(matrix))[:, None], *place)
    rest = matrix.at[place].set(
      lost, mode="drop", unique_indices=True, wrap_negative_indices=False
    )
  return rest.reshape(-1)[: leaf.size].reshape(leaf.shape)
