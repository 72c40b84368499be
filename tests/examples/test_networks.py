"""The examples' networks: sizes, dropout, batch norm, and two of them in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

from examples import image_classification, language_model
from examples.lib import images as data
from examples.lib import texts
from examples.lib.training import Task, functions, takes_dropout

IMAGES, TEXTS = image_classification.MODELS, language_model.MODELS
MNIST, DIGITS = (28, 28, 1), (8, 8, 1)
# Of images of MNIST and of digits, and of ASCII, as docstrings say.
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
  return functions(functools.partial(IMAGES[name], shape, 10, **sizes), images), images


def text_network(name, symbols=128, **sizes):
  tokens = np.random.default_rng(0).integers(symbols, size=(2, 5)).astype(np.uint8)
  network = functools.partial(TEXTS[name], symbols, **sizes)
  made = network() if name == "transformer" else network  # of flax linen
  return functions(made, tokens), tokens


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
  every = IMAGES | TEXTS
  assert COUNTS.keys() == every.keys()
  if name in TEXTS:
    network, tokens = text_network(name)
    assert sizes_of(network, tokens) == (COUNTS[name], (2, 5, 128))
  else:
    for shape, count in zip((MNIST, DIGITS), COUNTS[name], strict=True):
      network, images = image_network(name, shape)
      assert sizes_of(network, images) == (count, (4, 10))
    assert sizes_of(*image_network(name, (11, 9, 3)))[1] == (4, 10)  # in color
  assert network.drops == (name in DROPPING)
  assert takes_dropout(every[name]) == (name in DROPPING | {"transformer"})
  if name in ("lstm", "transformer"):  # The output layer is the embedding.
    few, many = (sizes_of(*text_network(name, n, width=32))[0] for n in (100, 200))
    assert many - few == 100 * 32 + (100 if name == "lstm" else 0)  # biases


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
      cell = scipy.special.expit(f + 1) * cell + scipy.special.expit(i) * np.tanh(g)
      state = scipy.special.expit(o) * np.tanh(cell)
      out.append(state)
    x = np.stack(out, axis=1)
  expected = x @ p["embed"]["embedding"].T + p["bias"]
  # float32 over ten steps of states below 1.
  np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_a_transformer_sees_no_later_byte():
  query, key = np.random.default_rng(0).standard_normal((2, 6), np.float32)
  model = texts.Transformer(16, width=8, heads=2, layers=2)
  tokens = np.arange(6)[None] % 4
  later = tokens + (np.arange(6) == 3)

  @jax.jit
  def run(query, key):
    at = lambda x: texts.turned(jnp.broadcast_to(x, (1, 8, 1, 6)))[0, :, 0]
    params = model.init(jax.random.key(1), tokens)["params"]
    logits = [model.apply({"params": params}, x) for x in (tokens, later)]
    return at(query) @ at(key).T, logits

  products, (before, after) = jax.device_get(run(query, key))
  # Angles of up to 7 radians are known to 1e-6 in float32.
  assert max(np.ptp(np.diagonal(products, x)) for x in range(-7, 8)) < 1e-5
  np.testing.assert_allclose(products[0, 0], query @ key, rtol=1e-5, atol=1e-6)
  assert np.ptp(products[0]) > 0.1
  assert np.array_equal(before[:, :3], after[:, :3])
  assert not np.allclose(before[:, 3:], after[:, 3:])


@pytest.mark.parametrize(
  "make, name, sizes",
  [
    (image_network, "mlp", dict(hidden=64)),
    (text_network, "lstm", dict(symbols=16, width=8)),
    (text_network, "transformer", dict(symbols=16, width=8, heads=2, layers=1)),
  ],
)
def test_dropout_draws_from_the_key_and_leaves_tests_alone(make, name, sizes):
  (dropping, inputs), (plain, _) = (make(name, **sizes, dropout=x) for x in (0.5, 0.0))
  assert dropping.drops and not plain.drops

  @jax.jit
  def logits():
    params = plain.init(jax.random.key(0))
    drawn = [dropping.train(params, inputs, jax.random.key(i)) for i in (1, 1, 2)]
    tests = [x.test(params, None, inputs) for x in (dropping, plain)]
    return drawn, tests, plain.train(params, inputs, None)

  (one, again, other), tests, trained = jax.device_get(logits())
  assert np.array_equal(one, again)
  assert not np.allclose(one, other) and not np.allclose(one, trained)
  assert all(np.array_equal(test, trained) for test in tests)


def test_batch_norm_normalizes_by_the_batch_while_it_trains():
  network, images = image_network("alexnet", dropout=0.0)

  @jax.jit
  def run(*both):
    params = network.init(jax.random.key(0))
    kept = network.statistics(params, both[0])
    trained = [network.train(params, x, None) for x in both]
    return trained, [network.test(params, kept, x) for x in both]

  changed = np.concatenate([images[:1], 255 - images[1:]])
  trained, tested = jax.device_get(run(images, changed))
  # With the statistics of the very batch, tests are like training, to float32.
  np.testing.assert_allclose(tested[0], trained[0], rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(tested[1][0], tested[0][0], rtol=1e-5, atol=1e-5)
  assert not np.allclose(trained[1][0], trained[0][0], atol=1e-2)
  alexnet = functools.partial(data.AlexNet, DIGITS, 10)
  with pytest.raises(ValueError, match="`known` must be inputs to train on"):
    Task(alexnet, (images, np.arange(4)), jax.make_mesh((1,), ("data",)))


@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_colour_images_are_cropped_and_mirrored_while_a_network_trains(name):
  rows, columns = 8, 12
  places = np.arange(rows * columns, dtype=np.uint8).reshape(rows, columns)
  images = np.stack([np.stack([places + i] * 3, axis=-1) for i in range(64)])
  made = data.network(IMAGES[name], images.shape[1:], 10)(rngs=nnx.Rngs(0))
  seen = []

  def keep(images, **options):
    assert (options == {}) == (name == "lenet")
    seen.append(np.asarray(images))

  made.network = keep
  for seed in (1, 1, 2):
    made(images, rngs=nnx.Rngs(dropout=seed))
  made.set_attributes(deterministic=True)
  made(images)
  first, again, other, middle = seen
  assert np.array_equal(middle, images[:, 1:7, 1:10])  # 6 of 8 rows, 9 of 12 columns
  assert np.array_equal(first, again)
  assert not np.array_equal(first, other)
  # Each is a part of its image, whole or mirrored; all places and both ways occur.
  found = set()
  for whole, part in zip(images, first, strict=True):
    mirrored = bool(part[0, 0, 0] > part[0, 1, 0])
    part = part[:, ::-1] if mirrored else part
    row, column = divmod(int(part[0, 0, 0] - whole[0, 0, 0]), columns)
    assert np.array_equal(part, whole[row : row + 6, column : column + 9])
    found.add((mirrored, row, column))
  each = [*map(set, zip(*found, strict=True))]
  assert each == [{False, True}, {0, 1, 2}, {0, 1, 2, 3}]
