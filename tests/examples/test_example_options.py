"""The options of both trainers: averages, schedules, clipping, decay, and names."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import image_classification, language_model
from examples.lib import comparisons, methods, telemetry
from examples.lib.methods import METHODS, make_optimizer

BOTH = (image_classification, language_model)


def options(*given, main=image_classification):
  parser = main.make_parser()
  return comparisons.complete(parser, parser.parse_args(list(map(str, given))))


def test_the_average_is_that_of_numpy():
  """Weights of decay ** age, divided by their sum, in doubles."""
  tx, params = methods.average_params(0.9), {"w": jnp.array([1.0, -2.0])}

  def step(carry, update):
    params, state = carry
    same, state = tx.update({"w": update * jnp.ones(2)}, state, params)
    params = optax.apply_updates(params, same)
    return (params, state), (params["w"], methods.averaged(state, params)["w"])

  moves = np.random.default_rng(0).standard_normal(40).astype(np.float32)
  start = params, tx.init(params)
  _, (each, means) = jax.jit(lambda: jax.lax.scan(step, start, moves))()
  each = np.asarray(each, np.float64)
  np.testing.assert_allclose(np.diff(each[:, 0]), moves[1:], atol=1e-5)
  weights = 0.9 ** np.arange(40.0)
  expected = [np.average(each[t::-1], 0, weights[: t + 1]) for t in range(40)]
  # Forty steps, each rounded in float32 next to parameters of up to ten.
  np.testing.assert_allclose(means, expected, rtol=1e-5, atol=1e-5)
  state = optax.adam(0.1).init(params)
  assert methods.averaged(state, params) is params
  assert methods.observe(state, 1.0) is state
  for decay in (0.0, 1.0, -1.0):
    with pytest.raises(ValueError, match=r"`decay` must be in \(0, 1\), got"):
      methods.average_params(decay)


def test_schedules_have_the_values_of_their_formulas():
  steps = np.arange(0, 101, 25)
  given = ("--steps", 100, "--learning-rate", 0.4, "--schedule")
  at = lambda name: methods.make_schedule(options(*given, name))
  cosine = 0.4 * (1 + np.cos(np.pi * steps / 100)) / 2
  np.testing.assert_allclose(at("cosine")(steps), cosine, atol=1e-7)
  root = 0.4 * np.sqrt(1 - steps / 100)
  np.testing.assert_allclose([at("polynomial")(t) for t in steps], root, atol=1e-7)
  assert at("constant") == at("plateau") == 0.4


def test_a_plateau_halves_the_rate():
  """After three losses in a row that are not a thousandth below the least so far."""
  tx, one = optax.chain(optax.sgd(1.0), methods.scale_by_plateau()), jnp.ones(())
  state, scales = jax.jit(tx.init)(one), []
  for loss in (5.0, 4.0, 4.1, 3.9999, 4.0, 3.0, 3.5, 3.5, 2.0, 2.0, 2.0, 2.0):
    update, state = tx.update(one, methods.observe(state, loss), one)
    scales.append(-float(update))
  assert scales == [1.0] * 4 + [0.5] * 7 + [0.25]


# Of two workers, whose mean has the norm 5.
PARAMS = {"w": jnp.array([[1.0, -2.0]]), "b": jnp.array([3.0])}
OWN = np.float32([[3, 0, 2], [5, 0, 4]])
GRADS = {"w": OWN[:, None, :2], "b": OWN[:, 2:]}
MEAN, DECAYED = OWN.mean(axis=0), 0.1 * np.array([1.0, -2, 0])
UNIT = (OWN / np.linalg.norm(OWN, axis=1, keepdims=True)).mean(axis=0)
SGD = "--learning-rate 1 --schedule constant"
# Method, options, steps, and the descent of the last of them by hand.
DESCENTS = [
  ("f32", "--momentum 0 --clip 1", 1, MEAN / 5),
  ("f32", "--momentum 0 --clip 10", 1, MEAN),
  ("f32", "--no-nesterov", 1, MEAN),
  ("f32", "--nesterov", 1, 1.9 * MEAN),
  # A worker's norm may be 1, and momentum is in the exchange alone: 1 + 0.9 and 1.
  ("redsync", "--density 0.9 --clip 1", 2, 1.9 * UNIT),
  # Of weights, and not of biases.
  ("f32", "--momentum 0 --weight-decay 0.1", 1, MEAN + DECAYED),
  ("f32", "--optimizer adam --weight-decay 0.1", 1, np.sign(MEAN) + DECAYED),
]


@pytest.mark.parametrize("name, given, count, expected", DESCENTS)
def test_descents_are_those_of_their_options(name, given, count, expected):
  args = options(*SGD.split(), *given.split())
  optimizer = make_optimizer(METHODS[name], args, language_model.compressed, seed=0)

  def worker(grads):
    state = optimizer.init(PARAMS)
    for _ in range(count):
      updates, state = optimizer.update(grads, state, PARAMS)
    return updates

  out = jax.device_get(jax.jit(jax.vmap(worker, axis_name="data"))(GRADS))
  found = np.concatenate([out["w"].reshape(2, -1), out["b"]], axis=1)
  np.testing.assert_array_equal(found[0], found[1])
  np.testing.assert_allclose(found[0], -expected, rtol=1e-5, atol=1e-6)


def test_all_options_together_are_one_chain():
  given = ["--ema", 0.9, "--schedule", "plateau", "--clip", 1, "--weight-decay", 0.1]
  for main, name in itertools.product(BOTH, ("f32", "qsgd-4", "redsync", "none")):
    args = options(*given, main=main)
    optimizer = make_optimizer(METHODS[name], args, main.compressed, seed=0)
    init = jax.vmap(lambda _, tx=optimizer: tx.init(PARAMS), axis_name="data")
    state = jax.eval_shape(init, jnp.arange(2))
    assert methods.averaged(state, None).keys() == PARAMS.keys()
    assert optax.tree.get(state, "plateau").scale.dtype == jnp.float32


def test_both_trainers_have_one_command_line():
  names = lambda main: {x.option_strings[-1]: x for x in main.make_parser()._actions}
  images, texts = map(names, BOTH)
  assert images.keys() - texts.keys() == {"--dataset", "--data-dir"}
  own = {"--text", "--length", "--parallel", "--grads", "--weights", "--scan"}
  assert texts.keys() - images.keys() == own
  for name in images.keys() & texts.keys() - {"--model"}:
    assert images[name].choices == texts[name].choices
    assert images[name].type == texts[name].type
  for optimizer, rates in (("sgd", (0.05, 2.0)), ("adam", (1e-3, 2e-3))):
    made = [options("--optimizer", optimizer, main=main) for main in BOTH]
    assert tuple(x.learning_rate for x in made) == rates


def test_the_last_step_of_a_round_is_inspected():
  """Not the first step, or each so many on: no other step sends anything."""
  for every, steps in ((10, 1), (6, 4), (2, 5), (5, 5), (1, 3)):
    log = telemetry.Log(every, round_steps=steps)
    taken = [number for number in range(1, 61) if log.takes(number)]
    expected = {-(-number // steps) * steps for number in range(1, 61, every)}
    assert taken == sorted(expected)
    assert len(taken) == 60 // max(every, steps)
    assert not telemetry.Log(round_steps=steps).takes(steps)
