"""Matrix products in a format: every product and every partial sum is rounded."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.checks import one_of
from gradcomp._src.floats.arithmetic import rounded_product
from gradcomp._src.floats.rounding import check_float, round_to, with_derivative_of
from gradcomp._src.floats.sums import Method, sum_of_terms, sum_rounded
from gradcomp._src.kernels.common.float_formats import FloatFormat

_BLOCK = 1 << 18  # elements of the result, or products, that caches hold at once


def matmul(
  a: Array,
  b: Array,
  fmt: FloatFormat,
  accumulator: FloatFormat | None = None,
  method: Method = "sequential",
  *,
  straight_through: bool = False,
) -> Array:
  r"""Multiplies matrices like hardware that has only the formats.

  Operands and each product are rounded to ``fmt``. Each partial sum, over k in order,
  is rounded to ``accumulator``:

  .. math:: s \leftarrow s \oplus_{acc} (a_{ik} \otimes_{fmt} b_{kj})

  Args:
    a: ``[m, k]`` of real float dtype.
    b: ``[k, n]``.
    fmt: the format of operands and products.
    accumulator: the format of partial sums, to which products are then rounded too;
      ``fmt`` by default.
    method: how products are added, see :func:`gradcomp.floats.reduce_sum`.
    straight_through: whether the derivative is the derivative of the exact product of
      the rounded matrices, with roundings as the identity; else it is zero.

  Returns:
    ``float32[m, n]``, numbers of the accumulator's format.

  Raises:
    ValueError: the shapes do not fit, or ``method`` is unknown.
    TypeError: an operand is not real floating point.

  Example:
    >>> ones = jnp.ones((1, 64))
    >>> narrow, wide = FloatFormat(4, 3), FloatFormat(5, 10)
    >>> matmul(ones, ones.T, narrow), matmul(ones, ones.T, narrow, wide)
    (Array([[16.]], dtype=float32), Array([[64.]], dtype=float32))

  References:
    Han et al., `APS <https://arxiv.org/abs/1911.08907>`_, 2021, section 5.1.1 and
    figure 12
  """
  one_of("method", Method, method)
  a, b = check_float(a, "a"), check_float(b, "b")
  if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
    raise ValueError(
      f"`a` and `b` must have shapes [m, k] and [k, n], got {a.shape} and {b.shape}."
    )
  product: Callable[..., Array] = functools.partial(
    _matmul, fmt=fmt, added_in=accumulator or fmt, method=method
  )
  if straight_through:
    rounded = functools.partial(round_to, fmt=fmt, straight_through=True)
    exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    product = with_derivative_of(lambda a, b: exact(rounded(a), rounded(b)), product)
  return product(a, b)


@functools.partial(jax.jit, static_argnames=("fmt", "added_in", "method"))
def _matmul(
  a: Array, b: Array, *, fmt: FloatFormat, added_in: FloatFormat, method: Method
) -> Array:
  """Multiplies matrices by blocks of rows, one block after the other."""
  (rows, depth), columns = a.shape, b.shape[1]
  a, b = round_to(a, fmt), round_to(b, fmt)
  if not rows or not columns or not depth:
    return jnp.zeros((rows, columns), jnp.float32)
  count = columns * (depth if method == "pairwise" else 1)
  size = min(rows, max(1, _BLOCK // count))
  blocks = jnp.pad(a, ((0, -rows % size), (0, 0)))

  def block(part: Array) -> Array:
    def products(left: Array, right: Array) -> Array:
      product = rounded_product(left, right, fmt)
      return product if added_in == fmt else round_to(product, added_in)

    if method == "pairwise":
      return sum_rounded(products(part.T[:, :, None], b[:, None]), added_in, method)
    term = lambda k: products(part[:, k, None], b[k])
    return sum_of_terms(term, depth, added_in, method)

  return jax.lax.map(block, blocks.reshape(-1, size, depth)).reshape(-1, columns)[:rows]
