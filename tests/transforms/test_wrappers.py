"""Losses, functions and numbers that optax gives an optimizer reach it in wrappers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax import contrib

import gradcomp
from gradcomp.codecs import Dense
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import says
from tests.support.cases.local import local
from tests.support.cases.steps import OVER, N, dense, put
from tests.support.cases.zero import coded
from tests.support.option_fields import with_options

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
PLAIN = optax.sgd(1.0)
plateau = lambda **options: contrib.reduce_on_plateau(patience=1, **options)
adam = lambda: optax.chain(optax.adam(0.1), plateau(rtol=0.5))
searched = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8))


zeroed = lambda inner: coded(inner, Dense())
skipped = lambda inner: gradcomp.skip_nonfinite(optax.chain(dense, inner), 3, **OVER)
switched = lambda x: optax.chain(dense, gradcomp.wrappers.switch([1], [x, x]))


def frozen(inner):
  labels = {"w": "train", "v": "frozen"}
  parts = {"train": optax.chain(dense, inner), "frozen": optax.set_to_zero()}
  return gradcomp.wrappers.allow_frozen(optax.partition(parts, labels))


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["w"]) - x[:, ::-1]) ** 2) + params["v"] ** 2


def problem():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  return {"w": normal(8, 8) / 4, "v": np.float32(0)}, normal(4 * N, 8)


def started(tx, kind=EXPLICIT, **options):
  """Parameters and state on a mesh, and a train step."""
  mesh = modes.mesh(N, kind)
  params = put(problem()[0], mesh)
  options = with_options(gradcomp.TrainOptions, options) | OVER
  with jax.set_mesh(mesh):
    state = tx.init(params)
  return params, state, gradcomp.make_train_step(loss_fn, tx, mesh=mesh, **options)


def train(tx, steps=3, kind=EXPLICIT, change=lambda state: state, **options):
  """What all have after some steps, where ``change`` sets numbers in the state."""
  params, state, step = started(tx, kind, **options)
  for _ in range(steps):
    params, state, metrics = step(params, change(state), problem()[1])
  return params, state, metrics


def stepped(tx, params, state, x):
  """A step of optax alone, on one device."""

  @jax.jit
  def step(params, state):
    value_fn = lambda params, obj_fn=None: loss_fn(params, x)
    value, grad = jax.value_and_grad(value_fn)(params)
    more = dict(value=value, grad=grad, value_fn=value_fn, obj_fn=value_fn)
    more = more if isinstance(tx, optax.GradientTransformationExtraArgs) else {}
    updates, state = tx.update(grad, state, params, **more)
    return optax.apply_updates(params, updates), state

  return step(params, state)


def plainly(tx, steps=3):
  params, x = problem()
  state = tx.init(params)
  for _ in range(steps):
    params, state = stepped(tx, params, state, x)
  return params


@pytest.mark.parametrize(
  "around, inner, options",
  [
    (None, searched, {"accumulate": 2}),
    (zeroed, adam(), {}),
    (skipped, adam(), {}),
    *slow(
      (None, adam(), {}),
      (None, optax.polyak_sgd(), {"kind": AUTO}),
      (None, contrib.momo(), {"accumulate": 2}),
      (None, contrib.sophia(0.01), {"accumulate": 2}),
      (None, optax.lbfgs(), {"report": True}),
      (switched, adam(), {}),
      (frozen, adam(), {}),
    ),
  ],
)
def test_optimizers_see_the_loss_of_the_whole_batch(around, inner, options):
  """The steps are those of optax on one device, where all that is sent is dense."""
  tx = optax.chain(dense, inner) if around is None else around(inner)
  params, *_ = train(tx, **options)
  # Means of means and means differ by some ulp, which three steps carry on.
  np.testing.assert_allclose(params["w"], plainly(inner)["w"], atol=1e-5)


@pytest.mark.parametrize("inner", [optax.polyak_sgd(), *slow((searched,))])
def test_in_local_steps_it_is_the_workers_own(inner):
  params, x = problem()
  after, *_ = train(local(inner, PLAIN, Dense(), every=1), steps=1)
  state = inner.init(params)
  ends = [stepped(inner, params, state, rows)[0]["w"] for rows in np.split(x, N)]
  np.testing.assert_allclose(after["w"], np.mean(ends, axis=0), atol=1e-6)


def test_branches_of_optax_run_in_local_steps_and_outside_of_them():
  """Each worker has a scale of its own, and ``outer`` sees the mean of the losses."""
  inner = optax.chain(optax.sgd(0.1), plateau(cooldown=1))
  outer = optax.chain(optax.sgd(1.0), plateau())
  _, state, metrics = train(local(inner, outer, Dense(), every=2), steps=2)
  own = state.own.inner_state[1].best_value
  assert own.shape == (N,) and len(np.unique(own)) == N
  seen = state.fragments[0].outer_state[1].best_value
  np.testing.assert_allclose(seen, np.mean(metrics["loss"]), rtol=1e-6)


def test_reports_know_optimizers_that_want_a_loss():
  """And what nobody asks for is not sent."""
  for inner in (adam(), optax.polyak_sgd()):
    params, state, step = started(tx := optax.chain(dense, inner))
    sent = gradcomp.wire_report(step.lower(params, state, problem()[1])).bytes_sent
    # The loss is sent beside.
    assert sent == gradcomp.explain(tx, params, workers=N).bytes_sent + 6
  *_, metrics = step(params, state, problem()[1], inspect=True)
  assert metrics["inspection"].total.gradient_norm > 0


def test_a_step_takes_other_arguments():
  """By any name; one that it knows takes the place of its own."""

  def update(updates, state, params=None, *, value, shift, **others):
    return jax.tree.map(lambda u: 0 * u + value + shift, updates), state

  tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
  params, state, step = started(optax.chain(dense, tx))
  given = {"value": jnp.float32(2), "shift": jnp.float32(1)}
  params, *_ = step(params, state, problem()[1], extra_args=given)
  np.testing.assert_allclose(params["w"], problem()[0]["w"] + 3, rtol=1e-6)


injected = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
SET = {
  "zero": zeroed(injected),
  "local_steps": local(injected, PLAIN, Dense(), every=1),
  "outer": local(optax.sgd(0.1), injected, Dense(), every=1),
  "skip": skipped(injected),
  "switch": switched(injected),
  "frozen": frozen(injected),
}
half = lambda state: optax.tree.set(state, learning_rate=jnp.float32(0.05))
STEP = [(name, "step") for name in SET]
JIT = [(name, "jit") for name in ("local_steps", "zero", "skip")]


@pytest.mark.parametrize("name, place", [*STEP[:2], JIT[0], *slow(*STEP[2:], *JIT[1:])])
def test_a_rate_that_is_set_by_hand_reaches_the_optimizer(name, place):
  """As optax documents it: between two steps, or after a restore."""
  expected = plainly(optax.sgd(0.05 if name != "outer" else 0.005), steps=1)
  if place == "jit":
    params, state, _ = started(SET[name])
    step = jax.jit(modes.user_step(loss_fn, SET[name]))
    with jax.set_mesh(modes.mesh(N, EXPLICIT)):
      x = jax.device_put(problem()[1], P("data"))
      ours, *_ = step(params, half(state), x)
  else:
    ours, *_ = train(SET[name], change=half, steps=1)
  np.testing.assert_allclose(ours["w"], expected["w"], atol=1e-6)


def test_a_map_of_ones_own_wants_a_rate_for_each_worker():
  _, state, _ = started(SET["local_steps"])
  said = says("learning_rate", "number for each worker", "jnp.full")
  with pytest.raises(ValueError, match=said):
    gradcomp.state_specs(half(state), **OVER)


PRODIGY = contrib.prodigy()
KEEPING = {
  "once": optax.chain(dense, PRODIGY),
  "local": local(optax.sgd(0.1), PRODIGY, Dense(), every=2),
  "twice": optax.chain(dense, PRODIGY, PRODIGY),
}


@pytest.mark.parametrize("name", ["once", *slow("local", "twice")])
def test_what_is_donated_twice_is_copied(name):
  """The optimizer keeps the parameters' own arrays; it ended the process once."""
  params, state, step = started(KEEPING[name])
  held = [{id(x) for x in jax.tree.leaves(tree)} for tree in (state, params)]
  assert held[0] & held[1]
  for _ in range(2):
    params, state, _ = step(params, state, problem()[1])


def test_what_shares_a_buffer_with_a_donated_array_is_copied():
  """JAX's ``device_put`` to the same places in other words returns such an array."""
  mesh, (params, x) = modes.mesh(1, AUTO), problem()
  kept = put(params["w"], mesh)
  params = {"w": put(kept, mesh, None, None), "v": put(params["v"], mesh)}
  start = put(kept, mesh, None)
  assert params["w"] is not kept and start is not kept
  loss = lambda params, x, start: loss_fn(params, x) + jnp.sum(start)
  keep = optax.GradientTransformation(lambda p: kept, lambda u, s, p=None: (u, s))
  tx = optax.chain(keep, optax.sgd(0.1))
  step = gradcomp.make_train_step(loss, tx, axis_name=None)
  _, state, _ = step(params, tx.init(params), x, start)
  np.testing.assert_array_equal(state[0], problem()[0]["w"])


INJECTED = {
  "zero": lambda rate: zeroed(optax.adam(rate)),
  "local": lambda rate: local(optax.adam(rate), PLAIN, Dense(), every=1),
  "outer": lambda rate: local(optax.sgd(0.1), optax.sgd(rate), Dense(), every=1),
  "skip": lambda rate: skipped(optax.sgd(rate)),
}


@pytest.mark.parametrize("name", ["zero", *slow("local", "outer", "skip")])
def test_numbers_are_injected_around_an_exchange(name):
  """The state is made under the mesh, where each number is an array of it.

  On an Explicit mesh they would be in closures: see tests/mesh/test_closures.py.
  """
  make = INJECTED[name]
  pair = optax.inject_hyperparams(make)(rate=0.1), make(0.1)
  ends, (state, plain) = zip(*(train(tx, kind=AUTO)[:2] for tx in pair), strict=True)
  chex.assert_trees_all_close(state.inner_state, plain, atol=1e-6)
  np.testing.assert_allclose(ends[0]["w"], ends[1]["w"], atol=1e-6)
