"""clip_by_local_norm clips each worker's whole gradient, in front of the exchange."""

import jax
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.wrappers import clip_by_local_norm
from tests.plugins.slow_cases import slow
from tests.specs.methods import sparse
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.sparse_steps import N, gradients, redsync, trail


def clipped_mean(gradient, limit):
  parts = [sparse.clip([x[i] for x in gradient.values()], limit) for i in range(N)]
  return [np.mean(leaves, axis=0) for leaves in zip(*parts, strict=True)]


def clipping(max_norm, rule):
  clip = clip_by_local_norm(max_norm, axis_name="data", rule=rule)
  return optax.chain(clip, gradcomp.dense(axis_name="data"))


PLACES = [("shard_map", "root", 10), (modes.AUTO, "root", 10)]
PLACES += [(modes.EXPLICIT, "own", 20), (modes.EXPLICIT, "share", 40)]


@pytest.mark.parametrize("place, rule, limit", PLACES)
def test_local_clipping(place, rule, limit):
  """Of each worker's whole gradient; some are below the limit, one is zero."""
  sizes = np.float32([1, 0.01, 30, 0])
  scaled = lambda x: x * sizes.reshape(N, *[1] * (x.ndim - 1))
  gradient = jax.tree.map(scaled, *gradients(1))
  tx = clipping(20.0, rule)  # a normal gradient here has a norm of about 35
  (output,), _ = modes.run_with_state(place, tx, [gradient])
  for x, expected in zip(output.values(), clipped_mean(gradient, limit), strict=True):
    # A norm of 1,263 squares, a factor and a mean of four: elements are below 4.
    np.testing.assert_allclose(x[0], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("workers", [2, *slow(1, 8)])
def test_shares_are_clipped_as_in_deep_gradient_compression(workers):
  """Its threshold is that of a sum, to which each worker adds a share."""
  rng = np.random.default_rng(workers)
  sizes = np.geomspace(8, 0.5, workers)[:, None]  # of norms near 16
  parts = [rng.standard_normal((workers, n)).astype(np.float32) for n in (200, 56)]
  parts = [np.float32(sizes) * x for x in parts]
  shares = [[x[i] / np.float64(workers) for x in parts] for i in range(workers)]
  clipped = [np.sqrt(sum((x**2).sum() for x in s)) > 20 * workers**-0.5 for s in shares]
  assert any(clipped) and (workers == 1 or not all(clipped))
  tx = clipping(20.0, "share")
  update = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")
  got = zip(jax.jit(update)(parts), sparse.clipped_sum(shares, 20.0), strict=True)
  for x, expected in got:
    # A norm of 256 squares, two factors and a mean of eight, each within an ulp of
    # elements below 8.
    np.testing.assert_allclose(x[0], expected, rtol=0, atol=4e-6)


def test_redsync_clips_in_front_of_momentum():
  """Of the first step, sent and waiting are Nesterov's (1 + m) g of clipped g."""
  steps = gradients(1)
  ((output, (_, state)),) = trail(redsync(0.05, 0.9, max_norm=1.0), steps)
  sent = N * np.float64(output["w"][0])
  waiting = np.float64(state.residual["w"]).sum(axis=0)
  expected = 1.9 * N * clipped_mean(steps[0], 1.0)[-1]
  # Sums of four elements below 0.3.
  np.testing.assert_allclose(sent + waiting, expected, rtol=0, atol=1e-6)


SIZES = (1e-37, 1e-23, 1.0, 2e19, 3e38)


def test_any_gradient_is_clipped_or_stays():
  """Squares of numbers above 1.8e19 would overflow, of those below 1e-23 vanish."""
  units = np.float32([0.6, -0.8, 0.0])
  numbers = [np.float32(size) * units for size in SIZES]
  bad = [[np.float32([1.0, x, 2.0]), np.float32([0.5])] for x in (np.nan, np.inf)]

  def clip(x, limit):
    return clip_by_local_norm(limit).update(x, None)[0]

  @jax.jit
  def all_of(numbers, bad):
    pairs = zip(SIZES, numbers, strict=True)
    both = [(clip(x, n / 4), clip(x / 4, 2 * min(n, 1e38))) for n, x in pairs]
    return both, [clip(x, 1.0) for x in bad]

  found, stayed = jax.device_get(all_of(numbers, bad))
  for x, (clipped, kept) in zip(numbers, found, strict=True):
    # A norm of three squares, and three products: each within an ulp.
    np.testing.assert_allclose(clipped, x / np.float32(4), rtol=2.0**-21)
    np.testing.assert_array_equal(kept, x / 4)
  assert_same_bits(stayed, bad)
