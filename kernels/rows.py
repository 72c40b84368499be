"""One row out of several matrices, so that one program serves all leaves of a size."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
from jax import lax

T = TypeVar("T")


class Row(NamedTuple):
  """One of the rows of several matrices of one width.

  Example:
    >>> x = Row([jnp.array([[1.0, -3.0, 2.0]])], jnp.int32(0))
    >>> x.at(jnp.array([1, 3]))
    Array([-3.,  0.], dtype=float32)
  """

  matrices: Sequence[jax.Array]  # float32[rows, n] each
  number: jax.Array  # int32[]: rows of the first matrix, of the second, ...

  @property
  def size(self) -> int:
    return self.matrices[0].shape[1]

  def read(self, function: Callable[[jax.Array], T]) -> T:
    """``function`` of the row; of a matrix with several without a copy of the row."""

    def row(matrix: jax.Array, number: jax.Array | int) -> jax.Array:
      if matrix.shape[0] == 1:
        return matrix[0]
      return lax.dynamic_index_in_dim(matrix, number, keepdims=False)

    return self.read_within(lambda matrix, number: function(row(matrix, number)))

  def read_within(self, function: Callable[[jax.Array, jax.Array | int], T]) -> T:
    """``function`` of the matrix that the row is in, and of its number there."""
    count = self.matrices[0].shape[0]

    def of(matrix: jax.Array) -> T:
      return function(matrix, self.number % count if count > 1 else 0)

    if len(self.matrices) == 1:
      return of(self.matrices[0])
    branches = [functools.partial(of, matrix) for matrix in self.matrices]
    return lax.switch(self.number // count, branches)

  def at(self, positions: jax.Array) -> jax.Array:
    """The elements at positions, 0 behind the row."""
    return self.read(lambda x: x.at[positions].get(mode="fill", fill_value=0))
