"""Programs for TPUs keep 128 lanes in a row of their large arrays, and have our bits.

A TPU keeps an array in tiles of 8 rows by 128 columns, and fills what is missing. So
rows of 4 elements take 32 times their bytes, and 32 times as long.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp.codecs import (
  QSGD,
  BlockFloat,
  BlockTop,
  Dense,
  EightBit,
  FloatCast,
  Natural,
  OneBit,
  RandomK,
  Ternary,
  TopK,
)
from tests.plugins.slow_cases import slow
from tests.support import for_tpus, laws

SHAPE = (1024, 1024)
OURS = [
  QSGD(),
  *slow(QSGD(bits=3), QSGD(bits=8, bucket_size=None), QSGD(levels="nonuniform")),
  *slow(QSGD(share_scale=True, rounding="nearest"), QSGD(bits=16, levels="uniform")),
  *slow(Natural(), FloatCast(), FloatCast(scale=8.0), Dense()),
  *slow(Dense(dtype=jnp.bfloat16, rounding="stochastic"), QSGD(norm="l2")),
  *slow(RandomK(density=0.01)),
  *slow(QSGD(bits=2, rotate=32, norm="rms", levels="uniform")),
]
# No CPU runs their programs: tests/kernels has them.
WITH_KERNELS = [Ternary(), EightBit(bucket_size=512), *slow(BlockFloat())]
NARROW = [
  pytest.param(codec, marks=pytest.mark.xfail(strict=True, reason="narrow rows"))
  for codec in (OneBit(), BlockTop(), TopK(density=0.01))
]


def both_ways(codec, like):
  """The codec's encoder, with a key if it needs one, and its decoder."""
  key = jax.random.key(1) if codec.needs_key else None
  decode = functools.partial(codec.decode, like=like)
  return functools.partial(codec.encode, key=key), decode


@pytest.mark.parametrize("codec", [*OURS, *WITH_KERNELS, *NARROW], ids=str)
def test_large_arrays_have_whole_lanes(codec):
  x = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
  encode, decode = both_ways(codec, x)
  payload = jax.eval_shape(encode, x)
  for function, given in ((encode, x), (decode, payload)):
    assert not for_tpus.narrow(for_tpus.lowered(function, given), 4 * x.size // 8)


@pytest.mark.bits
# With eight rows or more, kernels decode, which no CPU runs: tests/kernels has them.
@pytest.mark.parametrize("size", [7 * 2048, *slow(5000, 12288 + 77)])
@pytest.mark.parametrize("codec", OURS, ids=str)
def test_a_program_for_tpus_has_the_same_bits(codec, size):
  x = laws.gaussian(size) ** 3
  x[7], x[4000] = np.inf, np.nan
  encode, decode = both_ways(codec, x)
  payload = jax.jit(encode)(x)
  found = for_tpus.lowered(encode, x).call(x)
  jax.tree.map(np.testing.assert_array_equal, found, payload)
  found = for_tpus.lowered(decode, payload).call(payload)
  np.testing.assert_array_equal(found, jax.jit(decode)(payload))
