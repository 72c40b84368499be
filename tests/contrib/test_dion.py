"""Dion steps by orthonormal matrices of low rank, and exchanges their factors alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcomp
from gradcomp.contrib import dion
from gradcomp.testing import check_transformation
from tests.plugins.slow_cases import slow
from tests.specs.methods.dion import Dion
from tests.support import modes
from tests.support.assertions import assert_same_bits

N, MU, RANK = 4, 0.9, 3
SHAPES = {"layers": (3, 6, 8), "up": (12, 9)}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def transformation(rank=RANK, **options):
  return dion(1.0, rank=rank, mu=MU, **{"axis_name": "data"} | options)


def gradients(seed=0):
  normal = np.random.default_rng(seed).standard_normal
  return {name: np.float32(normal((N, *shape))) for name, shape in SHAPES.items()}


def papers(tx, workers=N):
  """The paper's model of each matrix, in lists by leaf, from the library's start."""
  (memory,) = tx.init(PARAMS)[0].memory.shared.values()
  made = lambda q, shape: Dion(q.T, workers, shape[-2:], MU)
  return {
    name: [made(q, shape) for q in np.float64(starts[0])]
    for (name, shape), starts in zip(SHAPES.items(), memory.values(), strict=True)
  }


@pytest.mark.parametrize(
  "mode, exchange",
  [
    ("vmap", "psum"),
    (modes.EXPLICIT, "auto"),
    *slow(*((x, "auto") for x in modes.MODES if x != modes.EXPLICIT)),
    *slow(("vmap", "two_shot"), ("vmap", "all_gather"), ("vmap", "ring")),
  ],
)
def test_steps_and_momenta_are_the_papers(mode, exchange):
  """All workers step alike, to the bit, and each matrix of a stack by itself.

  One worker with the mean gradients steps as well, as the paper claims.
  """
  tx = transformation(exchange=exchange)
  given = [gradients(seed) for seed in range(5)]
  outputs, state = modes.run_with_state(mode, tx, given)
  of_one = papers(tx, workers=1)
  # Elements below 1, of some hundred roundings of 2**-24, each passed on by five power
  # iterations, which may double it.
  close = {"atol": 2e-4, "rtol": 0}
  for name, models in papers(tx).items():
    shape = N, -1, *SHAPES[name][-2:]
    stacked = lambda x, shape=shape: np.reshape(x, shape).swapaxes(0, 1)
    for step, output in zip(given, outputs, strict=True):
      matrices = stacked(step[name])
      expected = [-x.step(g) for x, g in zip(models, matrices, strict=True)]
      got = np.asarray(output[name])
      assert_same_bits(got, np.broadcast_to(got[:1], got.shape))
      np.testing.assert_allclose(stacked(got)[:, 0], expected, **close)
      pairs = zip(of_one[name], matrices, strict=True)
      alike = [-x.step(g.mean(axis=0, keepdims=True)) for x, g in pairs]
      np.testing.assert_allclose(alike, expected, **close)
    momenta = stacked(state[0].residual[name])
    np.testing.assert_allclose(momenta, [x.momenta for x in models], **close)


def test_every_law():
  check_transformation(transformation(), PARAMS, same_bits=False)


def alone(tx, given, params=PARAMS):
  """The updates and states of one worker."""
  state, update, held = tx.init(params), jax.jit(lambda *x: tx.update(*x)), []
  for gradient in given:
    output, state = update(gradient, state, params)
    held.append((output, state[0]))
  assert update._cache_size() == 1
  return zip(*jax.device_get(held), strict=True)


@pytest.mark.parametrize("shape", [(6, 8), *slow(((8, 6),))], ids=str)
def test_steps_of_full_rank_become_the_polar_factor(shape):
  """Muon's, by power iterations where a gradient stays, of the momentum of SGD."""
  rng = np.random.default_rng(0)
  m, n = shape
  u, _, vt = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
  gradient = np.float32(u * 2.0 ** -np.arange(6) @ vt)
  (*_, last), (*_, state) = alone(dion(1.0, rank=100, mu=MU), 16 * [gradient], gradient)
  # A step divides what is wrong by 4, the square of the quotient of neighbors, and 16
  # steps by 2**32. Rounding of 2**-24 is 32 times as much of the least singular value.
  np.testing.assert_allclose(last, -np.sqrt(n / m) * (u @ vt), atol=1e-5, rtol=0)
  # All of the gradient is sent, and mu of it stays.
  expected = sum(MU ** np.arange(1, 17)) * gradient
  np.testing.assert_allclose(state.residual, expected, atol=1e-5, rtol=0)


def test_where_a_gradient_has_a_lower_rank_no_step_is_added():
  """A step is as long in its only direction, and zero in all others."""
  left, right = np.array([3.0, 0.0, 4.0]), np.array([0.0, 1.0, 0.0, 0.0])
  gradient = np.float32(np.outer(left, right))
  steps, _ = alone(dion(1.0, rank=3), [0 * gradient, gradient] * 2, gradient)
  assert not steps[0].any()
  for step in steps[1:]:  # a momentum goes on
    expected = -np.sqrt(4 / 3) * np.outer(left / 5, right)
    np.testing.assert_allclose(step, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bad", [3e38, *slow(np.nan)])
def test_a_column_that_overflows_makes_its_whole_matrix_nan_and_is_forgotten(bad):
  """Its factor alone does: the left one and the other columns are finite.

  The other matrices of a stack go on.
  """
  fine = jax.tree.map(lambda x: x[0], gradients())
  large = fine | {"layers": fine["layers"].copy()}
  large["layers"][1, :, 5] = bad
  (_, step), (before, after) = alone(dion(1.0, rank=2), [fine, large])
  assert np.isnan(step["layers"][1]).all()
  for x in step["layers"][::2], step["up"]:
    assert np.isfinite(x).all()
  assert_same_bits(after.residual["layers"][1], before.residual["layers"][1])
  assert (after.residual["layers"][::2] != before.residual["layers"][::2]).any()
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.residual))
  now, old = (x.memory.shared[()][0] for x in (after, before))
  for new, last in zip(now, old, strict=True):
    assert_same_bits(new[1], last[1])


def test_a_step_in_few_bits_leaves_the_momentum_as_it_is():
  narrow = gradients()["up"][0].astype(jnp.bfloat16)
  runs = (alone(dion(1.0, rank=2), [x], x) for x in (narrow, np.float32(narrow)))
  ((got,), (state,)), ((expected,), (other,)) = runs
  assert_same_bits(state.residual, other.residual)
  assert_same_bits(got, expected.astype(jnp.bfloat16))


def test_weights_decay_apart_from_the_scale_of_steps():
  """By rate and decay alone, in the leaves of the mask."""
  rate, mask = optax.linear_schedule(0.5, 0.0, 2), {"layers": False, "up": True}
  tx = dion(rate, rank=1, weight_decay=0.25, mask=mask)
  outputs, _ = alone(tx, 2 * [PARAMS], jax.tree.map(np.ones_like, PARAMS))
  for output, decayed in zip(outputs, (0.125, 0.0625), strict=True):
    assert (output["up"] == -decayed).all() and not output["layers"].any()


def test_bytes_are_those_of_the_factors():
  """Both factors of all matrices, by all-reduces alone, as the report says."""
  tx = transformation(exchange="psum")
  found = modes.collectives(tx, PARAMS, gradients())
  assert {(c.kind, c.dtype) for c in found} == {("all-reduce", "f32")}
  sent = 4 * RANK * (3 * (6 + 8) + 12 + 9) * 2 * (N - 1) // N
  assert sum(c.bytes_sent for c in found) == sent
  assert gradcomp.explain(tx, PARAMS, workers=N).bytes_sent == sent


@pytest.mark.parametrize("workers", [2, *slow(1, 8)])
def test_a_state_goes_on_with_other_workers(workers):
  """The mean of momenta stays, and so does the next step of equal gradients."""
  tx = transformation()
  with jax.set_mesh(modes.mesh(N)):
    state = jax.device_get(tx.init(PARAMS))
  draw = np.random.default_rng(0).standard_normal
  filled = jax.tree.map(lambda x: np.float32(draw(x.shape)), state[0].residual)
  state = (state[0]._replace(residual=filled), *state[1:])
  options = {"axis_name": "data", "old_workers": N, "workers": workers}
  moved = gradcomp.reshard_state(tx, PARAMS, state, keep="mean", **options)
  assert_same_bits(moved[0]._replace(residual=None), state[0]._replace(residual=None))
  for name, shape in SHAPES.items():
    momenta = np.reshape(moved[0].residual[name], (workers, *shape))
    expected = np.reshape(filled[name], (N, *shape)).mean(axis=0)
    # Means of numbers below 4 in float32.
    np.testing.assert_allclose(momenta.mean(axis=0), expected, atol=1e-6, rtol=0)
