"""Dense: a cast, and its stochastic rounding by a table of all numbers."""

import ml_dtypes
import numpy as np

from tests.specs import dithers, planes

_BITS = {np.dtype(x): 16 for x in (np.float16, ml_dtypes.bfloat16)}
_BITS[np.dtype(np.float32)] = 32


def encode(x, *, dtype, key=None):
  """The rows of a leaf, uint32[tiles, 128]; without a key rounded to nearest even."""
  dtype = np.dtype(dtype)
  bits, leaf = _BITS[dtype], planes.as_leaf(x)
  if key is None:
    with np.errstate(over="ignore"):
      values = leaf.astype(dtype)
  else:
    values = stochastic(leaf, dtype, dithers.of_leaf(key, leaf, bits=16))
  return planes.pack(values.view(f"uint{bits}"), bits, planes.ROW_WORDS)


def stochastic(x, dtype, draws):
  """Each number as one of its two neighbors of 16 bits: a table of all is searched."""
  with np.errstate(over="ignore"):
    cast = x.astype(dtype)
  infinity = np.array(np.inf, dtype).view(np.uint16)
  table = np.arange(infinity, dtype=np.uint16).view(dtype).astype(np.float64)
  size = np.where(np.isfinite(cast), np.abs(x), 0).astype(np.float64)
  code = dithers.one_of_two(np.minimum(size, table[-1]), table, draws)
  rounded = code.astype(np.uint16).view(dtype)
  return np.where(np.isfinite(cast), np.copysign(rounded, cast), cast)


def decode(rows, size, *, dtype):
  """The values of a payload as float32[size]; the widening loses nothing."""
  dtype = np.dtype(dtype)
  bits = _BITS[dtype]
  rows = planes.checked_rows(rows, size, 32 // bits, planes.ROW_WORDS)
  codes = planes.unpack(rows, bits)
  planes.refuse_filler(codes[size:])
  return codes[:size].astype(f"uint{bits}").view(dtype).astype(np.float32)
