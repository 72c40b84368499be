"""The transformer of the examples is one, and trains with parameters that are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.lib.data import text
from examples.lib.networks import Transformer, attention, turned
from examples.lib.sharded.fsdp import Fsdp
from gradcomp.codecs import QSGD, Dense


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
  parts = jax.random.normal(jax.random.key(0), (3, 2, 5, 3, 4))
  # Sums of five terms in float32.
  np.testing.assert_allclose(attention(*parts), attended(*parts), atol=1e-5)


def test_turned_products_depend_on_the_distance():
  query, key = jax.random.normal(jax.random.key(0), (2, 6))
  at = lambda x: turned(jnp.broadcast_to(x, (1, 8, 1, 6)))[0, :, 0]
  products = np.asarray(at(query) @ at(key).T)
  for distance in range(-7, 8):
    # Angles of up to 7 radians are known to 1e-6 in float32.
    np.testing.assert_allclose(np.ptp(np.diagonal(products, distance)), 0, atol=1e-5)
  np.testing.assert_allclose(products[0, 0], query @ key, rtol=1e-5)
  assert np.ptp(products[0]) > 0.1


def test_transformer_sees_no_later_byte():
  model = Transformer(16, width=8, heads=2, layers=2)
  tokens = jax.random.randint(jax.random.key(0), (1, 6), 0, 16)

  @jax.jit
  def logits(tokens):
    params = model.init(jax.random.key(1), tokens)["params"]
    return model.apply({"params": params}, tokens)

  before, after = logits(tokens), logits(tokens.at[0, 3].add(1))
  assert before.shape == (1, 6, 16)
  assert np.array_equal(before[:, :3], after[:, :3])
  assert not np.allclose(before[:, 3:], after[:, 3:])


WORKERS = 4


def small_loss(params, batch):
  """Of a model whose matrices fill whole rows of 128 elements for each worker."""
  model = Transformer(32, width=32, heads=2, layers=1)
  logits = model.apply({"params": params}, batch[0])
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def small_params():
  tokens = np.zeros((1, 2), np.uint8)
  return Transformer(32, width=32, heads=2, layers=1).init(jax.random.key(0), tokens)[
    "params"
  ]


def small_batches(count):
  drawn = text.batches(np.arange(1000, dtype=np.uint8) % 31, 2 * WORKERS, 8, seed=0)
  return [next(drawn) for _ in range(count)]


def cut(tree):
  """Parts of the first axis, stacked on an axis of the workers."""
  return jax.tree.map(lambda x: jnp.reshape(x, (WORKERS, -1, *x.shape[1:])), tree)


@pytest.fixture(scope="module")
def plain():
  """Two steps of Adam on the whole batch: the losses, the last gradient, parameters."""

  @jax.jit
  def steps():
    params = small_params()
    adam = optax.adam(1e-3)
    state = adam.init(params)
    losses = []
    for batch in small_batches(2):
      loss, grads = jax.value_and_grad(small_loss)(params, batch)
      updates, state = adam.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      losses.append(loss)
    return jnp.stack(losses), grads, params

  return steps()


def training(feedback, weights, grads):
  """Makes two steps of four workers: the losses, and each one's residuals and parts."""
  fsdp = Fsdp(
    loss_fn=small_loss,
    optimizer=optax.adam(1e-3),
    weights=weights,
    grads=grads,
    feedback=feedback,
  )

  @jax.jit
  def run():
    def worker(shards, *batches):
      state, losses = fsdp.init(shards), []
      for batch in batches:
        shards, state, metrics = fsdp.step(shards, state, batch)
        losses.append(metrics["loss"])
      return jnp.stack(losses), state.residuals, shards

    each = jax.vmap(worker, axis_name="data")
    return each(cut(small_params()), *map(cut, small_batches(2)))

  return run


def test_cut_parameters_train_as_whole_ones_do(plain):
  losses, residuals, shards = training(True, Dense(), Dense())()
  # Four means of two sequences are added up, and not one of eight.
  np.testing.assert_allclose(losses, np.tile(plain[0], (WORKERS, 1)), rtol=1e-5)
  for got, want, grad in zip(
    *map(jax.tree.leaves, (shards, cut(plain[2]), cut(plain[1]))), strict=True
  ):
    # Adam divides by the gradient's size: what is next to zero may go either way.
    sure = np.abs(grad) > 1e-5
    np.testing.assert_allclose(got[sure], want[sure], atol=1e-5)
    assert sure.mean() > 0.5
  kept = jax.tree.leaves(residuals)
  assert len(kept) == 5 and not any(np.any(x) for x in kept)  # float32 loses nothing


def test_cut_parameters_keep_what_their_gradients_lose(plain):
  weights, grads = (QSGD(bits=bits, bucket_size=128) for bits in (8, 4))
  losses, residuals, _ = training(True, weights, grads)()
  np.testing.assert_allclose(losses[0], plain[0], rtol=0.02)  # of weights in 8 bits
  for kept, like in zip(
    jax.tree.leaves(residuals),
    [x for x in jax.tree.leaves(plain[2]) if x.ndim > 1],
    strict=True,
  ):
    assert kept.shape == (WORKERS, *like.shape)
    own = np.stack([np.split(kept[i], WORKERS)[i] for i in range(WORKERS)])
    assert np.any(kept) and not np.any(own)  # a worker sends itself nothing
  _, forgotten, _ = jax.eval_shape(training(False, weights, grads))
  assert not jax.tree.leaves(forgotten)
