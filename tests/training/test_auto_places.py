"""Plain jit under Auto axes has the bits of other places, whatever the optimizer."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import assert_same_bits
from tests.support.cases.auto import (
  AROUND,
  CHAINS,
  OVER,
  WORKERS,
  kept4,
  mapped,
  problem,
  step_of,
  trained,
)


def marked(tree):
  """Gradients that are those of each worker."""
  rows = lambda x: gradcomp.PerWorker(jnp.stack([x] * WORKERS), "data")
  return jax.tree.map(rows, tree)


@pytest.mark.bits
@pytest.mark.parametrize(
  "name, workers",
  [("feedback", 4), *slow(("feedback", 3), *((x, 4) for x in list(CHAINS)[1:]))],
)
def test_a_training_has_the_bits_of_a_map(name, workers):
  """Of any number of workers: nothing is divided before the exchange."""
  tx, mesh = CHAINS[name], modes.mesh(workers)
  got = trained(step_of(tx), tx, mesh)
  assert_same_bits(got, trained(mapped(tx, mesh), tx, mesh))


@pytest.mark.bits
@pytest.mark.parametrize(
  "name", ["local", *slow(*(x for x in CHAINS if x not in ("local", "scaled")))]
)
def test_the_same_step_has_the_same_bits_under_explicit_axes(name):
  """Of N a power of two. Residuals are there in the units of addends."""
  tx = CHAINS[name]
  got, state = trained(step_of(tx), tx, modes.mesh(WORKERS))
  explicit = modes.mesh(WORKERS, AxisType.Explicit)
  expected, held = trained(step_of(tx), tx, explicit)
  assert_same_bits(got, expected)
  assert jax.tree.structure(state) == jax.tree.structure(held)


@pytest.mark.parametrize("name", AROUND)
def test_what_cannot_take_the_gradients_is_an_error_that_names_them(name):
  """Of optax and JAX, with the cures; docs/operate/troubleshooting.md has the words."""
  tx, mesh = AROUND[name], modes.mesh(WORKERS)
  params, _ = problem(mesh)
  grads = marked(params)

  def step(params, state):
    updates, _ = tx.update(grads, state, params)
    return optax.apply_updates(params, updates)

  with jax.set_mesh(mesh):
    state = tx.init(params)
    cure = r"Around an exchange, use accumulate= of gradcomp\.value_and_grad in place"
    with pytest.raises((TypeError, ValueError), match=cure):
      jax.eval_shape(step, params, state)


@pytest.mark.slow
@pytest.mark.bits
def test_gradients_that_wait_in_a_map_are_each_workers_own():
  """MultiSteps works in `allow_frozen`, with the state that it needs in all places."""
  tx = gradcomp.wrappers.allow_frozen(AROUND["MultiSteps"])
  mesh = modes.mesh(WORKERS)
  params, batch = problem(mesh)
  whole = jax.tree.map(lambda _: P(), params)
  first = gradcomp.init_state(tx, params, param_specs=whole, mesh=mesh, **OVER)
  results = []
  for step in (step_of(tx), mapped(tx, mesh)):
    given = params, first
    for _ in range(2):
      *given, loss = jax.jit(step)(*given, batch)
    results.append((given, loss))
  assert_same_bits(*results)
  with jax.set_mesh(mesh):
    early = tx.init(params)
  with pytest.raises(ValueError, match="must stack the parts of 4 workers"):
    jax.eval_shape(step_of(tx), params, early, batch)


def test_leaves_are_inspected_by_their_own_names():
  """Traced alone: tests/telemetry compares the numbers in all places."""
  mesh = modes.mesh(WORKERS)
  params, _ = problem(mesh)
  grads = marked(params)
  with jax.set_mesh(mesh):
    state = kept4.init(params)
    found = jax.eval_shape(
      lambda *args: gradcomp.telemetry.inspect(kept4, *args), grads, state, params
    )
  assert found.leaves.keys() == {"['w']", "['b']", "['v']"}


@pytest.mark.parametrize("name", ["clip", *slow("centralize")])
def test_a_norm_or_a_mean_in_allow_frozen_is_that_of_each_worker(name):
  front = {"clip": optax.clip_by_global_norm(0.1), "centralize": optax.centralize()}
  chain = optax.chain(front[name], gradcomp.dense(**OVER), optax.sgd(0.1))
  tx, mesh = gradcomp.wrappers.allow_frozen(chain), modes.mesh(WORKERS)
  (got, _), _ = trained(step_of(tx), tx, mesh)
  (expected, _), _ = trained(mapped(chain, mesh), chain, mesh)
  for leaf, x in expected.items():
    # Sums of 8,192 squares in another order.
    np.testing.assert_allclose(got[leaf], x, rtol=0, atol=1e-6, err_msg=leaf)
  with pytest.raises(TypeError, match="PerWorker is not defined"):
    trained(step_of(chain), chain, mesh)


def test_a_state_that_was_made_before_the_mesh_is_an_error():
  mesh = modes.mesh(WORKERS)
  params, batch = problem(mesh)
  early = kept4.init(jax.device_get(params))
  with pytest.raises(ValueError, match=r"residual.* must stack the parts of 4 workers"):
    jax.eval_shape(step_of(kept4), params, early, batch)


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("name", ["feedback", "zero"])
def test_a_training_goes_on_with_another_number_of_workers(name):
  """As in a map of that number."""
  tx, few = CHAINS[name], modes.mesh(2)
  (params, _), state = trained(step_of(tx), tx, modes.mesh(WORKERS))
  params, state = jax.device_get((params, state))
  options = {"old_workers": WORKERS, "workers": 2, "mesh": few, **OVER}
  moved = gradcomp.reshard_state(tx, params, state, **options)
  _, batch = problem(few)
  placed = jax.device_put(params, NamedSharding(few, P()))
  got, expected = (
    jax.jit(step)(placed, moved, batch) for step in (step_of(tx), mapped(tx, few))
  )
  assert_same_bits(got, expected)


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
@pytest.mark.parametrize("place", ["shapes", *slow("with mesh", "in_shardings")])
def test_a_mesh_is_named_where_no_array_has_it(place):
  """NumPy's arrays outside of `jax.set_mesh`."""
  mesh = modes.mesh(WORKERS)
  params, batch = problem(mesh)
  with jax.set_mesh(mesh):
    placed = params, kept4.init(params), batch
  given = jax.device_get(placed)
  options = {}
  if place == "in_shardings":
    options = {"in_shardings": jax.tree.map(lambda x: x.sharding, placed)}
  around = mesh if place == "with mesh" else contextlib.nullcontext()
  with around:
    with pytest.raises(ValueError, match=r"mesh= of gradcomp\.value_and_grad"):
      jax.jit(step_of(kept4), **options)(*given)
    if place == "shapes":
      shapes = jax.eval_shape(step_of(kept4, mesh=mesh), *given)
      assert shapes[0] == jax.eval_shape(lambda x: x, given[0])
      return
    got = jax.jit(step_of(kept4, mesh=mesh), **options)(*given)
  assert_same_bits(got, jax.jit(step_of(kept4))(*placed))
