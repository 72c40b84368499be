"""The benchmark's nets that are sharded over workers take the steps of whole nets."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.study.model_parallel import convolutions
from benchmarks.study.model_parallel.ways import Images, joined
from gradcomp.codecs import Dense

CLASSES = 10
NETS = [convolutions.locally_connected(8), convolutions.three_dense(8, 16)]


def images(count):
  rng = np.random.default_rng(0)
  x = rng.random((count, 64), np.float32)
  return Images(jnp.asarray(x), jnp.asarray(rng.integers(0, CLASSES, count)))


def whole(net, params, x):
  """Logits of a net that nobody cuts, from ``[b, pixels]``, without dropout."""
  front, layers = params
  features = net.features(front, convolutions.square(x))
  keep = lambda y, layer: y
  return net.apply(layers, features, keep, keep)[:, :CLASSES]


close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("net", NETS, ids=["local", "dense"])
def test_a_step_in_float32_is_that_of_the_whole_net(net, monkeypatch):
  """Its gradients are sums in another order: ten times the eighth of an ulp of 1."""
  monkeypatch.setattr(convolutions, "_DROPPED", 0.0)
  given, key = images(16), jax.random.key(3)
  way = convolutions.by_both(Dense(), net, CLASSES, lambda _: optax.sgd(1.0))
  state = jax.jit(way.start)(key)
  front, cut = state[0]
  params = front, jax.jit(joined)(cut)
  # A batch of 18 is no multiple of the workers.
  more = images(18).x
  want = jax.jit(whole, static_argnums=0)(net, params, more)
  close(jax.jit(way.predict)(state, more, key), want)

  @jax.jit
  @jax.value_and_grad
  def loss_and_grads(params):
    logits = whole(net, params, given.x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, given.labels).mean()

  ((front, cut), *_), found = jax.jit(way.step)(state, given, key)
  loss, grads = loss_and_grads(params)
  np.testing.assert_allclose(found, loss, rtol=1e-5)
  close((front, jax.jit(joined)(cut)), jax.tree.map(jnp.subtract, params, grads))


def tiny(passes):
  """A net of a dense layer in front of two that are cut, of tanh, updated each pass."""

  def apply(layers, x, gather, drop):
    x = gather(jnp.tanh(x @ layers[0]["w"] + layers[0]["b"]), 0)
    return gather(x @ layers[1]["w"] + layers[1]["b"], 1)

  return convolutions.Net(
    init_front=lambda key: convolutions.drawn(key, (4, 6))[0],
    features=lambda front, x: jnp.tanh(x.reshape(-1, 4) @ front["w"] + front["b"]),
    init_layers=lambda key, classes: convolutions.drawn(key, (6, 8), (8, classes)),
    apply=apply,
    last=1,
    passes=passes,
    updates=passes,
  )


def test_dense_layers_are_updated_behind_each_sub_batch():
  """Two sub-batches against a model in float64, whose gradients are written out."""

  def descend(layer, inputs, error):
    layer["w"] = layer["w"] - rate * inputs.T @ error
    layer["b"] = layer["b"] - rate * error.sum(axis=0)

  rng, rate = np.random.default_rng(0), 0.5
  x = rng.normal(size=(16, 4)).astype(np.float32)
  labels = rng.integers(0, 4, 16)
  way = convolutions.by_both(Dense(), tiny(2), 4, lambda _: optax.sgd(rate))
  state = jax.jit(way.start)(jax.random.key(1))
  double = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
  front, (one, two) = double((state[0][0], jax.jit(joined)(state[0][1])))
  errors, total = np.zeros((16, 6)), 0.0
  features = np.tanh(x @ front["w"] + front["b"])
  for part in (0, 1):
    # Of four samples a worker, the first two and then the last two.
    own = [i for i in range(16) if i % 4 // 2 == part]
    hidden = np.tanh(features[own] @ one["w"] + one["b"])
    logits = hidden @ two["w"] + two["b"]
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    total -= np.log(shares[range(8), labels[own]]).mean() / 2
    error = (shares - np.eye(4)[labels[own]]) / 8
    behind = (error @ two["w"].T) * (1 - hidden**2)
    errors[own] = behind @ one["w"].T / 2  # the step's mean has twice the samples
    descend(two, hidden, error)
    descend(one, features[own], behind)
  descend(front, x, errors * (1 - features**2))
  given = Images(jnp.asarray(x), jnp.asarray(labels))
  ((new, cut), *_), loss = jax.jit(way.step)(state, given, jax.random.key(1))
  close((new, jax.jit(joined)(cut), loss), (front, [one, two], total))


def test_layers_are_convolutions():

  @jax.jit
  def layers():
    x = jax.random.normal(jax.random.key(0), (2, 5, 5, 3))
    w = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))
    dims = ("NHWC", "HWIO", "NHWC")
    plain = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
    layer = {"w": w.reshape(27, 4), "b": jnp.zeros(4)}
    spread = layer | {"w": jnp.broadcast_to(layer["w"], (5, 5, 27, 4))}
    found = convolutions.convolved(layer, x, 3), convolutions.local(spread, x)
    return found, (jax.nn.relu(plain),) * 2

  close(*layers())
