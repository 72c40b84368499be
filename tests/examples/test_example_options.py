"""The options of both trainers: averages, schedules, clipping, decay, and names."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import image_classification, language_model
from examples.lib import command_line, comparison, plateau, telemetry
from examples.lib.averaging import average_params, averaged
from examples.lib.calling import functions
from examples.lib.methods import METHODS, Redsync
from examples.lib.networks import DROPPING, IMAGES, TEXTS, for_images, for_text
from examples.lib.optimizers import make_optimizer, make_schedule, weights

BOTH = (image_classification, language_model)


def options(*given, main=image_classification):
  """The namespace of a command line."""
  parser = main.make_parser()
  args = parser.parse_args(list(map(str, given)))
  return command_line.complete(parser, args, main.DEFAULTS)


@pytest.mark.parametrize("decay", [0.5, 0.999, 0.9999])
def test_the_average_is_that_of_numpy(decay):
  """Weights of decay ** age, divided by their sum, in doubles."""
  params = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}
  tx = average_params(decay)

  def step(carry, update):
    params, state = carry
    updates = jax.tree.map(lambda x: update * jnp.ones_like(x), params)
    same, state = tx.update(updates, state, params)
    params = optax.apply_updates(params, same)
    return (params, state), (params, averaged(state, params))

  moves = np.random.default_rng(0).standard_normal(40).astype(np.float32)
  carry = params, tx.init(params)
  _, (each, means) = jax.jit(functools.partial(jax.lax.scan, step))(carry, moves)
  for name in params:
    p, got = np.asarray(each[name], np.float64), np.asarray(means[name])
    np.testing.assert_allclose(
      np.diff(p, axis=0)[:, ..., None].ravel()[0], moves[1], rtol=1e-5
    )
    for t in range(40):
      weight = decay ** np.arange(t, -1, -1.0)
      expected = np.tensordot(weight, p[: t + 1], 1) / weight.sum()
      # Forty steps, each rounded in float32 next to parameters of up to ten.
      np.testing.assert_allclose(got[t], expected, rtol=1e-5, atol=1e-5)


def test_a_state_without_an_average_shows_the_parameters():
  params = {"w": jnp.ones(2)}
  state = optax.adam(0.1).init(params)
  assert averaged(state, params) is params
  chained = optax.chain(optax.adam(0.1), average_params(0.9))
  _, state = chained.update(params, chained.init(params), params)
  assert jax.tree.all(jax.tree.map(np.array_equal, averaged(state, None), params)) is (
    False
  )


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0])
def test_a_decay_that_is_no_share_is_refused(decay):
  with pytest.raises(ValueError, match=r"`decay` must be in \(0, 1\), got"):
    average_params(decay)


def test_schedules_have_the_values_of_their_formulas():
  steps = np.arange(0, 101, 25)
  at = lambda name: make_schedule(
    options("--schedule", name, "--steps", 100, "--learning-rate", 0.4)
  )
  cosine = 0.4 * (1 + np.cos(np.pi * steps / 100)) / 2
  np.testing.assert_allclose(at("cosine")(steps), cosine, atol=1e-7)
  root = 0.4 * np.sqrt(1 - steps / 100)
  np.testing.assert_allclose([at("polynomial")(t) for t in steps], root, atol=1e-7)
  assert at("constant") == at("plateau") == 0.4


def test_a_plateau_halves_the_rate():
  """After three losses in a row that are not a thousandth below the least so far."""
  tx = optax.chain(optax.sgd(1.0), plateau.scale_by_plateau())
  params = {"w": jnp.ones(2)}
  state = jax.jit(tx.init)(params)
  scales = []
  for loss in (5.0, 4.0, 4.1, 3.9999, 4.0, 3.0, 3.5, 3.5, 2.0, 2.0, 2.0, 2.0):
    state = plateau.observe(state, loss)
    updates, state = tx.update(params, state, params)
    scales.append(-float(updates["w"][0]))
  assert scales == [1.0] * 4 + [0.5] * 7 + [0.25]


def test_other_states_do_not_observe():
  state = optax.sgd(0.1).init({"w": jnp.ones(2)})
  assert plateau.observe(state, 1.0) is state


WORKERS = 2


def updates_of(args, method, grads, params, count=1):
  """The updates of the last of some steps with the same gradients."""
  optimizer = make_optimizer(method, args, seed=0)

  def worker(grads):
    state = optimizer.init(params)
    for _ in range(count):
      updates, state = optimizer.update(grads, state, params)
    return updates

  out = jax.jit(jax.vmap(worker, axis_name="data"))(grads)
  first, second = (jax.tree.map(lambda x, i=i: np.asarray(x[i]), out) for i in range(2))
  jax.tree.map(np.testing.assert_array_equal, first, second)
  return first


PARAMS = {"w": jnp.array([[1.0, -2.0]]), "b": jnp.array([3.0])}
GRADS = {
  "w": np.array([[[3.0, 0]], [[5.0, 0]]], np.float32),
  "b": np.float32([[2], [4]]),
}
PLAIN = ("--momentum", 0, "--learning-rate", 1, "--schedule", "constant")


def test_the_norm_of_the_mean_is_clipped():
  """Its parts are 4 and 3, so the norm is 5."""
  f32 = METHODS["f32"]
  for clip, factor in ((1, 0.2), (10, 1)):
    got = updates_of(options(*PLAIN, "--clip", clip), f32, GRADS, PARAMS)
    np.testing.assert_allclose(got["w"], [[-4 * factor, 0]], rtol=1e-6)
    np.testing.assert_allclose(got["b"], [-3 * factor], rtol=1e-6)


def test_redsync_clips_each_worker_and_has_its_momentum_once():
  """A worker's norm may be 1. Two steps add up to 1 + 0.9 and 1."""
  given = ["--learning-rate", 1, "--schedule", "constant", "--density", 0.9]
  args = options(*given, "--clip", 1)
  got = updates_of(args, Redsync(), GRADS, PARAMS, count=2)
  parts = [np.array([3, 0, 2.0]), np.array([5, 0, 4.0])]
  mean = sum(x / np.linalg.norm(x) for x in parts) / 2
  found = np.concatenate([got["w"].ravel(), got["b"]])
  np.testing.assert_allclose(found, -1.9 * mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_weights_decay_and_biases_do_not(optimizer):
  assert weights(PARAMS) == {"w": True, "b": False}
  args = [*PLAIN, "--optimizer", optimizer]
  none = METHODS["none"]
  plain = updates_of(options(*args), none, GRADS, PARAMS)
  decayed = updates_of(options(*args, "--weight-decay", 0.1), none, GRADS, PARAMS)
  np.testing.assert_allclose(
    decayed["w"] - plain["w"], -0.1 * np.asarray(PARAMS["w"]), rtol=1e-5
  )
  np.testing.assert_array_equal(decayed["b"], plain["b"])


def test_nesterov_looks_ahead():
  args = ("--learning-rate", 1, "--schedule", "constant")
  f32 = METHODS["f32"]
  for given, factor in (("--no-nesterov", 1), ("--nesterov", 1.9)):
    got = updates_of(options(*args, given), f32, GRADS, PARAMS)
    np.testing.assert_allclose(got["b"], [-3 * factor], rtol=1e-6)


def test_all_options_together_are_one_chain():
  """The average and the plateau are found in the state of any method."""
  given = ["--ema", 0.9, "--schedule", "plateau", "--clip", 1, "--weight-decay", 0.1]
  for main, name in itertools.product(BOTH, ("f32", "qsgd-4", "redsync", "none")):
    args = options(*given, main=main)
    optimizer = make_optimizer(METHODS[name], args, seed=0)
    init = jax.vmap(lambda _, tx=optimizer: tx.init(PARAMS), axis_name="data")
    state = jax.eval_shape(init, jnp.arange(WORKERS))
    assert averaged(state, None).keys() == PARAMS.keys()
    assert optax.tree.get(state, "plateau").scale.dtype == jnp.float32


def test_both_trainers_have_one_command_line():
  def names(main):
    actions = main.make_parser()._actions
    return {x.option_strings[-1]: x for x in actions if x.option_strings}

  images, texts = map(names, BOTH)
  assert images.keys() - texts.keys() == {"--dataset", "--data-dir"}
  assert texts.keys() - images.keys() == {
    "--text",
    "--length",
    "--parallel",
    "--grads",
    "--weights",
    "--scan",
  }
  for name in images.keys() & texts.keys() - {"--model"}:
    assert images[name].choices == texts[name].choices
    assert images[name].type == texts[name].type
  for name in ("--codec", "--compare"):
    assert {"f32", "qsgd-4", "powersgd-2", "redsync-asq"} <= set(images[name].choices)


def test_rates_are_those_of_the_optimizer():
  for main, sgd, adam in ((*BOTH[:1], 0.05, 1e-3), (*BOTH[1:], 2.0, 2e-3)):
    assert options(main=main).learning_rate == sgd
    assert options("--optimizer", "adam", main=main).learning_rate == adam
    assert options("--learning-rate", 0.3, main=main).learning_rate == 0.3


def test_dropout_is_that_of_the_option():
  images = np.zeros((1, 8, 8, 1), np.uint8)
  for name in {*IMAGES, *TEXTS} & set(DROPPING):
    make = functools.partial(for_text, name, 16)
    inputs = np.zeros((1, 2), np.uint8)
    if name in IMAGES:
      make, inputs = functools.partial(for_images, name, (8, 8, 1), 10), images
    assert functions(make(dropout=0.5), inputs).drops
    assert not functions(make(dropout=0.0), inputs).drops


@pytest.mark.parametrize("codec, momentum", [("blocktop", False), ("qsgd-4", True)])
def test_local_steps_are_sparseloco_or_diloco(codec, momentum):
  """Outer momentum stands in for what the residual of a sparse codec does."""
  given = ("--codec", codec, "--local-steps", 2, "--optimizer", "adam", "--ema", 0.5)
  tx = make_optimizer(METHODS[codec], options(*given), seed=0)
  params = {"w": jnp.ones(300)}

  def worker(target):
    state = tx.init(params)
    moved = []
    for _ in range(2):
      updates, state = tx.update({"w": params["w"] - target}, state, params)
      moved.append(updates["w"])
    return moved, state

  moved, state = jax.vmap(worker, axis_name="data")(jnp.array([2.0, 3.0]))
  assert not np.any(moved[0]) and np.any(moved[1])
  outer = state[0].fragments[0].outer_state
  assert bool(jax.tree.leaves(outer)) == momentum


@pytest.mark.parametrize("every, steps", [(10, 1), (6, 4), (2, 5), (5, 5), (1, 3)])
def test_the_last_step_of_a_round_is_inspected(every, steps):
  """In place of the first step, and of each so many on: no other step sends anything.

  A run has as many inspections as it has such steps, or rounds if these are fewer.
  """
  log = telemetry.Log(every, round_steps=steps)
  taken = [number for number in range(1, 61) if log.takes(number)]
  expected = {-(-number // steps) * steps for number in range(1, 61, every)}
  assert taken == sorted(expected)
  assert len(taken) == 60 // max(every, steps)
  assert not telemetry.Log(round_steps=steps).takes(steps)


def test_trainers_inspect_by_the_rounds_of_local_steps(monkeypatch, capsys):
  wire = types.SimpleNamespace(bytes_sent=64, dense_bytes=64)
  monkeypatch.setattr(comparison, "compile_step", lambda *_: (None, wire))
  monkeypatch.setattr(comparison, "compile_inspecting", lambda *_: None)
  params = lambda seed: {"w": jnp.zeros(8)}
  task = types.SimpleNamespace(init_params=params, mesh=types.SimpleNamespace(size=2))
  for given, expected in (([], [1, 7, 13, 19]), (["--local-steps", 4], [4, 8, 16, 20])):
    args = options("--codec", "f32", "--inspect", 6, *given)
    log = comparison.prepare(METHODS["f32"], task, None, args).log
    assert [number for number in range(1, 24) if log.takes(number)] == expected
  assert "a round of 4 steps" in capsys.readouterr().out
