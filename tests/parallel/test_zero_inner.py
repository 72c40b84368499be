"""Zero and local steps inside and around others are as without them, or refused."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import gradcomp
from gradcomp.codecs import QSGD, Dense
from gradcomp.parallel import zero
from tests.plugins.slow_cases import one_in
from tests.support.assertions import says
from tests.support.cases import inner as cases
from tests.support.cases.inner import CODECS, LOOKING, PLAIN, WHOLE, N, assert_close

SGD = optax.sgd(0.3)
NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)
OVER = dict(codec=Dense(), axis_name="data")
local_steps = functools.partial(gradcomp.local.local_steps, **OVER)
local = functools.partial(local_steps, SGD, optax.sgd(1.0), every=2)
on_all = lambda f: jax.jit(jax.vmap(f, axis_name="data"))
of = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)


@pytest.mark.parametrize("name", [*one_in(7, PLAIN), *one_in(8, LOOKING)])
def test_zero_is_the_optimizer_inside(name):
  """With float32 both ways. Masks and labels see the leaves, and not their rows."""
  inner = (PLAIN | LOOKING)[name]
  assert_close(cases.train(zero(inner, **CODECS)), cases.plain(inner))


GRID = {name: np.ones(shape, np.float32) for name, shape in cases.SHAPES.items()}
scaled = optax.stateless(lambda g, _: jax.tree.map(jnp.multiply, g, GRID))
mixed = optax.stateless(lambda g, _: g | {"kernel": g["kernel"] + g["one"]})
MIXING = {name: (WHOLE[name], [cases.REFUSED[name]]) for name in WHOLE} | {
  # All owners would draw the same, as rows have one shape and one key.
  "noise": (cases.NOISE, ["at random", "add_noise"]),
  "another shape": (scaled, ["another array"]),
  "leaves": (mixed, ["treat each", "['one']"]),
}


@pytest.mark.parametrize("name", MIXING)
def test_zero_refuses_what_needs_more_than_an_element(name):
  inner, words = MIXING[name]
  tx = zero(inner, **CODECS)
  with pytest.raises(ValueError, match=says("`inner` must", *words)):
    jax.eval_shape(on_all(lambda x: tx.update(x, tx.init(x), x)), cases.targets())


@pytest.mark.parametrize("name", one_in(60, [*LOOKING, *PLAIN, *WHOLE]))
def test_local_steps_are_those_of_the_optimizer_inside(name):
  inner = (PLAIN | LOOKING | WHOLE)[name]
  expected = cases.by_hand(cases.rounds(inner), lambda state: state[1])
  assert_close(cases.train(local_steps(inner, optax.sgd(1.0), every=2), 4), expected)


def states(tx, params):
  """The shapes of the states of all workers."""
  each = jax.tree.map(lambda x: of(N, *x.shape), params)
  return jax.eval_shape(on_all(tx.init), each)


def test_an_owner_has_rows_of_each_leaf_and_all_share_two_messages():
  """A tile of 512 elements is a row. Three rows are filled up to two a worker."""
  params = {"w": of(8, 512), "v": of(3, 512), "b": of(512)}
  codecs = dict.fromkeys(("grads", "params"), QSGD(bits=4, bucket_size=64))
  tx = zero(LOOKING["mask by rank"], **codecs, axis_name="data", min_leaf_size=0)
  mu = states(tx, params).inner_state[0].mu
  shapes = {name: x.arrays["data",].shape for name, x in mu.items()}
  assert shapes == {x: (N, n, 8, 64) for x, n in {"w": 4, "v": 2, "b": 1}.items()}
  assert gradcomp.explain(tx, params, workers=N).messages == 1


def test_what_has_rows_only_where_its_mask_is_true():
  inner = optax.masked(optax.trace(0.9), {"w": True, "b": False})
  state = states(zero(inner, **CODECS), {"w": of(256), "b": of(128)})
  held = state.inner_state.inner_state.trace
  assert held["w"].arrays["data",].shape == (N, 1, 1, 128)
  assert held["b"] == optax.MaskedNode()


def complex_run(tx):
  params = {"w": np.ones((N, 130), np.complex64), "b": np.ones((N, 3), np.float32)}
  grads = {"w": params["w"] * (3 + 0.1j), "b": params["b"]}
  return on_all(tx.update)(grads, on_all(tx.init)(params), params)[0]


def test_parts_of_complex_numbers_are_treated_alike():
  inner = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, 0.9))
  got = complex_run(zero(inner, **CODECS))
  dense = gradcomp.dense(axis_name="data")
  chex.assert_trees_all_close(got, complex_run(optax.chain(dense, inner)), atol=1e-6)
  # Of optax's moments both parts share one: that of their absolute value.
  with pytest.raises(ValueError, match=says("imaginary part of ['w']", "computes")):
    complex_run(zero(optax.adam(0.1), **CODECS))


# What moves parameters otherwise than the updates that it is given, or only some.
OTHERS = {name: not x for name, x in cases.MASK.items()}
AROUND = {
  "schedule free": lambda tx: contrib.schedule_free(tx, 0.3),
  "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
  "halved": lambda tx: optax.chain(tx, optax.scale(0.5)),
  "decayed": lambda tx: optax.chain(tx, optax.add_decayed_weights(-0.1)),
  "not negative": lambda tx: optax.chain(tx, optax.keep_params_nonnegative()),
  "switched": lambda tx: gradcomp.wrappers.switch([2], [tx, tx]),
  "every second": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
  "masked": lambda tx: optax.chain(
    optax.masked(tx, cases.MASK), optax.masked(optax.set_to_zero(), OTHERS)
  ),
  "partition": lambda tx: optax.partition({True: tx, False: tx}, cases.MASK),
}
# How its parameters are held, and how far local steps inside are from them.
PLACE = {"lookahead": optax.LookaheadParams.init_synced}
SAME = lambda params: params
MOVED = {"lookahead": lambda x: x.fast_state[1], "halved": lambda x: x[0][1]}


@pytest.mark.parametrize("name", AROUND)
def test_zero_goes_on_from_where_parameters_are(name):
  around, place = AROUND[name], PLACE.get(name, SAME)
  got = cases.train(around(zero(SGD, **CODECS)), 4, place)
  assert_close(got, cases.plain(around(SGD), 4, place))


def test_parameters_that_someone_moves_stay_moved():
  """And what was not sent before is sent as it would have been."""
  codec = QSGD(bits=4, bucket_size=64)
  tx = zero(SGD, grads=Dense(), params=codec, axis_name="data", min_leaf_size=0)
  params = np.zeros((N, 300), np.float32)
  grads = np.random.default_rng(0).normal(size=(N, 300)).astype(np.float32)
  update = on_all(tx.update)
  first, state = jax.device_get(update(grads, on_all(tx.init)(params), params))
  stays, moved = (
    np.asarray(update(grads, state, params + first + np.float32(x))[0])
    for x in (0.0, 16.0)
  )
  np.testing.assert_allclose(moved, stays, atol=1e-4)
  assert np.abs(stays + 0.3 * grads.mean(axis=0)).max() > 0.02  # of what waited


@pytest.mark.parametrize("name, displacement", MOVED.items())
def test_local_steps_inside_of_what_moves_parameters(name, displacement):
  around, place = AROUND[name], PLACE.get(name, SAME)
  expected = cases.by_hand(around(cases.rounds(SGD)), displacement, place=place)
  assert_close(cases.train(around(local()), 4, place), expected)


# Of the last one each owner keeps an Nth of the momentum.
OUTER = {
  "schedule free": [contrib.schedule_free(optax.sgd(0.7), 0.7)] * 2,
  "prodigy": [contrib.prodigy(0.5)] * 2,
  "nesterov": [NESTEROV] * 2,
  "zero": [zero(NESTEROV, **CODECS), NESTEROV],
}


@pytest.mark.parametrize("name", one_in(3, OUTER))
def test_what_keeps_parameters_outside_of_local_steps(name):
  outer, expected = OUTER[name]
  by_rounds = cases.by_hand(cases.rounds(SGD, expected), lambda state: state[1])
  assert_close(cases.train(local_steps(SGD, outer, every=2), 4), by_rounds)


BATCHES = np.random.default_rng(0).normal(size=(8, 4, 3)).astype(np.float32)


def trained(tx):
  """The parameters behind eight steps of a train step on two hosts of two chips."""
  mesh, axes = jax.make_mesh((2, 2), ("host", "chip")), ("host", "chip")
  params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
  spec = dict.fromkeys(params, jax.P())
  params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
  with jax.set_mesh(mesh):
    state = gradcomp.init_state(tx, params, axis_name=axes, param_specs=spec)

  def loss_fn(params, x):
    return jnp.mean((params["w"] - x) ** 2) + jnp.mean((params["b"] - x) ** 2)

  step = gradcomp.make_train_step(loss_fn, tx, axis_name=axes, mesh=mesh)
  for x in BATCHES:
    params, state, _ = step(params, state, x)
    jax.block_until_ready(params)
  return jax.device_get(params)


def test_zero_inside_of_local_steps():
  """It is the optimizer behind a dense exchange, on each host."""
  dense = optax.chain(gradcomp.dense(axis_name="chip"), optax.adam(0.1))
  got, expected = (
    trained(local_steps(tx, optax.sgd(1.0), every=4, axis_name="host"))
    for tx in (zero(optax.adam(0.1), **CODECS | {"axis_name": "chip"}), dense)
  )
  chex.assert_trees_all_close(got, expected, rtol=0, atol=1e-5)


def test_local_steps_inside_of_local_steps():
  """Chips average every two steps, and hosts every four: hierarchical local SGD."""
  outer = optax.sgd(1.0)
  chips = local_steps(SGD, outer, every=2, axis_name="chip")
  got = trained(local_steps(chips, outer, every=4, axis_name="host"))
  w, b = np.zeros((2, 2, 3)), np.zeros((2, 2, 1))  # hosts, chips
  for i, x in enumerate(BATCHES):
    x = x.reshape(2, 2, 3)
    w = w - 0.3 * 2 / 3 * (w - x)
    b = b - 0.3 * 2 * (b - x.mean(axis=-1, keepdims=True))
    if i % 2:
      w, b = (np.stack([y.mean(axis=1)] * 2, axis=1) for y in (w, b))
    if i % 4 == 3:
      w, b = (np.stack([y.mean(axis=0)] * 2) for y in (w, b))
  np.testing.assert_allclose(got["w"], w[0, 0], atol=1e-5)
  np.testing.assert_allclose(got["b"], b[0, 0, 0], atol=1e-5)


ADAM = gradcomp.optimizers.adam(0.1, axis_name="data", local=2, warmup=1)


@pytest.mark.parametrize("tx", [local(), ADAM], ids=["free-local", "free-adam"])
def test_what_cannot_be_nested_is_refused(tx):
  """Schedule-free would average parameters that stay where they are for a round."""
  parts = "no optax.contrib.schedule_free around local steps", "`outer`"
  with pytest.raises(ValueError, match=says(*parts)):
    cases.train(AROUND["schedule free"](tx), 1)
