"""Decodes words of several codes in one pass, by a Pallas kernel for TPUs."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.quantize import reference
from gradcomp._src.kernels.tpu import lines
from gradcomp._src.kernels.tpu.lines import LANES, ROWS


# XLA takes a pass to cut the words out of the rows, and writes few planes in parts of
# registers. A table of 128 numbers is a row of a register, out of which one operation
# picks a number for each lane; XLA's gather reads indices from memory, one by one.
@lines.decoder(reference.decode_rows)
def decode_rows(
  rows: Array, *, form: reference.ScaledForm, interpret: Any = False
) -> Array:
  """Decodes as :func:`reference.decode_rows` does, to the same bits."""
  count, words = rows.shape
  bits, size, planes = form.bits, form.bucket_size, form.planes
  fine = planes * size <= lines.LARGEST_UNROLLED and not size % LANES
  # Pairs of planes XLA joins as well.
  if not (form.inline and fine and count >= ROWS and planes > 2):
    return reference.decode_rows(rows, form)
  columns = words - size - form.shared  # a scale a row, or a bucket
  block = lines.rows_of_block(count, planes * size)

  def kernel(row_ref: Any, *refs: Any) -> None:
    *tables, out_ref = refs
    levels = [jnp.broadcast_to(ref[...], (ROWS, LANES)) for ref in tables]

    def of_rows(row: Any) -> None:
      numbers = lax.bitcast_convert_type(row_ref[row, size:], np.float32)
      number = [numbers[:, i : i + 1] for i in range(columns + form.shared)]
      for start in range(0, size, LANES):
        lanes = slice(start, start + LANES)
        word = lax.bitcast_convert_type(row_ref[row, lanes], np.int32)
        for k in range(planes):
          code = lax.shift_right_logical(word, np.int32(k * bits)) & (2**bits - 1)
          given = [number[k % columns], *number[columns:]]
          for level in levels:
            given.append(jnp.take_along_axis(level, code & (LANES - 1), axis=1))
          out_ref[row, k, lanes] = form.value(code.astype(jnp.uint32), *given)

    lines.by_registers(block, of_rows)

  inputs = [(rows, block)]
  if form.table:
    inputs.append((jnp.array(form.table, jnp.float32)[None], 0))
  out = [((count, planes, size), block, np.float32)]
  (found,) = lines.run(kernel, inputs, out, "decode", interpret)
  return found
