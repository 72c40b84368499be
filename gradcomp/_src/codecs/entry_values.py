"""Values of sparse entries: one for each entry, or a mean for many."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gradcomp._src.kernels.common import sparse
from gradcomp._src.kernels.common.scales import sum_by_halves

Quantize = Literal["asq", "mean"]


def value_words(quantize: Quantize | None, dtype: DTypeLike, slots: int) -> int:
  """Returns the number of words that hold the values of ``slots`` entries."""
  if quantize is not None:
    return 1 if quantize == "asq" else 2
  return slots if np.dtype(dtype).itemsize == 4 else sparse.half_words(slots)


def encode_values(
  values: jax.Array, used: jax.Array, quantize: Quantize | None, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
  """Packs a row's values into words, and returns these and the decoded values.

  Values are ``float32[slots]``, 0 in slots that are not used. ``quantize`` is ``"asq"``
  for one mean, ``"mean"`` for one of each sign, or None. Values that are no means are
  cast to ``dtype``; a finite one never becomes infinite.
  """
  if quantize is None and np.dtype(dtype).itemsize == 4:
    return _float_words(values), values
  if quantize is None:
    most = float(jnp.finfo(dtype).max)
    cut = jnp.where(jnp.isfinite(values), jnp.clip(values, -most, most), values)
    narrow = cut.astype(dtype)
    return _float_words(narrow), narrow.astype(jnp.float32)
  if quantize == "asq":
    mean = _mean(values, used)
    return _float_words(mean[None]), jnp.where(used, mean, 0.0)
  negative = is_negative(values)
  means = [
    _mean(jnp.where(own, values, 0.0), own & used) for own in (~negative, negative)
  ]
  sent = jnp.where(negative, means[1], means[0])
  return _float_words(jnp.stack(means)), jnp.where(used, sent, 0.0)


def decode_values(
  words: jax.Array, negative: jax.Array, quantize: Quantize | None, dtype: DTypeLike
) -> jax.Array:
  """Unpacks a row's values: ``float32[slots]``, undefined in unused slots.

  ``negative`` chooses among the means of both signs: ``bool[slots]``.
  """
  slots = negative.size
  if quantize is None and np.dtype(dtype).itemsize == 2:
    narrow = sparse.unpack_halves(words, slots).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(narrow, dtype).astype(jnp.float32)
  floats = jax.lax.bitcast_convert_type(words, jnp.float32)
  if quantize == "asq":
    return jnp.broadcast_to(floats, (slots,))
  return floats if quantize is None else jnp.where(negative, floats[1], floats[0])


def is_negative(values: jax.Array) -> jax.Array:
  """Returns True where the sign bit is set, also of zeros and NaN."""
  return jax.lax.bitcast_convert_type(values, jnp.uint32) >> 31 == 1


def _mean(values: jax.Array, used: jax.Array) -> jax.Array:
  """Returns the mean of the used values, added in one order in every mode."""
  count = jnp.maximum(used.sum(dtype=jnp.int32), 1).astype(jnp.float32)
  # A power of two first, so that no sum overflows. No compiler changes such products,
  # because they are exact.
  scale = 2.0 ** -values.size.bit_length()
  return sum_by_halves(values * np.float32(scale)) / count * np.float32(1 / scale)


def _float_words(values: jax.Array) -> jax.Array:
  if values.dtype == jnp.float32:
    return jax.lax.bitcast_convert_type(values, jnp.uint32)
  narrow = jax.lax.bitcast_convert_type(values, jnp.uint16)
  return sparse.pack_halves(narrow.astype(jnp.uint32))
