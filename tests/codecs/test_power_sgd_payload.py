"""Payloads of PowerSGD are what the page says, and matrices are cut as it says."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp.codecs import QSGD, Dense, Leaf, PowerSGD
from tests.specs import power_sgd
from tests.support.assertions import assert_same_bits
from tests.support.low_rank import bound, error, gaussian, of_rank, together

QUANTIZED = PowerSGD(rank=2, bits=8)


@functools.partial(jax.jit, static_argnums=0)
def coded(codec, x):
  """The rows of a leaf's payload, and what it decodes to."""
  payload = codec.encode(x)
  return payload.rows, codec.decode(payload, like=x)


@pytest.mark.parametrize(
  "shape, matrix",
  [
    ((64, 64), (64, 64)),
    ((3, 3, 64, 128), (576, 128)),
    ((128, 64, 3, 3), (128, 576)),
    ((12, 64, 64), (768, 64)),
    ((16, 17), (16, 17)),  # of 272 elements 264 would pay
    ((16, 16), None),  # of 256 elements 256 would not
    ((1000,), None),
    ((1000, 1), None),
    ((), None),
    ((0, 64), None),
  ],
)
def test_a_matrix_is_the_squarest_cut_or_dense(shape, matrix):
  codec = PowerSGD(rank=4).bind(Leaf(shape))
  if matrix is None:
    assert codec == Dense()
  else:
    assert codec == PowerSGD(rank=4, matrix=matrix)
    m, n = matrix
    assert [wanted.shape for wanted in codec.rounds(shape)] == [(4, m), (4, n)]


@pytest.mark.parametrize("codec", [PowerSGD(rank=2), QUANTIZED], ids=["f32", "8bit"])
@pytest.mark.parametrize("shape", [(30, 41), (300, 1200), (3, 3, 8, 24), (7,), ()])
def test_the_page_reads_the_payload(codec, shape):
  """A payload is what both rounds send, and no more."""
  x = gaussian(*shape)
  own = codec.bind(Leaf(shape))
  rows, value = jax.device_get(coded(codec, x))
  if own == Dense():
    assert_same_bits((rows, value), jax.device_get(coded(own, x)))
    return
  tiles = [-(-np.prod(r.shape) // r.codec.tile_size) for r in own.rounds(shape)]
  chex.assert_shape(rows, (sum(tiles), own.inner.row_words))
  read = power_sgd.decode(rows, shape, rank=2, bits=codec.bits)
  # One sum of two products, and rows whose length is rounded.
  np.testing.assert_allclose(value, read, atol=1e-6 * np.abs(read).max())


def test_the_pages_example():
  x = np.zeros((8, 8), np.float32)
  x[:2, 0] = 3, 4
  rows, value = coded(PowerSGD(rank=1), x)
  assert rows[0, :3].tolist() == [0x4020B002, 0x40564002, 0]
  right = np.asarray(rows[1, :2]).view(np.float32)
  np.testing.assert_allclose(right, [5, 0], rtol=2.0**-22)
  np.testing.assert_allclose(value, x, rtol=1e-6)


def test_a_payload_is_what_one_worker_alone_averages():
  x = gaussian(60, 50)
  codec, _ = bound(PowerSGD(rank=2), x.shape)
  start = np.asarray(jax.jit(lambda: codec._restarts[1])())
  (mean,), _ = together(codec, [x[None]], [start])
  value = coded(codec, x)[1]
  # Another program, whose products may add their terms in another order.
  np.testing.assert_allclose(value, mean, atol=1e-6 * np.abs(mean).max())


def test_eight_bits_lose_little():
  """A quarter of the bytes, and two percent of a matrix of the rank.

  Each factor is rounded by 0.8 percent of its size. In the first step both columns of
  the left one are near to each other, and their difference is rounded by more.
  """
  x = of_rank(2, 1024, 1024)
  plain, _ = coded(PowerSGD(rank=2), x)
  small, value = coded(QUANTIZED, x)
  assert small.nbytes <= 0.26 * plain.nbytes
  assert error(value, x) <= 0.03
  assert QUANTIZED.inner == QSGD(bits=8, rounding="nearest")


def test_half_precision_returns():
  x = gaussian(30, 40).astype(jnp.bfloat16)
  rows, value = coded(PowerSGD(rank=2), x)
  wide_rows, wide = jax.device_get(coded(PowerSGD(rank=2), x.astype(np.float32)))
  assert_same_bits((rows, value), (wide_rows, wide.astype(jnp.bfloat16)))
