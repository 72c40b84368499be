"""All-reduces in a number format, emulated on one device, and the errors they make."""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from gradcomp._src.checks import one_of, static_integer
from gradcomp._src.floats.rounding import check_float
from gradcomp._src.floats.sums import Method, reduce_sum
from gradcomp._src.kernels.common.float_formats import FloatFormat

Order = Literal["gathered", "ring", "hierarchical"]

_GROUP_RULE = 'a divisor of the number of workers with order="hierarchical"'


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
