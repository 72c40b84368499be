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
    count = self.matrices[0].shape[0]

    def of(matrix: jax.Array) -> T:
      if count == 1:
        return function(matrix[0])
      return function(
        lax.dynamic_index_in_dim(matrix, self.number % count, keepdims=False)
      )

    if len(self.matrices) == 1:
      return of(self.matrices[0])
    branches = [functools.partial(of, matrix) for matrix in self.matrices]
    return lax.switch(self.number // count, branches)

  def at(self, positions: jax.Array) -> jax.Array:
    """The elements at positions, 0 behind the row."""
    return self.read(lambda x: x.at[positions].get(mode="fill", fill_value=0))
