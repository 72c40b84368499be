"""PowerSGD with factors in turn is ACP-SGD: one factor a step, by one average."""

import functools

import jax
import numpy as np
import pytest

import gradcomp
from gradcomp._src.transforms.low_rank import PowerSGD
from gradcomp.codecs import Leaf
from tests.specs import power_sgd
from tests.support.low_rank import KEY, error, first, gaussian, of_rank, together

SHAPES = {"wide": (9, 200), "square": (40, 40), "kernel": (3, 3, 24, 8)}


def bound(shape, **options):
  codec = PowerSGD(min_rate=1, alternate=True, **options).bind(Leaf(shape))
  return codec, jax.device_get(first(codec, Leaf(shape), KEY))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_six_steps_are_the_papers(shape, workers):
  """Its means, and the sum of its residuals, which it keeps otherwise."""
  codec, memory = bound(shape, rank=3)
  m, n = codec.matrix
  paper = power_sgd.AlternateSGD((m, n), memory[0][:, :n].T, workers)
  residual = np.zeros((workers, *shape), np.float32)
  for seed in range(6):
    gradient = gaussian(workers, *shape, seed=seed)
    (mean,), (memory,) = together(codec, [gradient + residual], [memory])
    residual = gradient + residual - mean
    expected = paper.step(gradient.reshape(workers, m, n))
    # Sums of 200 roundings of 2^-24, which the next steps' factors pass on.
    assert error(mean.reshape(m, n), expected) <= 1e-5
  total = residual.reshape(workers, m, n).sum(axis=0)
  assert error(total, paper.errors.sum(axis=0)) <= 1e-5
  assert memory[1].tolist() == [0]


@pytest.mark.parametrize("zeros", [1, 2])
def test_a_rank_that_comes_back_is_found_again(zeros):
  """Behind zero gradients, of which either factor is zero."""
  codec, memory = bound((40, 64), rank=2)
  x = of_rank(2, 40, 64)
  for gradient in [x] + [0 * x] * zeros + [x] * 6:
    (mean,), (memory,) = together(codec, [gradient[None]], [memory])
  assert error(mean, x) <= 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_seen_and_forgotten(bad):
  codec, memory = bound((40, 64), rank=2)
  gradient = gaussian(2, 40, 64)
  for _ in range(2):  # in either turn
    broken = gradient.copy()
    broken[1, 3, 5] = bad
    (mean,), (kept,) = together(codec, [broken], [memory])
    assert np.isnan(mean).all()
    jax.tree.map(np.testing.assert_array_equal, kept, memory)
    _, (memory,) = together(codec, [gradient], [memory])


def test_the_bytes_are_those_of_the_longer_factor():
  """Half of PowerSGD's for square matrices, in one message in place of two."""
  params = {"w": np.zeros((128, 128)), "v": np.zeros((64, 192))}
  given = {"axis_name": "data", "exchange": "psum", "min_leaf_size": 0}
  make = functools.partial(gradcomp.powersgd, 2, **given)
  told = lambda x: gradcomp.explain(make(alternate=x), params, workers=2).bytes_sent
  assert told(True) / told(False) == (128 + 192) / (256 + 256)
