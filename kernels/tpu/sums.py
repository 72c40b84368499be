"""Sums of a leaf by a Pallas kernel for TPUs, in the order of the reference."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gradcomp._src.kernels.common import planes
from gradcomp._src.kernels.common.fixed_point import held
from gradcomp._src.kernels.tpu import lines

_STEPS, _LANES = 16, 8  # 16 additions of 8 lanes
_GROUP = _STEPS * lines.LANES
# Elements of a line. Norms and the encoder view the leaf as lines of 512, too: another
# view would be another copy of it in memory.
_WIDTH = 512


def of_groups(
  x: Array, first: Array, down: Array, *, interpret: Any = False
) -> list[Array]:
  """Returns sums as ``scales.sums_of_groups`` does, to the same bits."""

  def body(x: Array, first: Array, down: Array) -> tuple[Array, ...]:
    d = (x.T - first) * down
    return tuple(map(_summed, (d, held(d * d))))

  words = (_LANES,) * 2
  launch = lines.Launch("sums_of_groups", _GROUP, _WIDTH, words, interpret=interpret)
  found = lines.encode(body, x, launch, (first, down))
  return [planes.floats(part).reshape(-1) for part in found]


def _summed(x: Array) -> Array:
  """Sums the blocks of ``float32[512, lines]``, and then each 16 of their sums."""
  blocks = []  # the first of each line, the second and so on
  for start in range(0, _WIDTH, lines.LANES):
    total = x[start : start + _LANES]
    for at in range(start + _LANES, start + lines.LANES, _LANES):
      total = total + x[at : at + _LANES]
    blocks.append(total.T.reshape(-1, _GROUP // _WIDTH, _LANES))
  steps = [block[:, line] for line in range(_GROUP // _WIDTH) for block in blocks]
  return jax.lax.bitcast_convert_type(functools.reduce(jnp.add, steps), jnp.int32)
