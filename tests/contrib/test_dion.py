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
from tests.specs.dion import Dion
from tests.support import modes, saved
from tests.support.assertions import assert_same_bits, says

N, MU, RANK = 4, 0.9, 3
SHAPES = {"layers": (3, 6, 8), "up": (12, 9)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def transformation(rank=RANK, **options):
  return dion(1.0, rank=rank, mu=MU, **{"axis_name": "data"} | options)


def gradients(seed=0, workers=N):
  rng = np.random.default_rng(seed)
  return {
    name: rng.standard_normal((workers, *shape)).astype(np.float32)
    for name, shape in SHAPES.items()
  }


def papers(tx, workers=N):
  """The paper's model of each matrix, in lists by leaf, from the library's start."""
  (memory,) = tx.init(PARAMS)[0].memory.shared.values()
  models = {}
  for number, (name, shape) in enumerate(SHAPES.items()):
    starts = np.float64(memory[number][0])
    models[name] = [Dion(q.T, workers, shape[-2:], MU) for q in starts]
  return models


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
  """All workers step alike, to the bit, and each matrix of a stack by itself."""
  tx = transformation(exchange=exchange)
  given = [gradients(seed) for seed in range(5)]
  outputs, state = modes.run_with_state(mode, tx, given)
  for name, models in papers(tx).items():
    shape = SHAPES[name]
    stacked = lambda x, shape=shape: np.reshape(x, (N, -1, *shape[-2:])).swapaxes(0, 1)
    for step, output in zip(given, outputs, strict=True):
      expected = [-x.step(g) for x, g in zip(models, stacked(step[name]), strict=True)]
      got = np.asarray(output[name])
      assert_same_bits(got, np.broadcast_to(got[:1], got.shape))
      # Elements below 1, of some hundred roundings of 2**-24, each passed on by five
      # power iterations, which may double it.
      np.testing.assert_allclose(stacked(got)[:, 0], expected, atol=2e-4, rtol=0)
    momenta = stacked(state[0].residual[name])
    np.testing.assert_allclose(momenta, [x.momenta for x in models], atol=2e-4, rtol=0)


def test_every_law():
  check_transformation(transformation(), PARAMS, same_bits=False)


def alone(tx, given, params=PARAMS):
  """The updates and the last state of one worker."""
  state, update, outputs = tx.init(params), jax.jit(lambda *x: tx.update(*x)), []
  for gradient in given:
    output, state = update(gradient, state, params)
    outputs.append(output)
  assert update._cache_size() == 1
  return outputs, state[0]


@pytest.mark.slow
def test_momenta_of_workers_stand_for_the_mean_gradients():
  """The paper's claim of decoupled momenta: one worker with these steps as well."""
  given = [gradients(seed) for seed in range(5)]
  outputs, state = modes.run_with_state("vmap", transformation(), given)
  means = [jax.tree.map(lambda x: jnp.asarray(x.mean(axis=0)), x) for x in given]
  expected, one = alone(transformation(axis_name=None), means)
  for name in SHAPES:
    for got, step in zip(outputs, expected, strict=True):
      # As against the paper.
      np.testing.assert_allclose(got[name][0], step[name], atol=2e-4, rtol=0)
    momentum = np.asarray(state[0].residual[name]).mean(axis=0)
    np.testing.assert_allclose(momentum, one.residual[name], atol=2e-4, rtol=0)


@pytest.mark.parametrize("shape", [(6, 8), *slow(((8, 6),))], ids=str)
def test_steps_of_full_rank_become_the_polar_factor(shape):
  """Muon's, by power iterations where a gradient stays, of the momentum of SGD."""
  rng = np.random.default_rng(0)
  m, n = shape
  u, _, vt = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
  gradient = jnp.asarray(u * 2.0 ** -np.arange(6) @ vt, jnp.float32)
  tx = dion(1.0, rank=100, mu=MU)
  (*_, last), state = alone(tx, 16 * [gradient], gradient)
  # A step divides what is wrong by 4, the square of the quotient of neighbors, and 16
  # steps by 2**32. Rounding of 2**-24 is 32 times as much of the least singular value.
  np.testing.assert_allclose(last, -np.sqrt(n / m) * (u @ vt), atol=1e-5, rtol=0)
  # All of the gradient is sent, and mu of it stays.
  expected = sum(MU ** np.arange(1, 17)) * gradient
  np.testing.assert_allclose(state.residual, expected, atol=1e-5, rtol=0)


def test_where_a_gradient_has_a_lower_rank_no_step_is_added():
  """A step is as long in its only direction, and zero in all others."""
  left, right = np.array([3.0, 0.0, 4.0]), np.array([0.0, 1.0, 0.0, 0.0])
  gradient = jnp.asarray(np.outer(left, right), jnp.float32)
  tx = dion(1.0, rank=3)
  zero = jnp.zeros_like(gradient)
  steps, _ = alone(tx, [zero, gradient, zero, gradient], gradient)
  assert not np.asarray(steps[0]).any()
  for step in steps[1:]:  # a momentum goes on
    expected = -np.sqrt(4 / 3) * np.outer(left / 5, right)
    np.testing.assert_allclose(step, expected, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_what_is_not_finite_is_seen_in_its_matrix_and_forgotten():
  """The other matrices of a stack go on."""
  tx, given = transformation(), [gradients(seed) for seed in range(2)]
  given[1]["layers"][2, 1, 3, 4] = np.nan
  outputs, state = modes.run_with_state("vmap", tx, given)
  _, before = modes.run_with_state("vmap", tx, given[:1])
  assert np.isnan(outputs[1]["layers"][:, 1]).all()
  for fine in outputs[1]["layers"][:, ::2], outputs[1]["up"]:
    assert np.isfinite(fine).all()
  momenta = [np.asarray(x[0].residual["layers"])[:, 1] for x in (state, before)]
  assert_same_bits(*momenta)
  now, old = (x[0].memory.shared[()][0] for x in (state, before))
  for new, last in zip(now, old, strict=True):
    assert_same_bits(np.asarray(new)[:, 1], np.asarray(last)[:, 1])
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state[0].residual))


def test_a_column_that_overflows_makes_the_whole_matrix_nan():
  """Its factor alone does: the left one and the other columns are finite."""
  fine = jnp.asarray(gradients()["up"][0])
  tx, large = dion(1.0, rank=2), fine.at[:, 5].set(3e38)
  _, before = alone(tx, [fine], fine)
  (_, step), after = alone(tx, [fine, large], fine)
  assert np.isnan(step).all()
  assert_same_bits(after.residual, before.residual)
  assert_same_bits(after.memory, before.memory)


def test_a_step_in_few_bits_leaves_the_momentum_as_it_is():
  narrow = jnp.bfloat16(gradients()["up"][0])
  wide, tx = jnp.float32(narrow), dion(1.0, rank=2)
  (got,), state = alone(tx, [narrow], narrow)
  (expected,), other = alone(tx, [wide], wide)
  assert_same_bits(state.residual, other.residual)
  assert_same_bits(got, jnp.bfloat16(expected))


def test_weights_decay_apart_from_the_scale_of_steps():
  """By rate and decay alone, in the leaves of the mask."""
  rate, mask = optax.linear_schedule(0.5, 0.0, 2), {"layers": False, "up": True}
  tx = dion(rate, rank=1, weight_decay=0.25, mask=mask)
  params = jax.tree.map(jnp.ones_like, PARAMS)
  outputs, _ = alone(tx, 2 * [PARAMS], params)
  for output, decayed in zip(outputs, (0.125, 0.0625), strict=True):
    assert (output["up"] == -decayed).all() and not output["layers"].any()


@pytest.mark.parametrize("workers", [4, *slow(2, 8)])
def test_bytes_are_those_of_the_factors(workers):
  """Both factors of all matrices, by all-reduces alone, as the report says."""
  tx = transformation(exchange="psum")
  found = modes.collectives(tx, PARAMS, gradients(workers=workers))
  assert {(c.kind, c.dtype) for c in found} == {("all-reduce", "f32")}
  numbers = RANK * (3 * (6 + 8) + 12 + 9)
  sent = 4 * numbers * 2 * (workers - 1) // workers
  assert sum(c.bytes_sent for c in found) == sent
  assert gradcomp.explain(tx, PARAMS, workers=workers).bytes_sent == sent


def test_losses_of_all_workers_fall():
  """Each has data of its own, which alone do not decide all weights."""
  rng = np.random.default_rng(0)
  data = jnp.asarray(rng.standard_normal((N, 5, 12)), jnp.float32)
  target = jnp.asarray(rng.standard_normal((12, 9)), jnp.float32)
  rate = optax.linear_schedule(0.3, 0.0, 150)
  tx = dion(rate, rank=4, axis_name="data")

  def train(x):
    def step(carry, _):
      params, state = carry
      error = x @ (params - target)
      update, state = tx.update(x.T @ error, state, params)
      return (optax.apply_updates(params, update), state), jnp.square(error).sum()

    first = jnp.zeros_like(target)
    return jax.lax.scan(step, (first, tx.init(first)), length=150)[1]

  losses = jax.jit(jax.vmap(train, axis_name="data"))(data).sum(axis=0)
  assert losses[-1] < 0.01 * losses[0]


@pytest.mark.parametrize("mode", [*slow("vmap", "shard_map", "explicit")])
def test_a_checkpoint_goes_on(mode, tmp_path):
  given = [gradients(seed) for seed in range(4)]
  saved.assert_goes_on(mode, transformation(), given, tmp_path)


@pytest.mark.parametrize("workers", [2, *slow(1, 8)])
def test_a_state_goes_on_with_other_workers(workers):
  """The mean of momenta stays, and so does the next step of equal gradients."""
  tx = transformation()
  with jax.set_mesh(modes.mesh(N)):
    state = tx.init(PARAMS)
  draw = np.random.default_rng(0).standard_normal
  fill = lambda x: jax.device_put(draw(x.shape).astype(x.dtype), x.sharding)
  filled = jax.tree.map(fill, state[0].residual)
  state = (state[0]._replace(residual=filled), *state[1:])
  options = {"axis_name": "data", "old_workers": N, "workers": workers}
  moved = gradcomp.reshard_state(tx, PARAMS, state, keep="mean", **options)
  assert_same_bits(moved[0]._replace(residual=None), state[0]._replace(residual=None))
  for name, shape in SHAPES.items():
    momenta = np.reshape(moved[0].residual[name], (workers, *shape))
    expected = np.reshape(filled[name], (N, *shape)).mean(axis=0)
    # Means of numbers below 4 in float32.
    np.testing.assert_allclose(momenta.mean(axis=0), expected, atol=1e-6, rtol=0)


def test_mistakes():
  with pytest.raises(ValueError, match=says("`rank`", "1 or more", "0")):
    dion(0.1, rank=0)
  with pytest.raises(ValueError, match=says("`mu`", "below 1", "1.0")):
    dion(0.1, rank=1, mu=1.0)
  with pytest.raises(ValueError, match=says("`exchange`", "local")):
    dion(0.1, rank=1, exchange="local")
  for leaf in jnp.zeros(3), jnp.zeros(()), jnp.zeros((0, 3)):
    with pytest.raises(ValueError, match=says("`params`", "'b'", "optax.partition")):
      dion(0.1, rank=1).init({"w": jnp.zeros((2, 2)), "b": leaf})
  tx = dion(0.1, rank=1)
  state = tx.init(jnp.zeros((2, 2)))
  for dtype in "int32", "complex64":
    with pytest.raises(TypeError, match=says("`updates`", "real float", dtype)):
      tx.update(jnp.zeros((2, 2), dtype), state)
