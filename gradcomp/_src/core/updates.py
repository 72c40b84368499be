"""Casts of means to the dtypes of updates, which may be narrower than float32."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradcomp._src.exchange.messages import Exchanged
from gradcomp._src.floats.dtypes import addend_dtype, narrowed
from gradcomp._src.kernels.common.fixed_point import scaled


def update_dtypes(updates: Any, params: Any) -> list[np.dtype]:
  """Returns the dtype of each leaf's update: its gradient's, or its parameter's.

  It is the parameter's where gradients are addends of a sum, and wider, because the
  parameter's dtype does not hold 1/N of a gradient.

  Args:
    updates: the gradients.
    params: the parameters; None if they are not known, or gradients are no addends.

  Example:
    >>> update_dtypes(jnp.ones(2), jnp.ones(2, jnp.float16))
    [dtype('float16')]
  """

  def of(gradient: jax.Array, param: Any) -> np.dtype:
    narrow = jnp.result_type(param)
    return narrow if gradient.dtype == addend_dtype(narrow) else gradient.dtype

  if params is None:
    return [gradient.dtype for gradient in jax.tree.leaves(updates)]
  return jax.tree.leaves(jax.tree.map(of, updates, params))


def as_updates(
  exchanged: Exchanged, dtypes: Sequence[np.dtype], *, keeps: bool, share: float
) -> tuple[list[jax.Array], Exchanged]:
  """Casts the means, and adds the rounding errors of the cast to the unsent parts.

  Every worker keeps the same error, so the mean of all is the error of the mean.

  Args:
    exchanged: the result of an exchange.
    dtypes: the dtypes of :func:`update_dtypes`.
    keeps: whether workers keep residuals. Else a mean that is too large becomes
      infinite.
    share: the part of each error that a worker keeps: 1, or 1/N of a sum.
  """
  if not keeps:
    casts = zip(exchanged.mean, dtypes, strict=True)
    return [mean.astype(dtype) for mean, dtype in casts], exchanged
  means: list[jax.Array] = []
  unsent: list[jax.Array] = []
  for mean, rest, dtype in zip(exchanged.mean, exchanged.unsent, dtypes, strict=True):
    if jnp.finfo(dtype).bits < jnp.finfo(mean.dtype).bits:
      mean, lost = narrowed(mean, dtype)
      rest = rest + scaled(lost, share).reshape(rest.shape)
    means.append(mean.astype(dtype))
    unsent.append(rest)
  return means, exchanged._replace(unsent=unsent)
