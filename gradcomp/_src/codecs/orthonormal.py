"""Orthonormal rows by matrix products, without LAPACK."""

import jax
import jax.numpy as jnp

# The rest of a dependent row is rounding. Measured on float32 products of random
# matrices with those of rank 1 and 3, that is 2**-21 to 2**-18.7 of its length.
_DEPENDENT = 2.0**-16


def product(spec: str, *factors: jax.Array) -> jax.Array:
  """Multiplies as ``jnp.einsum`` does, with factors of full precision.

  Example:
    >>> product("m,m->", jnp.ones(3), jnp.ones(3))
    Array(3., dtype=float32)
  """
  # GPUs and TPUs round factors to 10 or 7 bits by default. Rows would then be
  # orthogonal to 1e-3 or worse, and the common part of two rows would count twice.
  return jnp.einsum(spec, *factors, precision=jax.lax.Precision.HIGHEST)


def unit_rows(rows: jax.Array) -> jax.Array:
  """Scales rows, ``float32[..., m]``, to length 1.

  Zero rows stay zero. A row that is not finite becomes NaN in part or in whole.

  Example:
    >>> unit_rows(jnp.array([[3e-30, 4e-30], [0.0, 0.0]]))
    Array([[0.6, 0.8],
           [0. , 0. ]], dtype=float32)
  """
  largest = jnp.abs(rows).max(axis=-1, keepdims=True)
  # Squares of numbers up to 1 neither overflow nor vanish. A NaN is not equal to zero.
  scaled = jnp.where(largest == 0, 0.0, rows / largest)
  length = jnp.sqrt(jnp.square(scaled).sum(axis=-1, keepdims=True))
  return jnp.where(length == 0, 0.0, scaled / length)


def orthonormal(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  r"""Makes rows orthonormal by the Gram-Schmidt process: a basis of their span.

  The process takes from each row the part in the span of the rows before it, and scales
  the rest to length 1. With rows :math:`a_j`,

  .. math:: v_j = (I - B_j^T B_j)^2 \, a_j, \qquad b_j = v_j / \lVert v_j \rVert

  where :math:`B_j` holds the rows :math:`b_1` to :math:`b_{j-1}`. The square means that
  the span is taken out twice. Once is not enough where little is left, which is then
  mostly rounding. Twice is, whatever the rows: of the result no product of two rows is
  above 2**-20. (A Cholesky factor of the rows' products is as good for well-conditioned
  rows only. Repeated, it took rounding for rows of their own.)

  A row *depends* on those before it if 2**-16 of its length or less is left, and
  becomes zero. The rest of it would be rounding.

  Args:
    rows: ``float32[r, m]``.

  Returns:
    The basis, ``float32[r, m]``, and ``bool[r]``: False for rows that became zero,
    because they were zero or depended on others. If an element is not finite, the
    whole basis may be NaN, and its own row is; NaN rows count as True.

  Example:
    >>> basis, kept = orthonormal(jnp.array([[0.0, 2.0], [0.0, 4.0], [3.0, 1.0]]))
    >>> basis
    Array([[0., 1.],
           [0., 0.],
           [1., 0.]], dtype=float32)
    >>> kept
    Array([ True, False,  True], dtype=bool)

  References:
    Giraud et al., `Rounding error analysis of the classical Gram-Schmidt
    orthogonalization process <https://doi.org/10.1007/s00211-005-0615-4>`_, 2005
  """
  number = jnp.arange(rows.shape[0])

  def take_out(j: jax.Array, rows: jax.Array) -> jax.Array:
    row = rows[j]
    for _ in range(2):
      share = jnp.where(number < j, product("rm,m->r", rows, row), 0.0)
      row = row - product("r,rm->m", share, rows)
    length = jnp.sqrt(jnp.square(row).sum())
    return rows.at[j].set(jnp.where(length <= _DEPENDENT, 0.0, row / length))

  basis = jax.lax.fori_loop(0, rows.shape[0], take_out, unit_rows(rows))
  return basis, jnp.any(basis != 0, axis=1)
