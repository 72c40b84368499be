"""One row out of several matrices, so that one program serves all leaves of a size."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")

# Leaves of up to so many elements are copied where that spares the compiler a program
# for each of them. On a processor with 1 MiB of cache a core, a step of 32 such leaves
# takes a tenth less time with the copy, for it stays in the cache; with twice as many
# elements it takes 1.4 times as long.
COPIED = 1 << 17


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

  def copied(self) -> "Row":
    """The same, copied at once, so that no reading of it is compiled for each matrix.

    Example:
      >>> Row([jnp.zeros((1, 2)), jnp.ones((1, 2))], jnp.int32(1)).copied().matrices
      [Array([[1., 1.]], dtype=float32)]
    """
    return Row([self.read(lambda x: x)[None]], jnp.int32(0))

  def at(self, positions: jax.Array) -> jax.Array:
    """The elements at positions, 0 behind the row."""
    return self.read(lambda x: x.at[positions].get(mode="fill", fill_value=0))
