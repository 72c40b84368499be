"""Layouts of kernels hold each element once, and small and large blocks lower."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.kernels.gpu.tiles import blocks, layout
from gradcomp.codecs import QSGD, BlockTop, OneBit
from tests.plugins.slow_cases import slow
from tests.support.lowering import KERNEL, lowered_for_cuda

KEY = np.array([123, 456], np.uint32)

# Planes of buckets, of blocks of elements, and of halves of lanes; and single rows.
SHAPES = [
  *[((2048 // bucket, bucket), 4) for bucket in (32, 64, 512, 2048)],
  *[((1, 64), 4), ((4, 512), 1), ((128, 8), 2), ((16, 32), 4)],
  *[((1, 32, 64), 4), ((4, 32, 16), 4)],
  *[((32, 2, 2), 1), ((4, 2, 2, 2, 2, 2), 1), ((1, 2, 2), 1)],
]


def threads(shape, vector):
  """The elements of each thread: ``int[4, 32, registers, vector]``."""
  where = layout(shape, vector).to_mgpu()
  array = np.arange(math.prod(shape)).reshape(shape)
  for tile in where.tiling.tiles:
    lead = array.ndim - len(tile)
    parts = zip(array.shape[lead:], tile, strict=True)
    cut = [size for pair in ((n // t, t) for n, t in parts) for size in pair]
    outer = [lead + 2 * i for i in range(len(tile))]
    order = [*range(lead), *outer, *[axis + 1 for axis in outer]]
    array = array.reshape(*array.shape[:lead], *cut).transpose(order)
  groups = []
  for dims in (where.warp_dims, where.lane_dims):
    groups += [d for d in dims if isinstance(d, int)]
    # Threads that hold the same are a new axis.
    for d in dims:
      if not isinstance(d, int):
        array = np.repeat(array[None], d.times, axis=0)
        groups.append(-array.ndim)
  # New axes are in front, so that others keep their numbers from the end.
  own = np.moveaxis(array, groups, range(len(groups)))
  return own.reshape(4, 32, -1, vector)


@pytest.mark.parametrize("shape, vector", SHAPES)
def test_a_layout_holds_each_element_once_and_neighbors_together(shape, vector):
  found = threads(shape, vector)
  assert (np.diff(found, axis=-1) == 1).all()
  assert (found[..., 0] % vector == 0).all()  # as loads of several words need it
  each = found.reshape(128, -1)
  assert all(len(set(own)) == own.size for own in each)
  copies = np.bincount(each.reshape(-1), minlength=math.prod(shape))
  assert copies.min() == copies.max()
  if math.prod(shape) >= 128 * vector:
    assert copies.max() == 1
  like, bucket = layout(shape, vector).to_mgpu(), math.prod(shape[1:])
  if shape[0] * bucket >= 2048 and bucket <= 512:  # no reduction leaves its warp
    rows = found // bucket
    warps = [set(rows[warp].reshape(-1).tolist()) for warp in range(4)]
    assert len(set.union(*warps)) == sum(map(len, warps)) == shape[0]
  # Reductions over last axes have the layout of their shape.
  for rank in range(len(shape) - 1, 0, -1):
    like = like.reduce((rank,))
    assert like == layout(shape[:rank]).to_mgpu()


def test_blocks_are_powers_of_two_and_leave_less_than_one():
  for most, tiles in itertools.product((0, 1, 4, 64), range(1, 200)):
    rows, whole = blocks(tiles, most)
    assert rows.bit_count() == 1 and rows <= max(most, 1)
    assert whole % rows == 0 and tiles - rows < whole <= tiles


@pytest.mark.parametrize(
  "codec, tiles",
  [(OneBit(bucket_size=64), 1), *slow((OneBit(bucket_size=32), 3))]
  + slow((QSGD(bits=4, bucket_size=2048), 1), (BlockTop(block_size=64), 5)),
  ids=str,
)
def test_small_and_large_blocks_lower_for_cuda(codec, tiles):
  x = jax.ShapeDtypeStruct((tiles * codec.tile_size + 5,), jnp.float32)
  text = lowered_for_cuda(lambda x: codec.encode(x, key=KEY).rows, x)
  assert text.count(KERNEL) == 1
