"""Optimizers get what optax gives them: losses, functions, and numbers set by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcomp
from gradcomp.codecs import Dense
from gradcomp.parallel import zero
from tests.plugins.slow_cases import slow
from tests.support import modes
from tests.support.assertions import says
from tests.support.option_fields import with_options

N, ROWS = 4, 4
dense = gradcomp.dense(axis_name="data")
plateau = lambda **options: optax.contrib.reduce_on_plateau(patience=1, **options)
adam = lambda: optax.chain(optax.adam(0.1), plateau(rtol=0.5))
searched = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8))


def zeroed(inner):
  return zero(inner, grads=Dense(), params=Dense(), axis_name="data")


def local(inner, outer=None, every=2):
  outer = optax.sgd(1.0) if outer is None else outer
  options = {"every": every, "codec": Dense(), "axis_name": "data"}
  return gradcomp.local.local_steps(inner, outer, **options)


def skipped(inner):
  return gradcomp.skip_nonfinite(optax.chain(dense, inner), 3, axis_name="data")


def switched(inner):
  return optax.chain(dense, gradcomp.wrappers.switch([1], [inner, inner]))


def frozen(inner):
  labels = {"w": "train", "v": "frozen"}
  parts = {"train": optax.chain(dense, inner), "frozen": optax.set_to_zero()}
  return gradcomp.wrappers.allow_frozen(optax.partition(parts, labels))


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["w"]) - x[:, ::-1]) ** 2) + params["v"] ** 2


def problem():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  return {"w": normal(8, 8) / 4, "v": np.float32(0)}, normal(N * ROWS, 8)


def started(tx, kind=AxisType.Explicit, params=None):
  mesh = modes.mesh(N, kind)
  params = problem()[0] if params is None else params
  params = jax.device_put(params, NamedSharding(mesh, P()))
  with jax.set_mesh(mesh):
    return params, tx.init(params), mesh


def train(tx, steps=3, kind=AxisType.Explicit, change=lambda state: state, **options):
  """What all have after some steps, where ``change`` sets numbers in the state."""
  params, state, mesh = started(tx, kind)
  options = with_options(gradcomp.TrainOptions, options)
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh, **options)
  for _ in range(steps):
    params, state, metrics = step(params, change(state), problem()[1])
  return params, state, metrics


def plainly(tx, steps=3):
  """The same with optax alone, on one device."""
  params, x = problem()
  state = tx.init(params)
  value_fn = lambda params, obj_fn=None: loss_fn(params, x)
  for _ in range(steps):
    value, grad = jax.value_and_grad(value_fn)(params)
    more = dict(value=value, grad=grad, value_fn=value_fn, obj_fn=value_fn)
    updates, state = tx.update(grad, state, params, **more)
    params = optax.apply_updates(params, updates)
  return params


@pytest.mark.parametrize(
  "inner, options",
  [
    (searched, {"accumulate": 2}),
    *slow(
      (adam(), {}),
      (optax.polyak_sgd(), {"kind": AxisType.Auto}),
      (optax.contrib.momo(), {"accumulate": 2}),
      (optax.contrib.sophia(0.01), {"accumulate": 2}),
      (optax.lbfgs(), {"report": True}),
    ),
  ],
)
def test_optimizers_see_the_loss_of_the_whole_batch(inner, options):
  """The steps are those of optax on one device, where all that is sent is dense."""
  params, *_ = train(optax.chain(dense, inner), **options)
  # Means of means and means differ by some ulp, which three steps carry on.
  np.testing.assert_allclose(params["w"], plainly(inner)["w"], atol=1e-5)


@pytest.mark.parametrize("around", [zeroed, skipped, *slow(switched, frozen)])
def test_wrappers_hand_it_on(around):
  params, *_ = train(around(adam()))
  np.testing.assert_allclose(params["w"], plainly(adam())["w"], atol=1e-5)


@pytest.mark.parametrize("inner", ["polyak", *slow("searched")])
def test_in_local_steps_it_is_the_workers_own(inner):
  inner = optax.polyak_sgd() if inner == "polyak" else searched
  params, x = problem()
  after, *_ = train(local(inner, every=1), steps=1)
  moved = []
  for rows in np.split(x, N):
    value_fn = lambda params, rows=rows: loss_fn(params, rows)
    value, grad = jax.value_and_grad(value_fn)(params)
    more = dict(value=value, grad=grad, value_fn=value_fn)
    moved.append(inner.update(grad, inner.init(params), params, **more)[0]["w"])
  np.testing.assert_allclose(after["w"], params["w"] + sum(moved) / N, atol=1e-6)


def test_branches_of_optax_run_in_local_steps_and_outside_of_them():
  """Each worker has a scale of its own, and ``outer`` sees the mean of the losses."""
  inner = optax.chain(optax.sgd(0.1), plateau(cooldown=1))
  tx = local(inner, optax.chain(optax.sgd(1.0), plateau()))
  _, state, metrics = train(tx, steps=2)
  own = state.own.inner_state[1].best_value
  assert own.shape == (N,) and len(np.unique(own)) == N
  mean = np.mean(metrics["loss"])
  seen = state.fragments[0].outer_state[1].best_value
  np.testing.assert_allclose(seen, mean, rtol=1e-6)


def test_what_nobody_asks_for_is_not_sent():
  params, state, mesh = started(tx := optax.chain(dense, adam()))
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  sent = gradcomp.wire_report(step.lower(params, state, problem()[1])).bytes_sent
  assert sent == gradcomp.explain(tx, params, workers=N).bytes_sent + 6  # the loss


def test_a_step_takes_other_arguments():
  """By any name; one that it knows takes the place of its own."""

  def update(updates, state, params=None, *, value, shift, **others):
    del params, others
    return jax.tree.map(lambda u: 0 * u + value + shift, updates), state

  tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
  params, state, mesh = started(tx := optax.chain(dense, tx))
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  given = {"value": jnp.float32(2), "shift": jnp.float32(1)}
  before = np.array(params["w"])
  params, *_ = step(params, state, problem()[1], extra_args=given)
  np.testing.assert_allclose(params["w"], before + 3, rtol=1e-6)


@pytest.mark.parametrize("mode", ["explain", *slow("inspect")])
def test_reports_know_optimizers_that_want_a_loss(mode):
  tx = optax.chain(dense, optax.polyak_sgd())
  if mode == "explain":
    assert gradcomp.explain(tx, problem()[0], workers=N).bytes_sent > 0
    return
  params, state, mesh = started(tx)
  step = gradcomp.make_train_step(loss_fn, tx, axis_name="data", mesh=mesh)
  *_, metrics = step(params, state, problem()[1], inspect=True)
  assert metrics["inspection"].total.gradient_norm > 0


injected = lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
SET = {
  "zero": zeroed(injected()),
  "local_steps": local(injected(), every=1),
  "outer": local(optax.sgd(0.1), injected(), every=1),
  "skip": skipped(injected()),
  "switch": switched(injected()),
  "frozen": frozen(injected()),
}


@pytest.mark.parametrize(
  "name", ["zero", "local_steps", *slow("outer", "skip", "switch", "frozen")]
)
def test_a_rate_that_is_set_by_hand_reaches_the_optimizer(name):
  """As optax documents it: between two steps, or after a restore."""
  half = lambda state: optax.tree.set(state, learning_rate=jnp.float32(0.05))
  ours, *_ = train(SET[name], change=half, steps=2)
  expected = plainly(optax.sgd(0.05 if name != "outer" else 0.005), steps=2)
  np.testing.assert_allclose(ours["w"], expected["w"], atol=1e-6)


def plain_jit(tx, params, state, x):
  @jax.jit
  def step(params, state, x):
    loss, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, x)
    updates, state = tx.update(grads, state, params, value=loss, grad=grads)
    return optax.apply_updates(params, updates), state

  mesh = modes.mesh(N, AxisType.Explicit)
  with jax.set_mesh(mesh):
    return step(params, state, jax.device_put(x, P("data")))


@pytest.mark.parametrize("name", ["local_steps", *slow("zero", "skip")])
def test_it_does_so_in_plain_jit(name):
  tx = SET[name]
  params, state, _ = started(tx)
  state = optax.tree.set(state, learning_rate=jnp.float32(0.05))
  params, _ = plain_jit(tx, params, state, problem()[1])
  expected = plainly(optax.sgd(0.05), steps=1)
  np.testing.assert_allclose(params["w"], expected["w"], atol=1e-6)


def test_a_map_of_ones_own_wants_a_rate_for_each_worker():
  _, state, _ = started(SET["local_steps"])
  state = optax.tree.set(state, learning_rate=jnp.float32(0.05))
  parts = ("learning_rate", "number for each worker", "jnp.full")
  with pytest.raises(ValueError, match=says(*parts)):
    gradcomp.state_specs(state, axis_name="data")


@pytest.mark.parametrize(
  "tx",
  [
    pytest.param(optax.chain(dense, optax.contrib.prodigy())),
    *slow(
      (local(optax.sgd(0.1), optax.contrib.prodigy()),),
      (optax.chain(dense, optax.contrib.prodigy(), optax.contrib.prodigy()),),
    ),
  ],
)
def test_what_is_donated_twice_is_copied(tx):
  """The optimizer keeps the parameters' own arrays; it ended the process once."""
  params, state, mesh = started(tx)
  held = {id(x) for x in jax.tree.leaves(state)}
  assert held & {id(x) for x in jax.tree.leaves(params)}
  with_start = lambda params, x, start: loss_fn(params, x) + start["v"]
  step = gradcomp.make_train_step(with_start, tx, axis_name="data", mesh=mesh)
  params, state, _ = step(params, state, problem()[1], params)
  step(params, state, problem()[1], params)


def test_what_is_donated_twice_is_copied_on_one_device():
  params, x = jax.tree.map(jnp.asarray, problem())
  tx = optax.contrib.prodigy()
  step = gradcomp.make_train_step(loss_fn, tx, axis_name=None)
  state = tx.init(params)
  for _ in range(2):
    params, state, _ = step(params, state, x)


def test_what_shares_a_buffer_with_a_donated_array_is_copied():
  """JAX's ``device_put`` to the same places in other words returns such an array."""
  mesh, (params, x) = modes.mesh(1, AxisType.Auto), problem()
  place = lambda w, *spec: jax.device_put(w, NamedSharding(mesh, P(*spec)))
  kept = place(params["w"])
  params = {"w": place(kept, None, None), "v": place(params["v"])}
  start = place(kept, None)
  assert params["w"] is not kept and start is not kept
  loss = lambda params, x, start: loss_fn(params, x) + jnp.sum(start)
  keep = optax.GradientTransformation(lambda p: kept, lambda u, s, p=None: (u, s))
  tx = optax.chain(keep, optax.sgd(0.1))
  step = gradcomp.make_train_step(loss, tx, axis_name=None)
  _, state, _ = step(params, tx.init(params), x, start)
  np.testing.assert_array_equal(state[0], problem()[0]["w"])


STATIC = ("bits", "bucket_size", "refit_every", "min_leaf_size")


def of_rate(make):
  return optax.inject_hyperparams(make)(rate=0.1)


options = dict(bits=8, min_leaf_size=0, axis_name="data", key=3)
plain_key = gradcomp.qsgd(**options)
injected_key = optax.inject_hyperparams(gradcomp.qsgd, static_args=STATIC)(**options)


# Around zero and local steps, numbers of an Explicit mesh would be in closures, which
# JAX refuses: see tests/training/test_closures.py.
@pytest.mark.parametrize(
  "kind, tx, expected",
  [
    *((kind, injected_key, plain_key) for kind in (AxisType.Explicit, AxisType.Auto)),
    (
      AxisType.Auto,
      of_rate(lambda rate: zeroed(optax.adam(rate))),
      zeroed(optax.adam(0.1)),
    ),
    *slow(
      (
        AxisType.Auto,
        of_rate(lambda rate: local(optax.adam(rate), every=1)),
        local(optax.adam(0.1), every=1),
      ),
      (
        AxisType.Auto,
        of_rate(lambda rate: local(optax.sgd(0.1), optax.sgd(rate), every=1)),
        local(optax.sgd(0.1), optax.sgd(0.1), every=1),
      ),
      *(
        (
          kind,
          of_rate(lambda rate: skipped(optax.sgd(rate))),
          skipped(optax.sgd(0.1)),
        )
        for kind in (AxisType.Explicit, AxisType.Auto)
      ),
    ),
  ],
  ids=["qsgd", "qsgd_auto", "zero", "local", "outer", "skip", "skip_auto"],
)
def test_numbers_are_injected_around_an_exchange(kind, tx, expected):
  """The state is made under the mesh, where each number is an array of it."""
  params, state, _ = started(tx, kind)
  _, plain, _ = started(expected, kind)
  same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), state.inner_state, plain)
  assert all(jax.tree.leaves(same))
  if kind == AxisType.Explicit:
    ours, _ = plain_jit(tx, params, state, problem()[1])
    theirs, _ = plain_jit(expected, params, plain, problem()[1])
  else:
    ours, *_ = train(tx, kind=kind)
    theirs, *_ = train(expected, kind=kind)
  np.testing.assert_allclose(ours["w"], theirs["w"], atol=1e-6)
