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
from examples.lib.networks import attention, turned
from examples.lib.training import Task
from tests.plugins.slow_cases import slow

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


@pytest.mark.parametrize("name", COUNTS)
def test_networks_have_the_sizes_they_say(name):
  if name in networks.TEXTS:
    network, tokens = text_network(name)
    assert sizes_of(network, tokens) == (COUNTS[name], (2, 5, 128))
  else:
    for shape, count in zip((MNIST, DIGITS), COUNTS[name], strict=True):
      network, images = image_network(name, shape)
      assert sizes_of(network, images) == (count, (4, 10))
    # Other sizes, and color.
    assert sizes_of(*image_network(name, (11, 9, 3)))[1] == (4, 10)
  assert network.drops == (name in DROPPING)
  assert COUNTS.keys() == {*networks.IMAGES, *networks.TEXTS}


def test_words_cost_their_embedding_once():
  """The output layer is the embedding: 100 words more are 100 rows more."""
  for name, bias in (("lstm", 100), ("transformer", 0)):
    few, many = (sizes_of(*text_network(name, n, width=32))[0] for n in (100, 200))
    assert many - few == 100 * 32 + bias


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


def attended(query, key, value):
  """Attention in NumPy's doubles, one query after another."""
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  batch, length, heads, size = query.shape
  out = np.zeros_like(value)
  for b, i, h in np.ndindex(batch, length, heads):
    scores = key[b, : i + 1, h] @ query[b, i, h] / np.sqrt(size)
    weights = np.exp(scores - scores.max())
    out[b, i, h] = weights @ value[b, : i + 1, h] / weights.sum()
  return out.reshape(batch, length, -1)


def test_attention_is_that_of_numpy():
  """A transformer sees no later byte, and turned products depend on the distance."""
  parts = np.random.default_rng(0).standard_normal((3, 2, 5, 3, 4), np.float32)
  query, key = parts.reshape(-1, 6)[:2]
  model = networks.Transformer(16, width=8, heads=2, layers=2)
  tokens = np.arange(6)[None] % 4
  later = tokens + (np.arange(6) == 3)

  @jax.jit
  def run(parts, query, key):
    at = lambda x: turned(jnp.broadcast_to(x, (1, 8, 1, 6)))[0, :, 0]
    params = model.init(jax.random.key(1), tokens)["params"]
    logits = [model.apply({"params": params}, x) for x in (tokens, later)]
    return attention(*parts), at(query) @ at(key).T, logits

  found, products, (before, after) = jax.device_get(run(parts, query, key))
  # Sums of five terms in float32.
  np.testing.assert_allclose(found, attended(*parts), atol=1e-5)
  for distance in range(-7, 8):
    # Angles of up to 7 radians are known to 1e-6 in float32.
    np.testing.assert_allclose(np.ptp(np.diagonal(products, distance)), 0, atol=1e-5)
  np.testing.assert_allclose(products[0, 0], query @ key, rtol=1e-5, atol=1e-6)
  assert np.ptp(products[0]) > 0.1
  assert before.shape == (1, 6, 16)
  assert np.array_equal(before[:, :3], after[:, :3])
  assert not np.allclose(before[:, 3:], after[:, 3:])


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


def test_mlp_drops_two_thirds_as_many_pixels_as_units():
  """The first layer is the identity of 64 pixels, which none of them makes zero."""
  network, _ = SMALL["mlp"](dropout=0.3)
  images = np.full((400, *DIGITS), 255, np.uint8)

  @jax.jit
  def run():
    params = network.init(jax.random.key(0))
    params["dense1"]["kernel"][...] = params["dense2"]["kernel"][...] = jnp.eye(64)
    params["head"]["kernel"][...] = jnp.eye(64, 10)
    return network.train(params, images, jax.random.key(1))

  kept = np.asarray(run())
  # A unit of 1 is there with probability 0.8 * 0.7 * 0.7, as large as its inverse.
  p, n = 0.8 * 0.7 * 0.7, kept.size
  assert set(np.unique(kept.round(4))) == {0, np.float32(1 / p).round(4)}
  assert abs((kept > 0).mean() - p) < 5 * np.sqrt(p * (1 - p) / n)


def test_batch_norm_normalizes_by_the_batch_while_it_trains():
  """Tests have known statistics, and do not know the other images."""
  network, images = image_network("alexnet", dropout=0.0)
  changed = np.concatenate([images[:1], 255 - images[1:]])

  @jax.jit
  def run(images, changed):
    params = network.init(jax.random.key(0))
    kept = network.statistics(params, images)
    trained = [network.train(params, x, None) for x in (images, changed)]
    return trained, [network.test(params, kept, x) for x in (images, changed)]

  trained, tested = jax.device_get(run(images, changed))
  # With the statistics of the very batch, tests are like training, to float32.
  np.testing.assert_allclose(tested[0], trained[0], rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(tested[1][0], tested[0][0], rtol=1e-5, atol=1e-5)
  assert not np.allclose(trained[1][0], trained[0][0], atol=1e-2)
  images = np.zeros((1, *DIGITS), np.uint8)
  alexnet = functools.partial(networks.AlexNet, DIGITS, 10)
  with pytest.raises(ValueError, match="`known` must be inputs to train on"):
    Task(alexnet, (images, np.zeros(1, np.int32)), jax.make_mesh((1,), ("data",)))


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


LEARNT = {
  "mlp": lambda: image_network("mlp", hidden=64, dropout=0.1),
  "lstm": lambda: text_network("lstm", 16, width=32, dropout=0.1),
  "gru": lambda: text_network("gru", 16, width=8, hidden=32),
} | {
  name: functools.partial(image_network, name)
  for name in ("vgg", "alexnet", "lenet", "resnet")
}


@pytest.mark.parametrize("name", ["mlp", *slow(*(x for x in LEARNT if x != "mlp"))])
def test_networks_learn(name):
  network, inputs = LEARNT[name]()
  if name in networks.TEXTS:
    learns(network, inputs, inputs.astype(np.int32)[:, ::-1], steps=150)
  else:
    # AlexNet jumps at the rate of the others, to 3.8 from 0.2 two steps before.
    rate = 1e-3 if name == "alexnet" else 3e-3
    learns(network, inputs, np.arange(4), steps=20, rate=rate)
