"""Rows of several matrices, read by one program for all leaves of a size."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

T = TypeVar("T")

# Leaves of up to COPIED elements are copied where that spares the compiler a program
# for each of them. On a processor with 1 MiB of cache a core, a step of 32 such leaves
# takes a tenth less time with the copy, because the copy stays in the cache. With twice
# as many elements it takes 1.4 times as long.
COPIED = 1 << 17


class RowView(NamedTuple):
  """One row out of several matrices of the same shape."""

  # float32[rows, n] each; or float32[n], a row, of which XLA for TPUs makes loops with
  # registers of 1024 elements, and not of 128 as of float32[1, n].
  matrices: Sequence[Array]
  number: Array  # int32[]: counts the rows of the first matrix, the second, ...

  @property
  def size(self) -> int:
    """The number of elements of the row."""
    return self.matrices[0].shape[-1]

  @property
  def rows(self) -> int:
    """The number of rows of a matrix."""
    return self.matrices[0].shape[0] if self.matrices[0].ndim > 1 else 1

  def read(self, function: Callable[[Array], T]) -> T:
    """Returns ``function(row)``, without a copy of a row of a matrix with several."""

    def row(matrix: Array, number: Array | int) -> Array:
      if matrix.shape[0] == 1:
        return matrix[0]
      return lax.dynamic_index_in_dim(matrix, number, keepdims=False)

    return self.read_within(lambda matrix, number: function(row(matrix, number)))

  def read_within(self, function: Callable[[Array, Array | int], T]) -> T:
    """Returns ``function(matrix, number)`` of the row's matrix and its number there."""
    count = self.rows

    def of(matrix: Array) -> T:
      matrix = matrix.reshape(count, self.size)
      return function(matrix, self.number % count if count > 1 else 0)

    if len(self.matrices) == 1:
      return of(self.matrices[0])
    function = jax.jit(function)  # traced once for all matrices
    branches = [functools.partial(of, matrix) for matrix in self.matrices]
    return lax.switch(self.number // count, branches)

  def copied(self) -> "RowView":
    """Returns the same row, copied once, so that readers are compiled once."""
    return RowView([self.read(lambda x: x)[None]], jnp.int32(0))

  def at(self, positions: Array) -> Array:
    """Returns the elements at positions; positions behind the row's end give 0."""
    return self.read(
      lambda x: x.at[positions].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
      )
    )
