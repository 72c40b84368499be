"""Conversion of addends of a sum, which may be too small for a codec, to samples."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from gradcomp._src.codecs import sums
from gradcomp._src.exchange.collectives import Workers
from gradcomp._src.exchange.contribution import Leaves
from gradcomp._src.exchange.layout import Layout
from gradcomp._src.kernels.common.fixed_point import scaled


class Samples(NamedTuple):
  """Leaves to encode, the workers that average them, and the way back to addends."""

  leaves: Leaves
  workers: Workers | None
  back: Callable[[Leaves], Leaves]


def as_samples(layout: Layout, leaves: Leaves, workers: Workers | None) -> Samples:
  """Multiplies addends of a sum by N, which makes the sum their mean; others stay.

  Leaves that are added without encoding stay addends.
  """
  # An addend is an Nth of a worker's gradient, and may underflow in a type that holds
  # the gradient. With N a power of two the products are exact, so that plain jax.jit
  # has the bits of maps.
  plain = all(sums.of(codec).plain for codec in layout.codecs)
  if workers is None or workers.scale != 1 or plain:
    return Samples(leaves, workers, lambda leaves: leaves)
  count = workers.size
  return Samples(
    _times(leaves, count),
    workers._replace(scale=1 / count),
    lambda leaves: _times(leaves, 1 / count),
  )


def _times(leaves: Leaves, factor: float) -> Leaves:
  # Else a compiler contracts this product with a sum, and in maps another one.
  narrow = lambda x: x.dtype == jnp.float32
  return [scaled(x, factor) if narrow(x) else x * factor for x in leaves]
