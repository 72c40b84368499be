"""Decodes words of four codes by a table of 128 numbers, in a Pallas kernel for TPUs.

A table of 128 is a register's row, out of which one operation picks a number for each
lane. XLA's gather would write all indices to memory, and read them one after the other.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.gpu.tiles import typed
from gradcomp._src.kernels.tpu.lines import LANES

_BITS = 8
_CODES = 4  # in a word
_ROWS = 8  # of a register
_BLOCK = 64  # rows of a block, at most
_LARGEST_BUCKET = 1 << 13  # elements: so that a block is at most 8 MiB

# From codes below 256, the table's numbers of their lowest 7 bits, and scales.
Value = Callable[[Array, Array, Array], Array]


def fits(rows: int, bucket_size: int) -> bool:
  """Returns whether the kernel decodes so many rows of such buckets."""
  return rows >= _ROWS and not bucket_size % LANES and bucket_size <= _LARGEST_BUCKET


def decode(
  value: Value, rows: Array, table: np.ndarray, bucket_size: int, interpret: Any = False
) -> Array:
  """Decodes ``uint32[rows, B + scales]`` to ``float32[rows, 4, B]``."""
  from jax.experimental import pallas as pl

  count, words = rows.shape
  columns = words - bucket_size  # a scale a row, or a bucket
  block = min(_BLOCK, count // _ROWS * _ROWS)

  def kernel(row_ref: Any, table_ref: Any, out_ref: Any) -> None:
    levels = jnp.broadcast_to(table_ref[...], (_ROWS, LANES))

    def some(number: Any, carry: None) -> None:
      row = pl.ds(pl.multiple_of(number * _ROWS, _ROWS), _ROWS)
      scales = lax.bitcast_convert_type(row_ref[row, bucket_size:], np.float32)
      for start in range(0, bucket_size, LANES):
        lanes = slice(start, start + LANES)
        word = lax.bitcast_convert_type(row_ref[row, lanes], np.int32)
        for k in range(_CODES):
          code = lax.shift_right_logical(word, np.int32(k * _BITS)) & (2**_BITS - 1)
          level = jnp.take_along_axis(levels, code & (LANES - 1), axis=1)
          own = k % columns
          out_ref[row, k, lanes] = value(code, level, scales[:, own : own + 1])
      return carry

    lax.fori_loop(0, block // _ROWS, some, None)

  return pl.pallas_call(
    kernel,
    grid=(-(-count // block),),
    in_specs=[
      pl.BlockSpec((block, words), lambda number: (number, 0)),
      pl.BlockSpec((1, LANES), lambda number: (0, 0)),
    ],
    out_specs=pl.BlockSpec((block, _CODES, bucket_size), lambda number: (number, 0, 0)),
    out_shape=typed(rows, (count, _CODES, bucket_size), np.float32),
    interpret=interpret,
    name="lookup",
  )(rows, jnp.asarray(table)[None])
