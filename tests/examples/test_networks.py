"""The examples' networks: sizes, dropout, batch norm, and that they learn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from examples.lib import networks
from examples.lib.calling import functions
from examples.lib.training import Task

MNIST, DIGITS = (28, 28, 1), (8, 8, 1)
# Of images of MNIST and of digits, and of ASCII. The docstrings say them.
COUNTS = {
  "lenet": (3_794_314, 845_194),
  "resnet": (1_229_770, 1_229_770),
  "mlp": (1_863_690, 1_126_410),
  "vgg": (1_144_554, 620_266),
  "alexnet": (3_018_410, 1_543_850),
  "gru": 345_728,
  "lstm": 1_083_520,
  "transformer": 410_240,
}
DROPPING = {"mlp", "vgg", "alexnet", "lstm"}


def image_network(name, shape=DIGITS, **sizes):
  images = np.random.default_rng(0).integers(256, size=(4, *shape)).astype(np.uint8)
  network = functools.partial(networks.IMAGES[name], shape, 10, **sizes)
  return functions(network, images), images


def text_network(name, symbols=128, **sizes):
  tokens = np.random.default_rng(0).integers(symbols, size=(2, 5)).astype(np.uint8)
  network = networks.TEXTS[name]
  if issubclass(network, linen.Module):
    return functions(network(symbols, **sizes), tokens), tokens
  return functions(functools.partial(network, symbols, **sizes), tokens), tokens


def sizes_of(network, inputs):
  """The number of parameters and the shape of the logits, without computing any."""
  key = jax.random.key(0)
  params = jax.eval_shape(network.init, key)
  logits = jax.eval_shape(network.train, params, inputs, key)
  if network.statistics:
    kept = jax.eval_shape(network.statistics, params, inputs)
    assert jax.eval_shape(network.test, params, kept, inputs) == logits
  assert logits.dtype == jnp.float32
  return sum(x.size for x in jax.tree.leaves(params)), logits.shape


@pytest.mark.parametrize("name", networks.IMAGES)
def test_image_networks_have_the_sizes_they_say(name):
  for shape, count in zip((MNIST, DIGITS), COUNTS[name], strict=True):
    network, images = image_network(name, shape)
    assert sizes_of(network, images) == (count, (4, 10))
    assert network.drops == (name in DROPPING)
  # Other sizes, and color.
  assert sizes_of(*image_network(name, (11, 9, 3)))[1] == (4, 10)


@pytest.mark.parametrize("name", networks.TEXTS)
def test_text_networks_have_the_sizes_they_say(name):
  network, tokens = text_network(name)
  assert sizes_of(network, tokens) == (COUNTS[name], (2, 5, 128))
  assert network.drops == (name in DROPPING)


@pytest.mark.parametrize("network", [networks.LSTM, networks.Transformer])
def test_words_cost_their_embedding_once(network):
  """The output layer is the embedding: 100 words more are 100 rows more."""
  name = network.__name__.lower()
  counts = [sizes_of(*text_network(name, n, width=32))[0] for n in (100, 200)]
  bias = 100 if name == "lstm" else 0
  assert counts[1] - counts[0] == 100 * 32 + bias


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def test_lstm_is_that_of_numpy():
  """Hochreiter and Schmidhuber's cells with forget gates, in doubles."""
  network, tokens = text_network("lstm", 16, width=3, dropout=0.0)
  params = jax.jit(network.init)(jax.random.key(0))
  got = jax.jit(network.train)(params, tokens, None)
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))
  x = p["embed"]["embedding"][tokens]
  for layer in p["layers"].values():
    state, cell = np.zeros((2, 2, 3))
    out = []
    for t in range(x.shape[1]):
      gates = x[:, t] @ layer["inputs"]["kernel"] + state @ layer["recurrent"]["kernel"]
      i, f, o, g = np.split(gates + layer["recurrent"]["bias"], 4, axis=-1)
      cell = sigmoid(f + 1) * cell + sigmoid(i) * np.tanh(g)
      state = sigmoid(o) * np.tanh(cell)
      out.append(state)
    x = np.stack(out, axis=1)
  expected = x @ p["embed"]["embedding"].T + p["bias"]
  # float32 over ten steps of states below 1.
  np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


SMALL = {
  "mlp": functools.partial(image_network, "mlp", hidden=64),
  "lstm": functools.partial(text_network, "lstm", 16, width=8),
  "transformer": functools.partial(
    text_network, "transformer", 16, width=8, heads=2, layers=1
  ),
}


@pytest.mark.parametrize("name", SMALL)
def test_dropout_draws_from_the_key_and_leaves_tests_alone(name):
  dropping, inputs = SMALL[name](dropout=0.5)
  plain, _ = SMALL[name](dropout=0.0)
  assert dropping.drops and not plain.drops

  @jax.jit
  def logits():
    params = plain.init(jax.random.key(0))
    keys = [jax.random.key(i) for i in (1, 1, 2)]
    return (
      [dropping.train(params, inputs, key) for key in keys],
      [x.test(params, None, inputs) for x in (dropping, plain)],
      plain.train(params, inputs, None),
    )

  (one, again, other), tests, trained = logits()
  assert np.array_equal(one, again)
  assert not np.allclose(one, other) and not np.allclose(one, trained)
  for test in tests:
    assert np.array_equal(test, trained)


def test_dropout_without_a_key_is_an_error():
  network, images = SMALL["mlp"]()
  params = jax.eval_shape(network.init, jax.random.key(0))
  with pytest.raises(ValueError, match="no `rngs` argument was provided to Dropout"):
    jax.eval_shape(network.train, params, images, None)


def test_mlp_drops_two_thirds_as_many_pixels_as_units():
  """The first layer is the identity of 64 pixels, which none of them makes zero."""
  network, images = SMALL["mlp"](dropout=0.3)
  images = np.full((400, *DIGITS), 255, np.uint8)
  params = jax.jit(network.init)(jax.random.key(0))
  params["dense1"]["kernel"][...] = jnp.eye(64)
  params["dense2"]["kernel"][...] = jnp.eye(64)
  params["head"]["kernel"][...] = jnp.tile(jnp.eye(10), (7, 1))[:64] * (
    jnp.arange(64)[:, None] < 10
  )
  kept = np.asarray(jax.jit(network.train)(params, images, jax.random.key(1)))
  # A unit of 1 is there with probability 0.8 * 0.7 * 0.7, as large as its inverse.
  p, n = 0.8 * 0.7 * 0.7, kept.size
  assert set(np.unique(kept.round(4))) == {0, np.float32(1 / p).round(4)}
  assert abs((kept > 0).mean() - p) < 5 * np.sqrt(p * (1 - p) / n)


@pytest.fixture(scope="module")
def normed():
  """AlexNet's logits of four images: as it trains, and in tests with statistics."""
  network, images = image_network("alexnet", dropout=0.0)

  @jax.jit
  def run(images, known):
    params = network.init(jax.random.key(0))
    kept = network.statistics(params, known)
    return network.train(params, images, None), network.test(params, kept, images), kept

  return run, images


def test_batch_norm_normalizes_by_the_batch_while_it_trains(normed):
  run, images = normed
  trained, tested, kept = run(images, images)
  # With the statistics of the very batch, tests are like training, to float32.
  np.testing.assert_allclose(tested, trained, rtol=1e-4, atol=1e-4)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(kept))


def test_batch_norm_of_tests_does_not_know_the_other_images(normed):
  run, images = normed
  changed = np.concatenate([images[:1], 255 - images[1:]])
  (trained, tested, _), (other_trained, other, _) = (
    run(x, images) for x in (images, changed)
  )
  np.testing.assert_allclose(tested[0], other[0], rtol=1e-5, atol=1e-5)
  assert not np.allclose(trained[0], other_trained[0], atol=1e-2)


def test_batch_norm_without_statistics_is_an_error():
  images = np.zeros((1, *DIGITS), np.uint8)
  network = functools.partial(networks.AlexNet, DIGITS, 10)
  mesh = jax.make_mesh((1,), ("data",))
  with pytest.raises(ValueError, match="`known` must be inputs to train on"):
    Task(network, (images, np.zeros(1, np.int32)), mesh)


def learns(network, inputs, labels, steps, rate=3e-3):
  """Asserts that Adam halves the loss on one batch."""
  adam = optax.adam(rate)

  def loss_fn(params, key):
    logits = network.train(params, inputs, key if network.drops else None)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  def step(carry, key):
    params, state = carry
    loss, grads = jax.value_and_grad(loss_fn)(params, key)
    updates, state = adam.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), loss

  @jax.jit
  def run():
    params = network.init(jax.random.key(0))
    carry = params, adam.init(params)
    return jax.lax.scan(step, carry, jax.random.split(jax.random.key(1), steps))[1]

  losses = np.asarray(run())
  assert np.all(np.isfinite(losses))
  assert losses[-1] < 0.5 * losses[0], losses


def test_mlp_learns():
  network, images = image_network("mlp", hidden=64, dropout=0.1)
  learns(network, images, np.arange(4), steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg", "alexnet", "lenet", "resnet"])
def test_convolutions_learn(name):
  # AlexNet jumps at the rate of the others, to 3.8 from 0.2 two steps before.
  rate = 1e-3 if name == "alexnet" else 3e-3
  learns(*image_network(name), np.arange(4), steps=12, rate=rate)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_recurrent_nets_learn(name):
  sizes = (
    {"width": 32, "dropout": 0.1} if name == "lstm" else {"width": 8, "hidden": 32}
  )
  network, tokens = text_network(name, 16, **sizes)
  learns(network, tokens, tokens.astype(np.int32)[:, ::-1], steps=150)
