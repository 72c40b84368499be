"""The benchmark's nets that are cut over workers take the steps of whole nets."""

import doctest

import arms
import cut_convolutions
import hybrid_training
import jax
import jax.numpy as jnp
import model_parallel_nets
import numpy as np
import optax
import pytest
from cut_training import WORKERS, Arm, Images

from gradcomp.codecs import Dense, EightBit

CLASSES = 10
NETS = {
  "local": cut_convolutions.locally_connected(8),
  "dense": cut_convolutions.three_dense(8, 16),
}


def images(count):
  rng = np.random.default_rng(0)
  x = rng.random((count, 64), np.float32)
  return Images(jnp.asarray(x), jnp.asarray(rng.integers(0, CLASSES, count)))


def whole(net, params, x):
  """Logits of a net that nobody cuts, from ``[b, 64]`` pixels, without dropout."""
  front, layers = params
  features = net.features(front, x.reshape(-1, 8, 8, 1))
  keep = lambda y, layer: y
  return net.apply(layers, features, keep, keep)[:, :CLASSES]


def joined(cut):
  """Puts the columns of all workers side by side."""
  return jax.tree.map(lambda x: jnp.concatenate([*x], axis=-1), cut)


@pytest.mark.parametrize("name", NETS)
def test_a_step_in_float32_is_that_of_the_whole_net(name, monkeypatch):
  """Its gradients are sums in another order: ten times the eighth of an ulp of 1."""
  monkeypatch.setattr(hybrid_training, "_DROPPED", 0.0)
  net, given, key = NETS[name], images(16), jax.random.key(3)
  rule = optax.sgd(1.0)
  way = hybrid_training.by_both(Arm("model", Dense()), net, CLASSES, rule)
  state = jax.jit(way.start)(key)
  front, cut = state[0]
  params = front, jax.jit(joined)(cut)
  # A batch of 18 is no multiple of the workers.
  more = images(18).x
  found = jax.jit(way.predict)(state, more, key)
  np.testing.assert_allclose(
    found, jax.jit(whole, static_argnums=0)(net, params, more), rtol=1e-5, atol=1e-5
  )

  def loss(params):
    logits = whole(net, params, given.x)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, given.labels)
    return each.mean()

  (front, cut), *_ = jax.jit(way.step)(state, given, key)
  after = lambda params: jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))
  expected = jax.jit(after)(params)
  for got, want in zip(
    jax.tree.leaves((front, jax.jit(joined)(cut))),
    jax.tree.leaves(expected),
    strict=True,
  ):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_patches_are_those_of_a_convolution():
  x = jax.random.normal(jax.random.key(0), (2, 5, 5, 3))
  w = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))
  layer = {"w": w.reshape(27, 4), "b": jnp.zeros(4)}
  dims = ("NHWC", "HWIO", "NHWC")
  plain = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
  got = cut_convolutions.convolved(layer, x, 3)
  np.testing.assert_allclose(got, jax.nn.relu(plain), rtol=1e-5, atol=1e-5)
  # The same weights in every place make a local layer a convolution.
  of_places = {"w": jnp.broadcast_to(layer["w"], (5, 5, 27, 4)), "b": jnp.zeros(4)}
  local = cut_convolutions.local(of_places, x)
  np.testing.assert_allclose(local, got, rtol=1e-5, atol=1e-5)


def test_normalization_divides_by_the_activity_of_nine_channels():
  x = np.zeros((1, 1, 1, 20), np.float32)
  x[..., 10] = 100.0
  x[..., [6, 14, 15]] = 1.0
  got = np.asarray(cut_convolutions.normalized(jnp.asarray(x)))[0, 0, 0]
  near = (1 + 1e-3 / 9 * (1e4 + 1)) ** -0.75
  np.testing.assert_allclose(
    got[[6, 14]], [near, (1 + 1e-3 / 9 * 10002) ** -0.75], 1e-5
  )
  np.testing.assert_allclose(got[15], 1.0, rtol=1e-3)


def test_columns_of_all_workers_are_sent_in_the_type_of_the_arm():
  """With 8 bits the step differs from that in float32, and little."""
  net, given, key = NETS["local"], images(16), jax.random.key(3)
  moved = []
  for codec in (Dense(), EightBit()):
    way = hybrid_training.by_both(Arm("model", codec), net, CLASSES, optax.sgd(1.0))
    state = jax.jit(way.start)(key)
    after = jax.jit(way.step)(state, given, key)
    change = jax.tree.map(np.subtract, *jax.device_get((after[0], state[0])))
    moved.append([np.concatenate([*map(np.ravel, jax.tree.leaves(x))]) for x in change])
  for exact, coded in zip(*moved, strict=True):
    error = np.linalg.norm(coded - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.1


def test_the_page_compares_seed_by_seed():
  found = {
    "options": dict.fromkeys(
      ("filters", "hidden", "workers", "batch", "steps", "rate", "images"), 1
    )
    | {"seeds": 3, "tested": 500},
    "accuracy_percent": {
      "net": {"f32": [97.0, 98.0, 99.0], "linear": [96.0, 97.0, 98.5]}
    },
    "seconds": 7,
  }
  text = model_parallel_nets.markdown(found)
  # 2.5 / 3 points on an error of 2: the t of two degrees of freedom is 4.303.
  assert "| net | linear | +0.83 ± 0.72 | +42 % |" in text
  assert "One image more or less is 0.20 points" in text


@pytest.mark.parametrize("module", [arms, model_parallel_nets], ids=str)
def test_the_examples_run(module):
  found = doctest.testmod(module)
  assert found.attempted and not found.failed


def test_workers_divide_what_is_cut():
  assert cut_convolutions.padded(CLASSES) == 12 and 12 % WORKERS == 0
