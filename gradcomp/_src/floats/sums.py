"""Sums in a format: every partial sum is rounded to it."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gradcomp._src.checks import one_of
from gradcomp._src.floats.arithmetic import rounded_sum
from gradcomp._src.floats.rounding import check_float, round_to
from gradcomp._src.kernels.common.float_formats import FloatFormat

Method = Literal["sequential", "pairwise", "kahan"]


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
  return sum_rounded(round_to(x, fmt), fmt, method)


def sum_rounded(x: Array, fmt: FloatFormat, method: Method) -> Array:
  """Adds numbers of the format over the first axis."""
  if not x.shape[0]:
    return jnp.zeros(x.shape[1:], jnp.float32)
  if method == "pairwise":
    while (count := x.shape[0]) > 1:
      paired = rounded_sum(x[0 : count // 2 * 2 : 2], x[1::2], fmt)
      x = jnp.concatenate([paired, x[count // 2 * 2 :]])
    return x[0]
  return sum_of_terms(lambda k: x[k], x.shape[0], fmt, method)


def sum_of_terms(
  term: Callable[[Array | int], Array],
  count: int,
  fmt: FloatFormat,
  method: Literal["sequential", "kahan"],
) -> Array:
  """Adds ``term(0)`` to ``term(count - 1)``, numbers of the format, one by one."""
  first = term(0)
  if method == "sequential":
    return jax.lax.fori_loop(1, count, lambda k, s: rounded_sum(s, term(k), fmt), first)
  step = lambda k, carry: kahan_step(carry[0], carry[1], term(k), fmt)
  return jax.lax.fori_loop(1, count, step, (first, jnp.zeros_like(first)))[0]


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
