"""Rounding to a format, and conversion between numbers and their codes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.checks import one_of
from gradcomp._src.kernels.common import dithers, float_codes
from gradcomp._src.kernels.common.float_codes import FloatFormat


def to_code(
  x: Array,
  fmt: FloatFormat,
  rounding: float_codes.FloatRounding = "nearest_even",
  *,
  key: Array | None = None,
) -> Array:
  """Returns the codes of ``x`` rounded to a format.

  Args:
    x: an array of any shape and real float dtype.
    fmt: the format.
    rounding: the rule, as in :func:`round_to`.
    key: one threefry key, for stochastic rounding.

  Returns:
    ``uint32`` in the shape of ``x``, below ``2**fmt.bits``. Without a code for NaN,
    NaN's code is that of minus zero; with a single code for infinity and NaN, it is
    that code.

  Raises:
    ValueError: ``rounding`` is unknown, or ``key`` is missing where it is needed.
    TypeError: ``x`` is not real floating point.

  Example:
    >>> to_code(jnp.array([1.0, -1.75]), FloatFormat(3, 0)).tolist()
    [3, 12]
  """
  wide, draw = _checked(x, rounding, key)
  return _to_code(wide, fmt, rounding, draw)


def from_code(codes: Array, fmt: FloatFormat) -> Array:
  """Returns the numbers of codes, ``float32`` in the shape of ``codes``.

  Args:
    codes: integers from 0 to ``2**fmt.bits - 1``. Only the lowest bits of others count.
    fmt: the format.

  Raises:
    TypeError: ``codes`` are no integers.

  Example:
    >>> from_code(jnp.array([3, 12], jnp.uint32), FloatFormat(3, 0))
    Array([ 1., -2.], dtype=float32)
  """
  codes = jnp.asarray(codes)
  if not jnp.issubdtype(codes.dtype, jnp.integer):
    raise TypeError(f"`codes` must have an integer dtype, got {codes.dtype}.")
  return _from_code(codes, fmt)


@functools.partial(jax.jit, static_argnums=1)
def _from_code(codes: Array, fmt: FloatFormat) -> Array:
  codes = codes.astype(jnp.uint32) & jnp.uint32(2**fmt.bits - 1)
  return float_codes.from_codes(codes, fmt)


def round_to(
  x: Array,
  fmt: FloatFormat,
  rounding: float_codes.FloatRounding = "nearest_even",
  *,
  key: Array | None = None,
  straight_through: bool = False,
) -> Array:
  r"""Rounds each element to a number of a format.

  It rounds correctly, also to subnormal numbers and beyond the largest number:

  ================  ====================================================================
  ``rounding``      the result
  ================  ====================================================================
  ``nearest_even``  the nearest number; of two, the one with the even code. That is IEEE
                    754's rule, which without mantissa bits always takes the larger.
                    Numbers from the largest plus half a step on become infinity (only
                    numbers beyond that, if the code of the largest is even)
  ``stochastic``    one of the two neighbors :math:`l \le x \le u`: :math:`u` with
                    probability :math:`(x - l) / (u - l)`, a multiple of 2**-32, so that
                    the mean is :math:`x`. Unbiased up to the largest number
  ``toward_zero``   the neighbor nearer to zero, which is never infinity
  ================  ====================================================================

  Formats without infinity have NaN in its place, and without NaN the largest number.
  NaN stays NaN. Infinities stay the same if the format has them.

  Args:
    x: an array of any shape and real float dtype. It is converted to ``float32`` first.
    fmt: the format.
    rounding: the rule, as in the table.
    key: one threefry key, as ``jax.random.key`` makes, for stochastic rounding.
    straight_through: whether the derivative is 1, as of the identity; else it is zero.

  Returns:
    The numbers, in the dtype of ``x``.

  Raises:
    ValueError: ``rounding`` is unknown, or ``key`` is missing where it is needed.
    TypeError: ``x`` is not real floating point.

  Example:
    >>> round_to(jnp.array([1.1, 61440.0]), FloatFormat(5, 2))
    Array([ 1., inf], dtype=float32)

  References:
    Han et al., `APS <https://arxiv.org/abs/1911.08907>`_, 2021, section 5.1
  """
  wide, draw = _checked(x, rounding, key)
  # The random bits are an argument, because a differentiated function must not close
  # over tracers.
  plain: Callable[..., Array] = lambda wide, draw: _round(wide, fmt, rounding, draw)
  if straight_through:
    plain = with_derivative_of(lambda wide, draw: wide, plain)
  return plain(wide, draw).astype(jnp.asarray(x).dtype)


def with_derivative_of(
  surrogate: Callable[..., Array], function: Callable[..., Array]
) -> Callable[..., Array]:
  """Returns ``function`` with the derivative of ``surrogate``: straight-through."""
  wrapped = jax.custom_jvp(function)
  wrapped.defjvp(lambda x, dx: (function(*x), jax.jvp(surrogate, x, dx)[1]))
  return wrapped


def check_float(x: Array, name: str) -> Array:
  """Converts ``x`` to ``float32``; raises TypeError for others than real floats."""
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"`{name}` must have a real float dtype, got {x.dtype}.")
  return x.astype(jnp.float32)


def _checked(x: Array, rounding: str, key: Array | None) -> tuple[Array, Array | None]:
  """Returns ``x`` in float32, and the random bits that its rounding needs, or None."""
  wide = check_float(x, "x")
  one_of("rounding", float_codes.FloatRounding, rounding)
  if rounding != "stochastic":
    return wide, None
  if key is None:
    raise ValueError(
      "`key` must be given for stochastic rounding; pass jax.random.key(seed), or "
      'choose rounding="nearest_even".'
    )
  key = jax.random.wrap_key_data(dithers.key_words(key), impl="threefry2x32")
  return wide, jax.random.bits(key, wide.shape, jnp.uint32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _to_code(
  x: Array, fmt: FloatFormat, rounding: float_codes.FloatRounding, draw: Array | None
) -> Array:
  return float_codes.to_codes(x, fmt, rounding=rounding if draw is None else draw)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _round(
  x: Array, fmt: FloatFormat, rounding: float_codes.FloatRounding, draw: Array | None
) -> Array:
  return rounded(x, fmt, rounding=rounding if draw is None else draw)


def rounded(x: Array, fmt: FloatFormat, **options: Any) -> Array:
  """Rounds by way of codes, and keeps NaN, which not every format has."""
  codes = float_codes.to_codes(x, fmt, **options)
  return jnp.where(jnp.isnan(x), x, float_codes.from_codes(codes, fmt))
