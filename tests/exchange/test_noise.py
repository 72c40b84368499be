"""The rounding errors of several workers cancel in part, and no worker has a bias.

A ratio is the squared error of the workers' sum over the sum of their squared errors.
It is 1 where workers draw random numbers of their own, and less where errors cancel.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from gradcomp._src.kernels.common.dithers import random_lanes
from gradcomp._src.kernels.common.planes import pack_planes, unpack_planes
from gradcomp._src.testing.noise import mean_is_the_leaf, variance_of_sums
from gradcomp.codecs import QSGD, Codec, Dense, EightBit, FloatCast, Natural, Ternary
from tests.plugins.slow_cases import slow
from tests.support import laws, modes

WORKERS, SIZE = 8, 2**15
Z = 5.0  # standard deviations; of 3 million right ratios one is above that


@dataclasses.dataclass(frozen=True)
class Integers(Codec):
  """A codec of one's own, which rounds to integers from -8 to 7."""

  tile_size, row_words = 1024, 128
  needs_key = True

  def encode_rows(self, tiles, context):
    planes = tiles.reshape(-1, 8, 128).swapaxes(0, 1)
    lanes = random_lanes(context.dither, planes.shape[1:], 8)
    codes = jnp.floor(planes + jnp.stack(lanes) * 2.0**-16 + 8)
    return pack_planes(list(codes.astype(jnp.uint32)), 4)

  def decode_rows(self, rows):
    return unpack_planes(rows, 4).astype(jnp.float32) - 8


ONE_BIT, TWO_BITS = QSGD(bits=1, levels="uniform"), QSGD(bits=2)
STOCHASTIC = {"rounding": "stochastic"}
# The largest ratios of an even number of workers, and of three. A rounding error has
# two parts of the same variance. What the random number makes of it cancels within a
# pair, and what the element makes of it does not: of even numbers 1/2 is left, of three
# workers 2/3. The parts are not the same where elements have few levels. More is left
# where the steps of a pair differ: those of floats, which grow with the element, and
# those of buckets, with whose largest elements they grow; that adds up to 0.01.
CASES = [
  (ONE_BIT, 0.31, 0.54),
  (TWO_BITS, 0.56, 0.71),
  (Natural(), 0.70, 0.80),
  (Integers(), 0.51, 0.68),
  *slow(
    (QSGD(bits=2, levels="uniform"), 0.51, 0.68),
    *((QSGD(bits=bits), 0.51, 0.68) for bits in (3, 4, 8, 16)),
    (QSGD(bits=2, levels="nonuniform"), 0.56, 0.71),
    (QSGD(bits=4, levels="nonuniform"), 0.55, 0.70),
    (Ternary(), 0.53, 0.69),
    (EightBit(**STOCHASTIC), 0.62, 0.74),
    (EightBit(dtype="linear", **STOCHASTIC), 0.51, 0.68),
    (FloatCast(**STOCHASTIC), 0.70, 0.80),
    (Dense(dtype=jnp.bfloat16, **STOCHASTIC), 0.70, 0.80),
  ),
]


def told(value):
  """A value in the name of a test."""
  return laws.name(value) if dataclasses.is_dataclass(value) else str(value)


def gradients(workers, cosine=0.0):
  """Gaussian, float32[N, SIZE]; any two workers have the same expected cosine."""
  own, common = laws.gaussian((workers, SIZE)), laws.gaussian(SIZE, seed=1)
  return np.float32(cosine**0.5) * common + np.float32((1 - cosine) ** 0.5) * own


def run(codec, exchange, x, feedback=None):
  """What each worker gets, and its residual, float64[N, SIZE]."""
  tx = laws.compressed(codec, exchange, feedback, min_leaf_size=0)
  (output,), residual = modes.run("vmap", tx, [x])
  return np.asarray(output, np.float64), residual


def own_errors(codec, cosine=0.0):
  """What each of eight workers makes of its own gradient, less the gradient.

  A worker's bits do not depend on the number of workers, so that the first N of them
  are those of a run of N.
  """
  x = gradients(WORKERS, cosine)
  return run(codec, "local", x)[0] - x


def assert_ratio(errors, most):
  """The ratio of errors, float64[N, elements], is at most ``most``, but for chance."""
  ratio, deviation = variance_of_sums(errors, axis=0)
  assert ratio <= most + Z * deviation, (ratio, deviation)


@pytest.mark.parametrize(("codec", "even", "three"), CASES, ids=told)
def test_errors_of_workers_cancel(codec, even, three):
  errors = own_errors(codec)
  for workers in (2, 4, 8):
    assert_ratio(errors[:workers], even)
  assert_ratio(errors[:3], three)


@pytest.mark.parametrize(
  ("codec", "most"),
  [(TWO_BITS, 1 / 3.1), *slow((ONE_BIT, 1 / 7.5), (Ternary(), 1 / 2.7))],
  ids=told,
)
def test_errors_of_workers_that_agree_cancel_more(codec, most):
  """Masks are spread evenly, and so are the levels of eight elements that are equal."""
  assert_ratio(own_errors(codec, cosine=0.9), most)


@pytest.mark.parametrize(
  ("codec", "exchange", "workers", "most"),
  [
    (TWO_BITS, "ring", 4, 0.60),
    (TWO_BITS, "hierarchical", 4, 0.56),
    *slow(
      *((ONE_BIT, "ring", n, 0.80) for n in (2, 3, 8)),
      *((QSGD(bits=4), "ring", n, 0.60) for n in (2, 3, 8)),
      (QSGD(bits=4), "hierarchical", 6, 0.68),
      (QSGD(bits=4), "hierarchical", 8, 0.51),
    ),
  ],
  ids=told,
)
def test_errors_of_partial_sums_cancel(codec, exchange, workers, most):
  """Residuals are the errors of the encodings of these sums.

  Sums of a ring grow, and with them the steps, so that less cancels; `hierarchical`
  adds those of groups of two.
  """
  _, lost = run(codec, exchange, gradients(workers), feedback="error")
  assert_ratio(np.asarray(lost, np.float64), most)


@pytest.mark.parametrize(
  "codec",
  [
    QSGD(bits=2, bucket_size=32),
    *slow(
      QSGD(bits=1, levels="uniform", bucket_size=32),
      QSGD(bits=4, bucket_size=32),
      Natural(),
      Ternary(bucket_size=32, share_scale=False, clip_sigmas=None),
    ),
  ],
  ids=told,
)
def test_each_worker_alone_has_no_bias(codec):
  """With the masks of eight workers."""
  x = laws.gaussian(512)
  step = 2 * np.abs(x).max()  # the largest, of 1 bit
  mean_is_the_leaf(laws.here(codec), x, draws=2000, step=step, workers=WORKERS)
