"""Rotates tiles by a Pallas kernel for TPUs, in one pass over them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gradcomp._src.kernels.tpu import lines
from gradcomp._src.kernels.tpu.lines import LANES, ROWS


def fits(rows: int, tile: int, group_line: int) -> bool:
  """Returns whether the kernel takes tiles with this number of groups a line."""
  return rows >= ROWS and tile <= lines.LARGEST_UNROLLED and group_line % LANES == 0


def transform(
  tiles: Array,
  *,
  size: int,
  group_line: int,
  signs: np.ndarray,
  forward: bool,
  interpret: Any = False,
) -> Array:
  """Rotates tiles, ``float32[rows, tile]``, or rotates them back, as the reference."""
  # XLA writes the array anew for each of the sums of two. Here a group lies in
  # registers: element i of `group_line` groups is a line of a tile, and lines `size *
  # k` to `size * k + size` are groups. `signs` has the sign bit of each element.
  rows, tile = tiles.shape
  block = lines.rows_of_block(rows, tile)
  groups = range(0, tile, size * group_line)
  firsts = [group + lane for group in groups for lane in range(0, group_line, LANES)]

  def kernel(x_ref: Any, sign_ref: Any, out_ref: Any) -> None:
    def of_rows(row: Any) -> None:
      for first in firsts:  # of 128 groups
        starts = range(first, first + size * group_line, group_line)
        lanes = [slice(start, start + LANES) for start in starts]
        parts = [x_ref[row, lane] for lane in lanes]
        signs = [sign_ref[:, lane] for lane in lanes]
        if forward:
          parts = [part * np.float32(1 / size) for part in parts]
          parts = _butterfly(list(map(_signed, parts, signs)))
        else:
          parts = list(map(_signed, _butterfly(parts), signs))
        for lane, part in zip(lanes, parts, strict=True):
          out_ref[row, lane] = part

    lines.by_registers(block, of_rows)

  inputs = [(tiles, block), (jnp.asarray(signs.view(np.int32))[None], 0)]
  out = [(tiles.shape, block, np.float32)]
  name = "rotate" if forward else "unrotate"
  (found,) = lines.run(kernel, -(-rows // block), inputs, out, name, interpret)
  return found


def _butterfly(parts: list[Array]) -> list[Array]:
  """Adds and subtracts halves, then the halves of these, and so on."""
  numbers = range(len(parts))
  for k in reversed(range(len(parts).bit_length() - 1)):
    other = [parts[i ^ 1 << k] for i in numbers]
    parts = [
      other[i] - parts[i] if i >> k & 1 else parts[i] + other[i] for i in numbers
    ]
  return parts


def _signed(x: Array, sign: Array) -> Array:
  """Changes the sign of an element where the bit is set."""
  bits = lax.bitcast_convert_type(x, np.int32) ^ sign
  return lax.bitcast_convert_type(bits, np.float32)
