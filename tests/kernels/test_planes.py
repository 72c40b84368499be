"""Packing loses no bit, of any width and size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.kernels.common import planes
from gradcomp.kernels import pack_planes, unpack_planes
from tests.plugins.slow_cases import slow
from tests.specs import planes as spec


# Each width has others of the sizes up to 200, and the ends of tiles.
@pytest.mark.parametrize("step", [8, *slow(1)])
@pytest.mark.parametrize("bits", [1, 3, 16, *slow(2, 4, 5, 6, 7, 8)])
def test_every_size_round_trips_through_packing(bits, step):
  bucket_size = 8  # so that 200 elements are up to 12 tiles and a part of one
  count = planes.planes_per_word(bits)
  rng = np.random.default_rng(bits)
  edges = [k * bucket_size * count + d for k in range(3) for d in (0, 1, -1)]
  sizes = sorted({*range(bits % step, 201, step), *(e for e in edges if 0 <= e <= 200)})
  leaves = [rng.integers(0, 2**bits, size, dtype=np.uint32) for size in sizes]

  @jax.jit
  def both_ways(leaves):
    words = []
    for leaf in leaves:
      segments = planes.tile_segments(leaf, count, bucket_size)
      packed = [pack_planes(segment.planes, bits) for segment in segments]
      words.append(jnp.concatenate([jnp.zeros((0, bucket_size), jnp.uint32), *packed]))
    return words, [unpack_planes(word, bits) for word in words]

  for leaf, word, codes in zip(leaves, *both_ways(leaves), strict=True):
    np.testing.assert_array_equal(word, spec.pack(leaf, bits, bucket_size))
    codes = np.asarray(codes).reshape(-1)
    np.testing.assert_array_equal(codes[: leaf.size], leaf)
    assert not codes[leaf.size :].any()
