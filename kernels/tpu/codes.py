"""Decodes words of several codes in one pass, by a Pallas kernel for TPUs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.common.planes import planes_per_word
from gradcomp._src.kernels.tpu import lines
from gradcomp._src.kernels.tpu.lines import LANES, ROWS

# XLA takes a pass to cut the words out of the rows, and writes few planes in parts of
# registers. A table of 128 numbers is a row of a register, out of which one operation
# picks a number for each lane; XLA's gather reads indices from memory, one by one.
# Takes codes, `int32`, their scales, the shared numbers after these, and, with a table,
# the numbers of the lowest 7 bits.
Value = Callable[..., Array]


class Row(NamedTuple):
  """The parts of a row: words of codes, scales, and numbers that all codes share."""

  bits: int  # of a code
  bucket_size: int  # words
  shared: int = 0  # numbers after the scales

  def fits(self, rows: int) -> bool:
    """Returns whether the kernel decodes this number of rows."""
    planes = planes_per_word(self.bits)
    fine = planes * self.bucket_size <= lines.LARGEST_UNROLLED
    fine &= not self.bucket_size % LANES
    return rows >= ROWS and planes > 2 and fine  # pairs of planes XLA joins as well


def decode(
  value: Value,
  rows: Array,
  form: Row,
  table: np.ndarray | None = None,
  interpret: Any = False,
) -> Array:
  """Decodes ``uint32[rows, B + scales + shared]`` to ``float32[rows, P, B]``."""
  (count, words), (bits, bucket_size, shared) = rows.shape, form
  columns = words - bucket_size - shared  # a scale a row, or a bucket
  planes = planes_per_word(bits)
  block = lines.rows_of_block(count, planes * bucket_size)

  def kernel(row_ref: Any, *refs: Any) -> None:
    *tables, out_ref = refs
    levels = [jnp.broadcast_to(ref[...], (ROWS, LANES)) for ref in tables]

    def of_rows(row: Any) -> None:
      numbers = lax.bitcast_convert_type(row_ref[row, bucket_size:], np.float32)
      number = [numbers[:, i : i + 1] for i in range(columns + shared)]
      for start in range(0, bucket_size, LANES):
        lanes = slice(start, start + LANES)
        word = lax.bitcast_convert_type(row_ref[row, lanes], np.int32)
        for k in range(planes):
          code = lax.shift_right_logical(word, np.int32(k * bits)) & (2**bits - 1)
          own = k % columns
          given = [code, number[own], *number[columns:]]
          for level in levels:
            given.append(jnp.take_along_axis(level, code & (LANES - 1), axis=1))
          out_ref[row, k, lanes] = value(*given)

    lines.by_registers(block, of_rows)

  inputs = [(rows, block)]
  if table is not None:
    inputs.append((jnp.asarray(table)[None], 0))
  out = [((count, planes, bucket_size), block, np.float32)]
  (found,) = lines.run(kernel, -(-count // block), inputs, out, "decode", interpret)
  return found
