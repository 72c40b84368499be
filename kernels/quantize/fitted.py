"""Decodes fitted levels, on TPUs by a kernel."""

from typing import Any

from jax import Array

from gradcomp._src.kernels.common import fitted_levels
from gradcomp._src.kernels.gpu import dispatch
from gradcomp._src.kernels.tpu import codes as tpu


def decode_by_kernel(
  rows: Array, *, bits: int, bucket_size: int, interpret: Any = False
) -> Array:
  """Decodes as :func:`fitted_levels.decode_rows` does, by a kernel for TPUs."""
  flat = rows.reshape(-1, rows.shape[-1])
  row = tpu.Row(bits, bucket_size, shared=2 ** (bits - 1))
  if not row.fits(len(flat)):
    return fitted_levels.decode_rows(rows, bits=bits, bucket_size=bucket_size)
  found = tpu.decode(fitted_levels.value, flat, row, interpret=interpret)
  return found.reshape(*rows.shape[:-1], *found.shape[1:])


# For one payload, as for equal levels.
decode_one = dispatch.on_tpu(decode_by_kernel, mosaic=True)(fitted_levels.decode_rows)
