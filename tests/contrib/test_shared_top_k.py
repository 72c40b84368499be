"""Shared top-k sends the rows of the mean that its sketch finds, as plain sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp.contrib import SharedTopK
from gradcomp.testing import CheckOptions, check_codec
from tests.oracles.qsgd import fold_in, threefry2x32
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits

N, M, WIDTH = 4, 60, 48
CODEC = SharedTopK(density=0.1)  # 6 of 60 rows
SENT = 6


def transformation(codec=CODEC, **options):
  return gradcomp.compress(codec, axis_name="data", **options)


def gradients(seed=0, workers=N):
  """Of rows whose lengths fall from 4 to 1/4."""
  rng = np.random.default_rng(seed)
  scale = np.geomspace(4, 0.25, M)[rng.permutation(M), None]
  return {"w": np.float32(scale * rng.standard_normal((workers, M, WIDTH)))}


def signs(key):
  """The signs that a key stands for, ``[n, r]``."""
  row, column = np.arange(WIDTH)[:, None], np.arange(CODEC.columns)[None]
  bits, _ = threefry2x32(key, *np.broadcast_arrays(row, column))
  return np.where(bits & 1 == 1, 1.0, -1.0)


def paper(corrected, key):
  """The mean of the chosen rows, in float64, and what the workers keep."""
  mean = np.float64(corrected).mean(axis=0)
  norms = np.linalg.norm(mean @ signs(key), axis=1)
  chosen = np.argsort(-norms, kind="stable")[:SENT]
  sent = np.zeros_like(mean)
  sent[chosen] = mean[chosen]
  return sent, corrected - sent


@pytest.mark.parametrize("dtype", ["float32", *slow("bfloat16")])
def test_every_law(dtype):
  options = CheckOptions(same_bits=False, keeps_range=dtype == "float32")
  codec = SharedTopK(density=0.1, dtype=jnp.dtype(dtype))
  check_codec(codec, exchanges=["psum", "two_shot"], options=options)


@pytest.mark.parametrize(
  "mode, exchange",
  [
    ("vmap", "psum"),
    *slow(("shard_map", "psum"), (modes.EXPLICIT, "psum"), ("vmap", "two_shot")),
  ],
)
def test_steps_with_feedback_are_the_papers(mode, exchange):
  """All workers have the rows that the sketch finds, to the bit, and keep the rest."""
  tx, given = transformation(exchange=exchange), [gradients(seed) for seed in range(5)]
  outputs, residual = modes.run(mode, tx, given)
  state = tx.init({"w": jnp.zeros((M, WIDTH))})
  ((key,),) = [x.values() for x in state.memory.shared.values()]
  key, kept = tuple(map(int, key)), np.zeros((N, M, WIDTH))
  for step, output in zip(given, outputs, strict=True):
    expected, kept = paper(step["w"] + kept, key)
    got = np.asarray(output["w"])
    assert_same_bits(got, np.broadcast_to(got[:1], got.shape))
    assert (got[0] != 0).any(axis=1).sum() == SENT
    # Sums of 4 numbers below 64, each rounded by at most 2**-19.
    np.testing.assert_allclose(got[0], expected, atol=1e-5, rtol=0)
    key = fold_in(key, 0)
  kept_here = np.reshape(residual["w"], kept.shape)
  np.testing.assert_allclose(kept_here, kept, atol=5e-5, rtol=0)


def lost(x, codec, key):
  """The share of a mean's squared length that one step does not send."""
  tx = transformation(codec, feedback=None, key=key)
  alone = lambda x: tx.update(x, tx.init(x))[0]
  (mean,) = jax.vmap(alone, axis_name="data")(x[None])
  return float(jnp.sum((x - mean) ** 2) / jnp.sum(x**2))


def test_it_contracts_as_random_rows_do_or_better():
  """In the mean over signs: the paper's bound for k of m rows, 1 - k/m."""
  flat = jnp.asarray(np.random.default_rng(0).standard_normal((M, WIDTH)), jnp.float32)
  uneven = jnp.asarray(gradients()["w"][0])
  equal = jnp.ones((M, WIDTH)) * jnp.where(jnp.arange(WIDTH) % 2, 1.0, -1.0)
  rest = 1 - SENT / M
  shares = {
    name: np.mean([lost(x, CODEC, key) for key in range(20)])
    for name, x in {"flat": flat, "uneven": uneven, "equal": equal}.items()
  }
  assert shares["flat"] < rest
  assert shares["equal"] == pytest.approx(rest, rel=1e-6)  # whichever rows it takes
  # Of all choices of 6 rows the best leaves the other 54.
  length = np.sort(np.square(np.float64(uneven)).sum(axis=1))
  best = length[:-SENT].sum() / length.sum()
  assert best <= shares["uneven"] < best + (rest - best) / 3


def test_rows_that_workers_disagree_about_are_not_sent():
  """Top-k of each worker would send them, and their mean is zero."""
  x = gradients()["w"]
  x[1::2, 7], x[::2, 7] = 100.0, -100.0
  x[:, 9] = 50.0
  tx = transformation(feedback=None)
  mean = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")(x)
  assert (mean[:, 9] == 50.0).all() and not mean[:, 7].any()
  assert ((mean != 0).any(axis=2).sum(axis=1) == SENT).all()  # and 7 is none of them


@pytest.mark.parametrize("workers", [2, *slow(8)])
def test_bytes_do_not_grow_with_the_number_of_workers(workers):
  """A sketch and the chosen rows, by all-reduces alone, as the report says."""
  tx, params = transformation(exchange="psum"), {"w": jnp.zeros((M, WIDTH))}
  found = modes.collectives(tx, params, gradients(workers=workers))
  assert {(c.kind, c.dtype) for c in found} == {("all-reduce", "f32")}
  numbers = M * CODEC.columns + SENT * WIDTH
  sent = 4 * numbers * 2 * (workers - 1) // workers
  assert sum(c.bytes_sent for c in found) == sent
  explained = gradcomp.explain(tx, params, workers=workers)
  assert explained.bytes_sent == sent


def test_small_matrices_and_vectors_are_dense():
  leaf = gradcomp.codecs.Leaf
  assert CODEC.bind(leaf((3, 4, WIDTH))).matrix == (12, WIDTH)
  for shape in (), (0,), (1000,), (8, 0), (2, 3):
    assert CODEC.bind(leaf(shape)) == gradcomp.codecs.Dense()


@pytest.mark.parametrize(
  "options, rule",
  [
    ({"density": 0}, "`density` must be a share"),
    ({"columns": 0}, "`columns` must be a number of columns"),
    ({"min_rate": -1.0}, "`min_rate` must be a positive number"),
    ({"dtype": jnp.int8}, "`dtype` must be float32, bfloat16 or float16"),
  ],
  ids=str,
)
def test_a_bad_hyperparameter_is_an_error(options, rule):
  with pytest.raises(ValueError, match=rule):
    SharedTopK(**options)
