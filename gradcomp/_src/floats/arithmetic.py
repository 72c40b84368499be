"""Sums and products in a format: every result is rounded to it once."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.checks import one_of, static_integer
from gradcomp._src.floats.rounding import (
  check_float,
  round_to,
  rounded,
  with_derivative_of,
)
from gradcomp._src.kernels.common import planes
from gradcomp._src.kernels.common.fixed_point import sign_bit, signed
from gradcomp._src.kernels.common.float_codes import FloatFormat

Method = Literal["sequential", "pairwise", "kahan"]
Order = Literal["gathered", "ring", "hierarchical"]

_GROUP_RULE = 'a divisor of the number of workers with order="hierarchical"'
_BLOCK = 1 << 18  # elements of a matrix product, or products, that caches hold at once

# A binary32 operation rounds to 24 bits first, which makes no difference for numbers of
# p bits if these are at least 2p + 1 for sums and 2p for products (Figueroa, 1995).
# With more bits, the error of the operation decides.
_MOST_FOR_SUMS = 10  # mantissa bits: 2 (m + 1) + 1 <= 24
_MOST_FOR_PRODUCTS = 11
_NO_EXPONENT, _ONE = np.uint32(0x807FFFFF), np.uint32(0x3F800000)
_HIGH_HALF = np.uint32(0xFFFFF000)  # sign, exponent, and 12 bits of the significand


def add(a: Array, b: Array, fmt: FloatFormat) -> Array:
  """Returns ``a + b`` in a format.

  Both operands are rounded to the format. Their exact sum is rounded to it once, to
  nearest even. Processors that take subnormal ``float32`` for zero, as XLA makes CPUs
  do, also take operands and exact results below 2**-126 for zero.

  Args:
    a, b: arrays of real float dtype, which broadcast.
    fmt: the format.

  Returns:
    ``float32`` numbers of the format, in the broadcast shape.

  Raises:
    TypeError: an operand is not real floating point.

  Example:
    >>> add(jnp.float32(8.0), jnp.array([1.0, 1.5]), FloatFormat(5, 2))
    Array([ 8., 10.], dtype=float32)

  References:
    Han et al., `APS <https://arxiv.org/abs/1911.08907>`_, 2021, section 5.1.1
  """
  a, b = check_float(a, "a"), check_float(b, "b")
  return rounded_sum(round_to(a, fmt), round_to(b, fmt), fmt)


def multiply(a: Array, b: Array, fmt: FloatFormat) -> Array:
  """Returns ``a * b`` in a format, rounded like the sum of :func:`add`.

  Args:
    a, b: arrays of real float dtype, which broadcast.
    fmt: the format.

  Returns:
    ``float32`` numbers of the format, in the broadcast shape.

  Raises:
    TypeError: an operand is not real floating point.

  Example:
    >>> multiply(jnp.float32(1.25), jnp.array([1.25, 3.0]), FloatFormat(5, 2))
    Array([1.5, 4. ], dtype=float32)
  """
  a, b = check_float(a, "a"), check_float(b, "b")
  return rounded_product(round_to(a, fmt), round_to(b, fmt), fmt)


def rounded_sum(
  a: Array, b: Array, fmt: FloatFormat, *, saturate: bool = False
) -> Array:
  """Returns :func:`add` of ``float32`` numbers of the format, unchecked."""
  total = a + b
  lost = None
  if fmt.mantissa_bits > _MOST_FOR_SUMS:
    of_b = total - a
    lost = (a - (total - of_b)) + (b - of_b)
  return rounded(total, fmt, lost=lost, saturate=saturate)


def rounded_product(a: Array, b: Array, fmt: FloatFormat) -> Array:
  """Returns the product of two numbers of a format, in it."""
  product = a * b
  if fmt.mantissa_bits <= _MOST_FOR_PRODUCTS:
    return rounded(product, fmt)
  # The exponents do not matter to whether something is lost, nor to its sign: numbers
  # get the exponent of 1. Their halves have 12 bits: products of halves are exact.
  near_one = lambda x: planes.floats(planes.float_words(x) & _NO_EXPONENT | _ONE)
  high_half = lambda x: planes.floats(planes.float_words(x) & _HIGH_HALF)
  a, b = near_one(a), near_one(b)
  a_high, b_high = high_half(a), high_half(b)
  a_low, b_low = a - a_high, b - b_high
  # The sign is set by a bit operation, so that no compiler contracts this product.
  near = signed(jnp.abs(a) * jnp.abs(b), sign_bit(a) ^ sign_bit(b))
  lost = a_low * b_low - (((near - a_high * b_high) - a_low * b_high) - a_high * b_low)
  return rounded(product, fmt, lost=jnp.where(product == 0, np.float32(0), lost))


def reduce_sum(
  x: Array, fmt: FloatFormat, axis: int | None = None, method: Method = "sequential"
) -> Array:
  r"""Adds over an axis in a format, to which every partial sum is rounded.

  :math:`\oplus` and :math:`\ominus` are a sum and a difference rounded to nearest even,
  and :math:`x_k` are the elements, which are rounded first:

  ==============  ======================================================================
  ``method``      the sum
  ==============  ======================================================================
  ``sequential``  :math:`s \leftarrow s \oplus x_k`, from the first on
  ``pairwise``    neighbors are added until one number is left; an odd last one stays
  ``kahan``       :math:`y = x_k \ominus c`, :math:`t = s \oplus y`,
                  :math:`c = (t \ominus s) \ominus y`, :math:`s = t`; c is 0 where t is
                  not finite
  ==============  ======================================================================

  Args:
    x: an array of real float dtype.
    fmt: the format.
    axis: the axis that is summed over; None for all elements, in row-major order.
    method: the order of the additions, as in the table.

  Returns:
    ``float32`` numbers of the format, in the shape of ``x`` without the axis. The sum
    of nothing is 0.

  Raises:
    ValueError: ``method`` is unknown, or ``x`` does not have the axis.
    TypeError: ``x`` is not real floating point.

  Example:
    >>> ones, fmt = jnp.ones(64), FloatFormat(5, 2)
    >>> [float(reduce_sum(ones, fmt, method=m)) for m in ("sequential", "kahan")]
    [8.0, 64.0]

  References:
    Han et al., `Auto-Precision Scaling for Distributed Deep Learning
    <https://arxiv.org/abs/1911.08907>`_, 2021, section 5.1.1; Higham, Accuracy and
    Stability of Numerical Algorithms, 2002, chapter 4
  """
  one_of("method", Method, method)
  x = check_float(x, "x")
  if axis is None:
    x, axis = x.reshape(-1), 0
  if not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
    raise ValueError(
      f"`axis` must be one of the {x.ndim} axes of `x`, or None, got {axis!r}."
    )
  return _sum(jnp.moveaxis(x, axis, 0), fmt, method)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _sum(x: Array, fmt: FloatFormat, method: Method) -> Array:
  return _sum_rounded(round_to(x, fmt), fmt, method)


def _sum_rounded(x: Array, fmt: FloatFormat, method: Method) -> Array:
  """Adds numbers of the format over the first axis."""
  if not x.shape[0]:
    return jnp.zeros(x.shape[1:], jnp.float32)
  if method == "pairwise":
    while (count := x.shape[0]) > 1:
      paired = rounded_sum(x[0 : count // 2 * 2 : 2], x[1::2], fmt)
      x = jnp.concatenate([paired, x[count // 2 * 2 :]])
    return x[0]
  return _sum_of_terms(lambda k: x[k], x.shape[0], fmt, method)


def _sum_of_terms(
  term: Callable[[Array | int], Array],
  count: int,
  fmt: FloatFormat,
  method: Literal["sequential", "kahan"],
) -> Array:
  """Adds ``term(0)`` to ``term(count - 1)``, numbers of the format, one by one."""
  first = term(0)
  if method == "sequential":
    return lax.fori_loop(1, count, lambda k, s: rounded_sum(s, term(k), fmt), first)
  step = lambda k, carry: kahan_step(carry[0], carry[1], term(k), fmt)
  return lax.fori_loop(1, count, step, (first, jnp.zeros_like(first)))[0]


def kahan_step(
  total: Array,
  compensation: Array,
  x: Array,
  fmt: FloatFormat,
  *,
  saturate: bool = False,
) -> tuple[Array, Array]:
  """Does a step of Kahan's algorithm: four operations, each rounded to the format."""
  plus = functools.partial(rounded_sum, fmt=fmt, saturate=saturate)
  y = plus(x, -compensation)
  new = plus(total, y)
  return new, jnp.where(jnp.isfinite(new), plus(plus(new, -total), -y), np.float32(0))


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
    through = functools.partial(round_to, fmt=fmt, straight_through=True)
    exact = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    product = with_derivative_of(lambda a, b: exact(through(a), through(b)), product)
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
      return _sum_rounded(products(part.T[:, :, None], b[:, None]), added_in, method)
    term = lambda k: products(part[:, k, None], b[k])
    return _sum_of_terms(term, depth, added_in, method)

  return lax.map(block, blocks.reshape(-1, size, depth)).reshape(-1, columns)[:rows]


def all_reduce(
  x: Array,
  fmt: FloatFormat,
  order: Order = "gathered",
  *,
  group_size: int | None = None,
  method: Method = "sequential",
) -> Array:
  """Adds the workers' arrays, as an all-reduce in a format would add them.

  Each array is rounded to the format, and so is each partial sum, to nearest even.

  ================  ====================================================================
  ``order``         the order of the additions
  ================  ====================================================================
  ``gathered``      everyone adds all workers' numbers, in the order of the workers
  ``ring``          the elements are cut into N shares, one for each worker. Share d
                    starts at worker d + 1, goes around, and ends at worker d
  ``hierarchical``  the workers of each group of consecutive ones are added first, in
                    their order, and then the groups' sums, in their order
  ================  ====================================================================

  Args:
    x: ``[N, ...]`` of real float dtype, the arrays of N workers.
    fmt: the format.
    order: the order, as in the table.
    group_size: workers in a group of ``hierarchical``, a divisor of N; else None.
    method: how a worker adds numbers, see :func:`gradcomp.floats.reduce_sum`.

  Returns:
    ``float32[...]``, numbers of the format.

  Raises:
    ValueError: ``order`` or ``method`` is unknown, ``x`` has no first axis, or
      ``group_size`` does not fit.
    TypeError: ``x`` is not real floating point.

  Example:
    >>> ones, fmt = jnp.ones((64, 1)), FloatFormat(5, 2)
    >>> all_reduce(ones, fmt), all_reduce(ones, fmt, "hierarchical", group_size=8)
    (Array([8.], dtype=float32), Array([64.], dtype=float32))

  References:
    Han et al., `APS <https://arxiv.org/abs/1911.08907>`_, 2021, sections 4.2 and 5.1
  """
  one_of("order", Order, order)
  x = check_float(x, "x")
  if not x.ndim or not x.shape[0]:
    raise ValueError(f"`x` must have a first axis of workers, got the shape {x.shape}.")
  workers, shape = x.shape[0], x.shape[1:]
  if order == "hierarchical":
    size = static_integer("group_size", _GROUP_RULE, group_size)
    if size < 1 or workers % size:
      raise ValueError(
        f"`group_size` must be {_GROUP_RULE}, got {size} of {workers} workers."
      )
    groups = x.reshape(workers // size, size, *shape)
    return reduce_sum(reduce_sum(groups, fmt, 1, method), fmt, 0, method)
  if group_size is not None:
    raise ValueError(
      f'`group_size` must be None unless order="hierarchical", got {group_size} with '
      f"{order!r}."
    )
  if order == "gathered":
    return reduce_sum(x, fmt, 0, method)
  flat = x.reshape(workers, -1)
  shares = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % workers)))
  shares = shares.reshape(workers, workers, -1)
  share = jnp.arange(workers)
  turns = (share + 1 + share[:, None]) % workers  # [hop, share]: the worker
  summed = reduce_sum(shares[turns, share], fmt, 0, method)
  return summed.reshape(-1)[: flat.shape[1]].reshape(shape)


def round_off_error(exact: Array, rounded: Array) -> Array:
  r"""Returns the mean relative error, :math:`\frac{1}{n} \sum |(h_i - l_i) / h_i|`.

  The mean is over the n elements with :math:`h_i \ne 0`. It is equation 5 of Han et
  al., section 4.2, cited at :func:`gradcomp.floats.all_reduce`.

  Args:
    exact: :math:`h`, an array of any shape.
    rounded: :math:`l`, an array of the same shape.

  Returns:
    The error, ``float32[]``; 0 if no element is left.

  Example:
    >>> round_off_error(jnp.array([1.0, 2.0, 0.0]), jnp.array([1.5, 2.0, 1.0]))
    Array(0.25, dtype=float32)
  """
  used = exact != 0
  error = jnp.abs((exact - rounded) / jnp.where(used, exact, 1.0))
  count = jnp.maximum(jnp.sum(used), 1).astype(jnp.float32)
  return jnp.sum(jnp.where(used, error, 0.0)).astype(jnp.float32) / count
